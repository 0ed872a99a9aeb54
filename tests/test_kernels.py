"""Each fast kernel beside the plain expression that it stands for."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

from slipstream.data.base import IGNORED
from slipstream.job.models import DecoderModel
from slipstream.plan import Plan
from slipstream.plan.layout import Layout
from slipstream.train.kernels import fp8, int8, linear_cross_entropy, products, rotary, swiglu
from slipstream.train.kernels.attention import attend, attend_backward, attend_plainly, attend_plainly_backward
from slipstream.train.kernels.document_attention import (
    attend_within,
    attend_within_plainly,
    block_mask,
    document_mask,
)
from slipstream.train.kernels.layers import SHORT, ChosenLinear, choose_products
from slipstream.train.models.decoder import Decoder, FeedForward, Rotation
from slipstream.train.models.folded import (
    FoldedFeedForward,
    JoinedBlock,
    JoinedFeedForward,
    TurnedAttention,
    add_rows,
    fold,
)
from slipstream.train.optim.adamw import LeanAdamW, round_at_random
from slipstream.train.optim.sgd import LeanSGD

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_attention_to_a_part_of_the_keys(dtype, queries, keys, causal):
    keys = queries if causal else keys
    q, k, v = random(dtype, 2, 3, queries, 8), random(dtype, 2, 3, keys, 8), random(dtype, 2, 3, keys, 8)
    grad = random(dtype, 2, 3, queries, 8) + 1
    output, total = attend(q, k, v, causal)
    made = (output, total, *attend_backward(grad, q, k, v, output, total, causal))
    exact = [tensor.double() for tensor in (q, k, v, grad)]
    plain, plain_total = attend_plainly(*exact[:3], causal)
    expected = (plain, plain_total, *attend_plainly_backward(exact[3], *exact[:3], plain, plain_total, causal))
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])


def begins_of(length: int, *rows: list[int]) -> torch.Tensor:
    """Sequences in which documents begin at these places."""
    begins = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, places in zip(begins, rows, strict=True):
        for place in sorted(places):
            row[place:] = place
    return begins


PLACES = st.lists(st.integers(0, 700), max_size=6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), PLACES, PLACES, st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2)]))
def test_attention_within_documents(length, one, other, heads):
    begins = begins_of(length, [place // 10 for place in one], [place // 10 for place in other])
    values = [
        random(torch.float64, 2, count, length, 8) + shift
        for count, shift in zip(heads[:1] + heads[1:] * 2, range(3), strict=True)
    ]
    mask, made = document_mask(begins, torch.float64, 8), []
    for compute in (partial(attend_within, mask=mask), partial(attend_within_plainly, begins=begins)):
        leaves = [x.clone().requires_grad_() for x in values]
        y = compute(*leaves)
        made.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 700), PLACES, PLACES)
def test_blocks_are_those_that_looking_at_all_tokens_gives(length, one, other):
    blocks = block_mask(begins_of(length, one, other))
    looked_at = create_block_mask(blocks.mask_mod, 2, None, length, length, device="cpu")
    assert torch.equal(blocks.to_dense(), looked_at.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(blocks, name), getattr(looked_at, name))


def test_flex_attention_within_documents():
    """On a CPU it has a forward alone."""
    q, k, v = (random(torch.float32, 2, heads, 300, 16) for heads in (4, 2, 2))
    begins = begins_of(300, [7, 8, 130], [260])
    made = attend_within(q, k, v, block_mask(begins))
    torch.testing.assert_close(made, attend_within_plainly(q, k, v, begins), rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 12), classes=st.integers(1, 30), ignored=st.floats(0, 1))
def test_head_and_loss_in_one(rows, width, classes, ignored):
    hidden, weight = random(torch.float64, rows, width), random(torch.float64, classes, width)
    targets = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(rows))
    targets[torch.rand(rows, generator=torch.Generator().manual_seed(classes)) < ignored] = IGNORED
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_cross_entropy, "ROWS", 7)
        for compute in (linear_cross_entropy.linear_cross_entropy, linear_cross_entropy.linear_cross_entropy_plainly):
            leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            loss = compute(*leaves, targets)
            (loss / 3).backward()
            made.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("linear", [fp8.linear, partial(fp8.linear, by_row=True), int8.linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_in_8_bits_is_the_same_compiled(linear, dtype):
    """In torch 2.11 a compiled autograd function whose result has two names gives no gradient, and no error."""
    made = []
    for compute in (linear, torch.compile(linear, fullgraph=True, dynamic=False, backend="aot_eager")):
        leaves = random(dtype, 64, 96).requires_grad_(), random(dtype, 48, 96).requires_grad_()
        y = compute(*leaves, None)
        y.float().square().sum().backward()
        made.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for eager, compiled in zip(*made, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize(
    ("linear", "least", "most"),
    [(fp8.linear, 1e-3, 0.08), (partial(fp8.linear, by_row=True), 1e-3, 0.08), (int8.linear, 1e-4, 0.02)],
    ids=["fp8", "fp8-rows", "int8"],
)
def test_a_linear_layer_in_8_bits(linear, least, most):
    x, weight, grad = random(torch.float32, 64, 96), random(torch.float32, 48, 96), random(torch.float32, 64, 48)
    leaves = x.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(*leaves, None)
    y.backward(grad.bfloat16())
    for ours, exact in ((y, x @ weight.T), (x.grad, grad @ weight), (weight.grad, grad.T @ x)):
        off = float((ours.detach().float() - exact.detach()).norm() / exact.detach().norm())
        assert least < off < most, "as near as so few bits allow, and not nearer"


@pytest.mark.parametrize(("by_row", "most"), [(False, 2.0), (True, 0.08)])
def test_with_scales_for_rows_an_outlier_spoils_its_own_row_alone(by_row, most):
    x, weight = random(torch.float32, 32, 64), random(torch.float32, 16, 64)
    x[3] *= 1e6
    y, exact = fp8.linear(x, weight, None, by_row=by_row), x @ weight.T
    off = float((y[:3] - exact[:3]).norm() / exact[:3].norm())
    assert off < most and (by_row or off > 0.5)


def test_sizes_that_fp8_cannot_take_are_multiplied_as_ever():
    x, weight = random(torch.float32, 3, 5), random(torch.float32, 2, 5)
    torch.testing.assert_close(fp8.linear(x, weight, None), x @ weight.T)


@pytest.mark.parametrize("skip", [False, True])
def test_our_adamw_is_torchs(skip):
    """The one for the GPU, written out; clipped by a factor, or left out."""
    start, gradients = random(torch.float32, 40, 3), [random(torch.float32, 40, 3) * n for n in (1, 2, 3)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    groups = {"weight_decay": 0.1}
    lean = LeanAdamW([{"params": [ours], **groups}], 1e-2, (0.9, 0.95), 1e-8, torch.float32)
    plain = torch.optim.AdamW([{"params": [theirs], **groups}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    lean.factor, lean.skip = torch.tensor(0.5), torch.tensor(float(skip))
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient * 0.5
        lean.step()
        if not skip:
            plain.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert float(lean.state[ours]["step"]) == (0 if skip else 3)


@pytest.mark.parametrize("nesterov", [False, True])
def test_our_sgd_is_torchs(nesterov):
    """Clipped by a factor; the first step of four is left out, and leaves nothing behind."""
    start, gradients = random(torch.float32, 40, 3), [random(torch.float32, 40, 3) * n for n in (1, 2, 3, 4)]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    lean = LeanSGD([ours], lr=0.1, momentum=0.9, nesterov=nesterov, fused=True)
    plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=nesterov)
    for number, gradient in enumerate(gradients):
        ours.grad, theirs.grad = gradient.clone(), gradient * 0.5
        lean.factor, lean.skip = torch.tensor(0.5), torch.tensor(float(number == 0))
        lean.step()
        if number:
            plain.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_rounding_at_random_keeps_the_mean():
    x = torch.full((100_000,), 1 + 2**-10)  # an eighth of the way from one bf16 number to the next
    rounded = round_at_random(x, seed=3).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert rounded.mean().item() == pytest.approx(x[0].item(), abs=1e-4)
    assert not torch.equal(rounded, round_at_random(x, seed=4).float())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gelu_folded_into_its_products(dtype, bias):
    """Here by the plain expressions of its two operations; tests/test_gpu.py has the kernels."""
    made = []
    for kind in (FeedForward, FoldedFeedForward):
        part = FeedForward(DecoderModel(layers=1, hidden=16, heads=2, bias=bias, activation="gelu")).double()
        part.__class__ = kind
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.copy_(random(torch.float64, *parameter.shape))
        x = random(torch.float64, 2, 8, 16).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float64):
            y = part(x)
        y.double().square().sum().backward()
        made.append((y.detach(), x.grad, *(parameter.grad for parameter in part.parameters())))
    for plain, folded in zip(*made, strict=True):
        within = 1e-12 if dtype == torch.float64 else 0.02
        assert float((plain.double() - folded.double()).norm() / plain.double().norm()) < within


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("queries", "groups"), [(1, 3), (4, 2)])
def test_queries_and_keys_are_turned_in_one_pass(queries, groups, documents, monkeypatch):
    """Here by the plain expressions, whose way back is that of autograd; tests/test_gpu.py has the kernel."""
    monkeypatch.setattr(rotary, "_WORTH", 0)
    rotation = Rotation(DecoderModel(layers=1, hidden=32 * queries * groups, heads=queries * groups))
    if documents:
        rotation.places = lambda length, _: torch.arange(length) - begins_of(length, [0, 5], [0, 2, 9])
    made = []
    for turn in (rotary.turn_plainly, rotary.turned):
        packed = random(torch.float64, 2, 12, groups, queries + 2, 32).requires_grad_()
        rotation.prepare(12, packed)
        parts = turn(packed, *rotation.angles)
        sum((part * random(torch.float64, *part.shape)).sum() for part in parts).backward()
        made.append((*(part.detach() for part in parts), packed.grad))
    q, k, v = packed.detach().split((queries, 1, 1), dim=3)
    plain = [part.flatten(2, 3).transpose(1, 2) for part in (q, k, v)]
    torch.testing.assert_close(made[1][:3], (rotation(plain[0]), rotation(plain[1]), plain[2]))
    torch.testing.assert_close(made[1], made[0])


def test_swiglu_in_one_pass(monkeypatch):
    monkeypatch.setattr(swiglu, "_WORTH", 0)
    assert torch.autograd.gradcheck(swiglu.swiglu, random(torch.float64, 3, 5, 14).requires_grad_())
    both = random(torch.float64, 3, 5, 14)
    torch.testing.assert_close(swiglu.swiglu(both), torch.nn.functional.silu(both[..., :7]) * both[..., 7:])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_linear_layers_by_the_best_products(dtype, bias, monkeypatch):
    """Here by torch's; tests/test_gpu.py has the library's."""
    monkeypatch.setattr(products, "_WORTH", 0)
    made, long = [], torch.float64 if dtype == torch.float64 else torch.float32
    for linear in (torch.nn.functional.linear, products.linear):
        x, weight, added = (random(long, *shape).requires_grad_() for shape in ((2, 8, 16), (24, 16), (24,)))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float64):
            y = linear(x, weight, added if bias else None)
        y.double().square().sum().backward()
        made.append((y.detach(), x.grad, weight.grad, *([added.grad] if bias else [])))
    for plain, ours in zip(*made, strict=True):
        assert ours.dtype == plain.dtype
        within = 1e-12 if dtype == torch.float64 else 0.02
        assert float((plain.double() - ours.double()).norm() / plain.double().norm()) < within


@pytest.mark.parametrize(
    ("changes", "recompute", "wide", "short"),
    [
        ({}, "none", "01", ""),
        ({}, "full", "01", ""),
        ({}, "selective", "", ""),
        ({"precision": "fp8"}, "none", "0", "1"),
        ({"precision": "fp32"}, "none", "", ""),
        ({"device": "cpu"}, "none", "", ""),
        ({"device": "cpu", "precision": "int8"}, "none", "", "1"),
    ],
)
def test_which_blocks_take_the_best_products(changes, recompute, wide, short):
    class Own(nn.Linear):
        """Somebody's own layer, which does something else."""

        def forward(self, x):
            return super().forward(x) + 1

    asked = {"device": "cuda", "precision": "bf16", "compile": True, **changes}
    plan = Plan.model_construct(layout=Layout(micro_batch=1, recompute=recompute), **asked)
    blocks = [nn.Sequential(nn.Linear(4, 4), Own(4, 4)) for _ in range(2)]
    choose_products(blocks, plan)
    found = {number: block[0].multiply for number, block in enumerate(blocks) if isinstance(block[0], ChosenLinear)}
    assert {number for number, linear in found.items() if linear is products.linear} == {int(each) for each in wide}
    assert {number for number, linear in found.items() if linear is SHORT.get(plan.precision)} == {
        int(e) for e in short
    }
    assert all(type(block[1]) is Own for block in blocks)


@pytest.mark.parametrize(
    ("changes", "recompute", "folded"),
    [
        ({}, "none", "012"),
        ({}, "full", "012"),
        ({}, "selective", ""),
        ({"precision": "fp8"}, "none", "0"),
        ({"device": "cpu"}, "none", ""),
    ],
)
@pytest.mark.parametrize(("activation", "kind"), [("gelu", FoldedFeedForward), ("swiglu", JoinedFeedForward)])
def test_which_blocks_fold_their_activation(changes, recompute, folded, activation, kind, monkeypatch):
    """And that they learn as others do when they are compiled, one for all of a kind."""
    for module in (products, rotary, swiglu):
        monkeypatch.setattr(module, "_WORTH", 0)
    torch.compiler.reset()
    asked = {"device": "cuda", "precision": "bf16", "compile": True, **changes}
    plan = Plan.model_construct(layout=Layout(micro_batch=1, recompute=recompute), **asked)
    bias = activation == "gelu"
    positions = "learned" if activation == "gelu" else "rotary"
    section = DecoderModel(
        layers=3, hidden=64, heads=2, kv_heads=1, positions=positions, activation=activation, bias=bias
    )
    made, counter = [], CompileCounterWithBackend("aot_eager")
    for folds in (False, True):
        torch.manual_seed(0)
        model = Decoder(section, 64, 16)
        if folds:
            choose_products(model.blocks, plan)
            fold(model.blocks, plan)
            found = {number for number, block in enumerate(model.blocks) if type(block.feed_forward) is kind}
            assert found == {int(number) for number in folded}
            turned = {number for number, block in enumerate(model.blocks) if type(block.attention) is TurnedAttention}
            joined = {number for number, block in enumerate(model.blocks) if type(block) is JoinedBlock}
            assert joined == (found if activation == "swiglu" else set())
            assert turned == (set(range(3)) if folded and positions == "rotary" else set())
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend=counter, dynamic=False, fullgraph=True)
        x = random(torch.float32, 2, 16, 64).requires_grad_()
        if model.rotation is not None:
            model.rotation.prepare(16, x)
        for block in model.blocks:
            x = block(x)
        x.square().sum().backward()
        made.append([parameter.grad for parameter in model.blocks.parameters()])
    for plain, ours in zip(*made, strict=True):
        if plan.precision == "bf16":  # what 8 bits do to a gradient is tested above
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == (1 if plan.precision == "bf16" else 2)


@pytest.mark.parametrize(("tied", "workers", "adds"), [(True, 1, True), (True, 2, False), (False, 1, False)])
def test_rows_of_the_table_are_added_to_the_heads(tied, workers, adds):
    made = []
    tokens = torch.randint(0, 40, (3, 17), generator=torch.Generator().manual_seed(0))
    for plan in (None, Plan.model_construct(device="cuda", layout=Layout(micro_batch=3, replicate=workers))):
        torch.manual_seed(0)
        model = Decoder(DecoderModel(layers=1, hidden=16, heads=2, tied=tied), 64, 16).double()
        if plan:
            add_rows(model, plan)
            assert model.embed.tokens.sparse == adds
        for _ in range(2):  # micro-batches
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        assert not any(weight.grad.is_sparse for weight in model.parameters())
        made.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(made[1], made[0])


@pytest.mark.parametrize("precision", ["fp8", "fp8-rows", "int8"])
def test_the_first_block_and_the_head_are_left_in_16_bits(precision):
    model = Decoder(DecoderModel(layers=3, hidden=32, heads=2, positions="rotary"), 64, 16)
    choose_products(model.blocks, Plan.model_construct(precision=precision, device="cpu"))
    short = {name.split(".")[1] for name, part in model.named_modules() if isinstance(part, ChosenLinear)}
    assert short == {"1", "2"}


@pytest.mark.parametrize(("precision", "kinds"), [("bf16", 1), ("fp8", 2), ("fp8-rows", 2), ("int8", 2)])
def test_one_block_is_compiled_for_all_of_its_kind(precision, kinds):
    torch.compiler.reset()
    model = Decoder(DecoderModel(layers=4, hidden=32, heads=2, positions="rotary"), 64, 16)
    choose_products(model.blocks, Plan.model_construct(precision=precision, device="cpu"))
    counter = CompileCounterWithBackend("aot_eager")
    assert model.rotation is not None
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=counter, dynamic=False, fullgraph=True)
    x = random(torch.float32, 2, 16, 32).requires_grad_()
    model.rotation.prepare(16, x)
    for block in model.blocks:
        x = block(x)
    assert counter.frame_count == kinds
