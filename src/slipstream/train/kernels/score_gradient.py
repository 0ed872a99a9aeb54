"""The loss of scores, and their gradient written over them, in two passes (Triton, so on a GPU only)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.data.base import IGNORED

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _overwrite(scores, targets, losses, row_length, classes, ignored, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row to a program. The running sums are kept for each lane apart, and joined once."""
    row = tl.program_id(0).to(tl.int64)
    here = scores + row * row_length
    target = tl.load(targets + row)
    counts = target != ignored
    score = tl.load(here + target, mask=counts, other=0.0).to(tl.float32)  # before any lane writes
    columns = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), -3e38, tl.float32)  # not -inf: two of those have no difference
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        x = tl.load(here + start + columns, mask=start + columns < classes, other=-3e38).to(tl.float32)
        lower = tl.exp(-tl.abs(x - highest))  # one exponential, of whichever is the lower
        total = tl.where(x > highest, total * lower + 1.0, total + lower)
        highest = tl.maximum(highest, x)
    top = tl.max(highest, 0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    tl.store(losses + row, tl.where(counts, log_sum - score, 0.0))
    for start in range(0, classes, BLOCK):
        inside = start + columns < classes
        x = tl.load(here + start + columns, mask=inside, other=-3e38).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(start + columns == target, 1.0, 0.0)
        tl.store(here + start + columns, tl.where(counts, gradient, 0.0), mask=inside)


def overwrite_with_gradient(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of each row of scores [N, classes]; the scores become its gradient."""
    losses = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    _overwrite[(len(scores),)](
        scores, targets, losses, scores.stride(0), scores.shape[1], IGNORED, BLOCK=_BLOCK, num_warps=8
    )
    return losses
