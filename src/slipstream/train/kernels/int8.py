"""Linear layers with two of their three products in int8 (Wortsman et al. 2023, arXiv 2304.13013, "SwitchBack").

For GPUs that have no fp8. Values, weights and gradients have a scale for each row. The gradient of the weights is a sum
over all tokens, in which the errors of int8 would be the largest: it stays in 16 bits.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.train.kernels.dtypes import cast, working_dtype

_MOST = 127.0
_EVEN, _ROWS = 8, 17
"""Sizes of a product must be multiples of the first, and its rows at least the second."""


class _Linear(torch.autograd.Function):
    """x [rows, in] and weight [out, in] to [rows, out]."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = grads[0]
        return multiply(gradient, weight.T, x.dtype), (gradient.T @ x).to(weight.dtype), None


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a [m, k] times the transpose of b [n, k], both rounded to int8 row by row."""
    (short_a, scale_a), (short_b, scale_b) = quantise(a), quantise(b)
    return cast(torch._int_mm(short_a, short_b.T).float() * scale_a * scale_b.T, dtype)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [a, b] in int8, and what to multiply each row by to have it again."""
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / _MOST
    return (x.float() / scale).round().to(torch.int8).contiguous(), scale


_linear: Callable[[Tensor, Tensor, torch.dtype], Tensor] = _Linear.apply


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`, in int8 where the sizes allow it."""
    dtype, rows = working_dtype(x), x.flatten(0, -2)
    if x.is_meta or rows.shape[0] < _ROWS or any(size % _EVEN for size in (*rows.shape, *weight.shape)):
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        y = _linear(rows.to(dtype), weight, dtype).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias.to(dtype)
