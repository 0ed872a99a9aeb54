"""Backward of SwiGLU, both halves in one pass (Triton, on a GPU)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _backward(both, grad, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = 2 * row * width + column
    gate = tl.load(both + first, mask=inside).to(tl.float32)
    up = tl.load(both + first + width, mask=inside).to(tl.float32)
    g = tl.load(grad + row * width + column, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    tl.store(out + first, g * up * share * (1 + gate * (1 - share)), mask=inside)
    tl.store(out + first + width, g * gate * share, mask=inside)


def backward(both: Tensor, grad: Tensor) -> Tensor:
    """The gradient of both halves [..., 2 · n] by that of their product [..., n]."""
    width, out = grad.shape[-1], torch.empty_like(both)
    _backward[(grad.numel() // width, triton.cdiv(width, _BLOCK))](both, grad, out, width, BLOCK=_BLOCK, num_warps=4)
    return out
