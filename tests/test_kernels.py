"""Each fast kernel beside the plain expression that it stands for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.train.kernels.attention import attend, attend_backward, attend_plainly, attend_plainly_backward

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
