"""The decoder: published sizes, what may see what, and the arithmetic of rotary positions."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.job.models import DecoderModel
from slipstream.train.models import build_model
from slipstream.train.models.decoder import Attention, Decoder, Rotation, parameter_count
from slipstream.train.models.initial import normal_rows

GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True}
TEXT = Facts(inputs=(16,), outputs=61, tokens=True)


def section(**settings: object) -> DecoderModel:
    return DecoderModel.model_validate({"layers": 2, "hidden": 32, "heads": 4, **settings})


def job(**settings: object) -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "model": {"kind": "decoder", "layers": 2, "hidden": 32, "heads": 4, **settings},
            "data": {"source": "python-stdlib", "sequence": 16},
            "train": {"steps": 1, "batch": 2, "optimizer": {"name": "adamw", "lr": 1e-3}},
        }
    )


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
    ],
)
def test_published_sizes(preset: str, published: int) -> None:
    shape = DecoderModel.model_validate({"preset": preset})
    assert shape.vocabulary and shape.context
    with torch.device("meta"):
        model = Decoder(shape, shape.vocabulary, shape.context)
    assert count(model) == published
    assert parameter_count(shape, shape.vocabulary, shape.context) == published


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("bias", "tied", "kv_heads"), [(True, False, None), (False, True, 2), (True, True, 1)])
def test_every_mixture_is_counted_and_runs(
    positions: str, norm: str, activation: str, bias: bool, tied: bool, kv_heads: int | None
) -> None:
    shape = section(
        positions=positions, norm=norm, activation=activation, bias=bias, tied=tied, kv_heads=kv_heads, feed_forward=48
    )
    model = Decoder(shape, 61, 16)
    assert count(model) == parameter_count(shape, 61, 16)
    logits = model(torch.randint(0, 61, (3, 9)))
    assert logits.shape == (3, 9, 61)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("style", [{}, GPT2])
def test_no_token_sees_a_later_one(style: dict[str, object]) -> None:
    model = Decoder(section(**style), 61, 16)
    tokens = torch.randint(0, 61, (2, 16))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 61
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_grouped_queries_share_keys_and_values() -> None:
    rotation = Rotation(section(kv_heads=2))
    attention = Attention(section(kv_heads=2), rotation)
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    x = torch.randn(2, 6, 32)
    groups = attention.qkv(x).view(2, 6, 2, 4, 8).permute(0, 2, 3, 1, 4)  # two groups of two queries, a key and a value
    q, k, v = groups[:, :, :2].flatten(1, 2), groups[:, :, 2], groups[:, :, 3]
    q, k = rotation(q), rotation(k).repeat_interleave(2, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(8) + torch.full((6, 6), -math.inf).triu(1)
    expected = attention.out((scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2).reshape(2, 6, 32))
    torch.testing.assert_close(attention(x), expected, atol=1e-6, rtol=1e-5)


def test_rotary_depends_on_distance_only() -> None:
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    rotation = Rotation(section())
    qs, ks = rotation(q.expand(20, 8)), rotation(k.expand(20, 8))
    torch.testing.assert_close(qs[3] @ ks[1], qs[19] @ ks[17], atol=1e-12, rtol=0)
    torch.testing.assert_close(qs.norm(dim=1), q.norm().expand(20), atol=1e-12, rtol=0)


def test_fp64_is_fp64_throughout() -> None:
    """A table made in fp32 and cast would be off by 1e-5 at position 1000."""
    unit = torch.zeros(1001, 8, dtype=torch.float64)
    unit[:, 1] = 1.0
    turned = Rotation(section())(unit)[1000]
    angle = 1000 / 10000 ** (2 / 8)
    assert abs(float(turned[1]) - math.cos(angle)) < 1e-13
    assert abs(float(turned[5]) - math.sin(angle)) < 1e-13
    model = Decoder(section(), 61, 16).double()
    assert model(torch.randint(0, 61, (2, 16))).dtype == torch.float64


def test_autocast_keeps_one_type_in_attention() -> None:
    model = Decoder(section(kv_heads=2), 61, 16)
    tokens = torch.randint(0, 61, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(tokens), atol=0.02, rtol=0.1)


def test_a_long_context_costs_nothing_until_used() -> None:
    model = Decoder(section(context=131072), 61, 131072)
    assert not list(model.buffers())
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 61)


def test_initial_weights() -> None:
    model = Decoder(section(hidden=256, layers=8, bias=True, norm="layer"), 500, 16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif parameter.dim() == 2:
            expected = 0.02 / 4 if name.endswith(("attention.out.weight", "feed_forward.down.weight")) else 0.02
            assert abs(float(parameter.detach().std()) - expected) < expected * 0.03, name
        else:
            assert (parameter == 1).all()
    first = F.cross_entropy(model(torch.randint(0, 500, (4, 16))).flatten(0, 1), torch.randint(0, 500, (64,)))
    assert abs(float(first.detach()) - math.log(500)) < 0.3


def test_weights_follow_from_the_seed() -> None:
    def weights() -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return build_model(job(), TEXT).state_dict()

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


@given(st.integers(1, 2000), st.integers(1, 5000), st.data())
@settings(max_examples=40, deadline=None)
def test_rows_of_the_first_weights_do_not_depend_on_who_makes_them(
    rows: int, columns: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, min(rows, start + 300)))
    some = normal_rows(3, "name", (rows, columns), 0.02, range(start, stop))
    one_by_one = [normal_rows(3, "name", (rows, columns), 0.02, range(row, row + 1)) for row in (start, stop - 1)]
    assert some.shape == (stop - start, columns)
    if stop > start:
        assert torch.equal(some[:1], one_by_one[0]) and torch.equal(some[-1:], one_by_one[1])
        assert not torch.equal(some, normal_rows(3, "other", (rows, columns), 0.02, range(start, stop)))


def test_sizes_come_from_the_data() -> None:
    model = build_model(job(), TEXT)
    assert isinstance(model, Decoder)
    assert (model.vocabulary, model.context) == (61, 16)
    wider = build_model(job(vocabulary=64, context=32), TEXT)
    assert isinstance(wider, Decoder)
    assert (wider.vocabulary, wider.context) == (64, 32)


def test_what_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.vocabulary is 60, but the data has 61 token ids; set it to 61"):
        build_model(job(vocabulary=60), TEXT)
    with pytest.raises(ValueError, match="sequences of 99 tokens"):
        build_model(job(context=16), Facts(inputs=(99,), outputs=61, tokens=True))
    with pytest.raises(ValueError, match="decoder takes tokens"):
        build_model(job(), Facts(inputs=(1, 8, 8), outputs=10, tokens=False))
