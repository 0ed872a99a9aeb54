"""The loss that overwrites its scores is torch's cross-entropy, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.base import IGNORED
from slipstream.train.kernels.cross_entropy import overwriting_cross_entropy


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9), classes=st.integers(1, 40), scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
    ignored=st.floats(0, 1), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_value_and_gradient_are_torchs(rows, classes, scale, ignored, seed):
    draw = torch.Generator().manual_seed(seed)
    scores = (torch.randn(rows, classes, generator=draw, dtype=torch.float64) * scale).requires_grad_()
    targets = torch.randint(0, classes, (rows,), generator=draw)
    targets[torch.rand(rows, generator=draw) < ignored] = IGNORED
    expected = F.cross_entropy(scores, targets, reduction="sum", ignore_index=IGNORED)
    (expected * 3).backward()
    again = scores.detach().clone().requires_grad_()
    loss = overwriting_cross_entropy(again * 1.0, targets)
    (loss * 3).backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again.grad, scores.grad, rtol=1e-12, atol=1e-13)


def test_a_nan_stays_one():
    scores = torch.tensor([[0.0, float("nan")], [0.0, 1.0]], requires_grad=True)
    assert overwriting_cross_entropy(scores * 1.0, torch.tensor([0, 1])).isnan()


def test_scores_that_backward_still_needs_are_not_corrupted_silently():
    scores = torch.randn(4, 5, requires_grad=True).tanh()
    loss = overwriting_cross_entropy(scores, torch.tensor([0, 1, 2, 3]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
