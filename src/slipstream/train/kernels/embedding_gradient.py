"""Gradients of the same token summed, in their order (Triton, on a GPU)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _sum(gradient, tokens, order, total, count, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0)
    token = tl.load(tokens + at)
    before = tl.load(tokens + at - 1, mask=at > 0, other=-1)
    if token != before:  # the first of its run
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        added = tl.zeros((BLOCK,), tl.float32)
        here = token
        while here == token:
            row = tl.load(order + at)
            added += tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
            at += 1
            here = tl.load(tokens + at, mask=at < count, other=-1)
        tl.store(total + token * width + columns, added, mask=inside)


def sum_by_token(gradient: Tensor, tokens: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of a table [vocabulary, width] from those [N, width] of the tokens [N] that were looked up."""
    ordered, order = torch.sort(tokens, stable=True)
    total = torch.zeros(shape, dtype=dtype, device=gradient.device)
    count, width = gradient.shape
    _sum[(count, triton.cdiv(width, _BLOCK))](gradient.contiguous(), ordered, order, total, count, width, BLOCK=_BLOCK)
    return total
