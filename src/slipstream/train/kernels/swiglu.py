"""SwiGLU (Shazeer 2020, arXiv 2002.05202) of what a gate and its other half are, side by side in one matrix.

Backward writes both halves in one pass; the compiler, which has no such kernel, makes each element of them anew: on an
H200 1.33 ms for 32,768 rows of 2 × 8,192, and here 0.65.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.train.kernels.steps import as_one_step

_WORTH = 2**24
"""Numbers from which a pass takes a GPU longer (about 16 µs) than Python takes to launch it."""


def swiglu_plainly(both: Tensor) -> Tensor:
    """[..., 2 · n] to [..., n]: the first half through SiLU, times the second."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward_plainly(both: Tensor, grad: Tensor) -> Tensor:
    """What comes back through it."""
    gate, up = both.chunk(2, -1)
    open_ = gate.sigmoid()
    return torch.cat((grad * up * open_ * (1 + gate * (1 - open_)), grad * gate * open_), -1)


@as_one_step("swiglu_backward", lambda both, _grad: both.new_empty(both.shape))
def _backward(both: Tensor, grad: Tensor) -> Tensor:
    if not both.is_cuda:
        return swiglu_backward_plainly(both, grad)
    from slipstream.train.kernels import swiglu_halves

    return swiglu_halves.backward(both.contiguous(), grad.contiguous())


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return swiglu_plainly(both)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient: Tensor = _backward(both, grads[0])
        return gradient


_swiglu: Callable[[Tensor], Tensor] = _Swiglu.apply


def swiglu(both: Tensor) -> Tensor:
    """[..., 2 · n] to [..., n]."""
    return swiglu_plainly(both) if both.numel() < _WORTH else _swiglu(both)
