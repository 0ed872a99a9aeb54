"""Codecs as pure functions: what a code stands for, and what it leaves out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from slipstream.train.exchange.codecs import Codec
from slipstream.train.exchange.codecs.cast import Cast
from slipstream.train.exchange.codecs.int8 import Int8
from slipstream.train.exchange.codecs.onebit import OneBit
from slipstream.train.exchange.codecs.powersgd import decode, encode, orthogonal
from slipstream.train.exchange.codecs.randomk import RandomK
from slipstream.train.exchange.codecs.topk import BLOCK, TopK

NUMBERS = arrays.arrays(
    "float32",
    st.integers(1, 700),
    elements=st.floats(-6e4, 6e4, width=32) | st.floats(-(2**-10), 2**-10, width=32),
).map(torch.from_numpy)
EXACT = {
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
    "int8": Int8(16, at_random=False),
    "topk": TopK(0.1),
    "randomk": RandomK(7, scaled=False),
}
ALL = {**EXACT, "int8 at random": Int8(16, at_random=True), "onebit": OneBit(16), "randomk scaled": RandomK(7, True)}
KEY = 11


def sent(codec: Codec, x: Tensor, key: int = KEY) -> Tensor:
    return codec.decode(codec.encode(x, key), x, key)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(x=NUMBERS, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_code_stands_for_as_many_numbers_and_follows_from_its_key(name: str, x: Tensor, dtype: torch.dtype) -> None:
    codec, x = ALL[name], x.to(dtype)
    before, code = x.clone(), codec.encode(x, KEY)
    found = codec.decode(code, x, KEY)
    assert found.shape == x.shape and found.dtype == dtype and found.isfinite().all()
    assert torch.equal(code, codec.encode(x, KEY)) and torch.equal(found, codec.decode(code, x, KEY))
    assert torch.equal(x, before)
    assert code.nbytes == codec.encode(torch.ones_like(x), KEY + 1).nbytes
    assert len(x) < 2 or code.nbytes <= x.nbytes


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=100, deadline=None)
@given(x=NUMBERS)
def test_what_was_sent_and_what_was_not_are_exactly_what_was_to_be_sent(name: str, x: Tensor) -> None:
    arrives = sent(EXACT[name], x)
    left_out = x - arrives  # in fp32, as a worker remembers it
    assert torch.equal(arrives.double() + left_out.double(), x.double())


@settings(max_examples=50, deadline=None)
@given(x=NUMBERS)
def test_with_signs_it_is_within_one_rounding(x: Tensor) -> None:
    arrives = sent(OneBit(16), x)
    left_out = x - arrives
    off = (arrives.double() + left_out.double() - x.double()).abs()
    assert (off <= left_out.double().abs() * 2**-24).all()


@settings(max_examples=50, deadline=None)
@given(x=NUMBERS, at_random=st.booleans())
def test_int8_is_off_by_a_step_at_most(x: Tensor, at_random: bool) -> None:
    steps = torch.nn.functional.pad(x, (0, -len(x) % 16)).view(-1, 16).abs().amax(1).repeat_interleave(16)[: len(x)]
    off = (sent(Int8(16, at_random), x) - x).abs()
    assert (off <= steps / 127 * (1 + 2**-7) * (1 if at_random else 0.5001) + 1e-38).all()


DRAWS = 4000


def test_int8_has_the_right_mean() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(1))
    mean = sent(Int8(64, at_random=True), x.repeat(DRAWS)).view(DRAWS, -1).mean(0)
    step = float(x.abs().max()) / 127
    # Rounding is off by half a step at most, in the square mean; a mean of many by six times this hardly ever.
    assert ((mean - x).abs() < 6 * 0.505 * step / DRAWS**0.5).all()
    assert ((sent(Int8(64, at_random=False), x) - x).abs() > 0.1 * step).any(), "or there would be nothing to see"


def test_randomk_without_memory_has_the_right_mean() -> None:
    x = torch.arange(1.0, 25.0)
    mean = sent(RandomK(4, scaled=True), x.repeat(DRAWS)).view(DRAWS, -1).mean(0)
    assert ((mean - x).abs() < 6 * 3**0.5 * x / DRAWS**0.5).all()


@settings(max_examples=50, deadline=None)
@given(x=NUMBERS)
def test_topk_keeps_the_largest(x: Tensor) -> None:
    x = x[:BLOCK]
    arrives = sent(TopK(0.1), x)
    kept = arrives != 0
    assert torch.equal(arrives[kept], x[kept].bfloat16().float())
    assert kept.sum() <= max(1, round(len(x) / 10))
    left = x[~kept].abs().max() if (~kept).any() else torch.zeros(())
    assert not kept.any() or x[kept].abs().min() >= left


def test_randomk_takes_one_of_each_row() -> None:
    x = torch.ones(103)
    arrives = sent(RandomK(10, scaled=False), x)
    assert (arrives[:100].view(10, 10).sum(1) == 1).all()
    assert not torch.equal(arrives, sent(RandomK(10, scaled=False), x, KEY + 1))


def test_onebit_sends_signs_and_mean_sizes() -> None:
    x = torch.tensor([1.0, -3.0, 2.0, -2.0, 0.5, 0.5, 0.5, 0.5])
    assert sent(OneBit(4), x).tolist() == [2.0, -2.0, 2.0, -2.0, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("name", ["int8", "int8 at random", "onebit", "fp16", "topk"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_vanish(name: str, bad: float) -> None:
    x = torch.ones(64)
    x[5] = bad
    assert not sent(ALL[name], x).isfinite().all()


def test_powersgd_finds_a_matrix_of_its_rank() -> None:
    random = torch.Generator().manual_seed(2)
    thin = [torch.randn(n, 3, generator=random, dtype=torch.float64) for n in (40, 30)]
    matrix = thin[0] @ thin[1].T
    left = orthogonal(encode(matrix, torch.randn(30, 3, generator=random, dtype=torch.float64)))
    right = encode(matrix.T, left)
    assert torch.allclose(decode(left, right), matrix, atol=1e-12)
    assert torch.allclose(left.T @ left, torch.eye(3, dtype=torch.float64))
    zero = orthogonal(torch.zeros(5, 2))  # of a gradient that is zero everywhere
    assert zero.isfinite().all()
