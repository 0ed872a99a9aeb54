"""The loss of scores, and their gradient written over them, in two passes (Triton, so on a GPU only)."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.data.base import IGNORED

_BLOCK, _WARPS = 16384, 32
"""As many threads to a row as there may be: with one row, or two short ones, at a time on each multiprocessor, the
second pass finds what the first has read in the cache."""
_LANE = 8
"""Neighbours that one thread loads at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _overwrite(  # type: ignore[no-untyped-def]
    scores, targets, losses, row_length, classes, ignored, LOG2_E: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr
):
    """One row to a program. The running sums are kept for each lane apart, and joined once."""
    row = tl.program_id(0).to(tl.int64)
    here = scores + row * row_length
    target = tl.load(targets + row)
    counts = target != ignored
    score = tl.load(here + target, mask=counts, other=0.0).to(tl.float32)  # before any lane writes
    columns = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    highest = tl.full((BLOCK // LANE,), -3e38, tl.float32)  # not -inf: two of those have no difference
    total = tl.zeros((BLOCK // LANE,), tl.float32)
    for start in range(0, classes, BLOCK):
        inside = start + columns < classes
        x = tl.load(here + start + columns, mask=inside, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32) * LOG2_E
        higher = tl.maximum(highest, tl.max(x, 1))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(x - higher[:, None]), 1)
        highest = higher
    top = tl.max(highest, 0)
    log_sum = top + tl.log2(tl.sum(total * tl.exp2(highest - top), 0))
    tl.store(losses + row, tl.where(counts, log_sum / LOG2_E - score, 0.0))
    shift = tl.where(counts, log_sum, float("inf"))  # nothing is left of a row that does not count
    for start in range(0, classes, BLOCK):
        inside = start + columns < classes
        x = tl.load(here + start + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(here + start + columns, tl.exp2(x * LOG2_E - shift), mask=inside)
    tl.debug_barrier()  # all lanes have written
    tl.store(here + target, tl.exp2(score * LOG2_E - log_sum) - 1.0, mask=counts)


def overwrite_with_gradient(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of each row of scores [N, classes]; the scores become its gradient."""
    losses = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    _overwrite[(len(scores),)](
        scores, targets, losses, scores.stride(0), scores.shape[1], IGNORED,
        LOG2_E=math.log2(math.e), BLOCK=_BLOCK, LANE=_LANE, num_warps=_WARPS,
    )  # fmt: skip
    return losses
