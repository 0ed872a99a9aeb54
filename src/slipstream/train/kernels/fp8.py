"""Linear layers whose three products are in fp8 (Micikevicius et al. 2022, arXiv 2209.05433).

What enters a product is scaled so that its largest number is fp8's largest; what leaves it is scaled back. Values have
more digits (e4m3), gradients more range (e5m2). The hardware takes the left matrix by rows and the right one by
columns, so that of everything a transposed copy is needed too: one kernel writes both.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.train.kernels.dtypes import working_dtype

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_EVEN = 16
"""All sizes of a product must be multiples of this."""


class _Linear(torch.autograd.Function):
    """x [rows, in] and weight [out, in] to [rows, out]."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x8, x8_turned, x_scale = quantise(x, VALUES)
        w8, w8_turned, w_scale = quantise(weight, VALUES)
        ctx.save_for_backward(x8_turned, x_scale, w8_turned, w_scale)
        ctx.dtypes = x.dtype, weight.dtype  # type: ignore[attr-defined]
        return multiply(x8, w8, x_scale, w_scale, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x8_turned, x_scale, w8_turned, w_scale = ctx.saved_tensors  # type: ignore[attr-defined]
        of_x, of_weight = ctx.dtypes  # type: ignore[attr-defined]
        g8, g8_turned, g_scale = quantise(grads[0], GRADIENTS)
        return (
            multiply(g8, w8_turned, g_scale, w_scale, of_x),
            multiply(g8_turned, x8_turned, g_scale, x_scale, of_weight),
            None,
        )


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [a, b] in fp8, the same as [b, a], and what to multiply either by to have x again."""
    if x.is_cuda:
        x = x.bfloat16()  # of fp32 the kernel below gave NaN in the turned copy, in Triton 3.6
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    if x.is_cuda:
        from slipstream.train.kernels.fp8_cast import cast_both_ways

        return *cast_both_ways(x.contiguous(), scale, dtype), scale
    most = torch.finfo(dtype).max
    cast = (x.float() / scale).clamp(-most, most).to(dtype)
    return cast, cast.T.contiguous(), scale


def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a [m, k] times the transpose of b [n, k]."""
    if a.is_cuda:
        product: Tensor = torch._scaled_mm(a, b.T, a_scale, b_scale, out_dtype=dtype, use_fast_accum=True)
        return product
    return ((a.float() @ b.float().T) * (a_scale * b_scale)).to(dtype)


_linear: Callable[[Tensor, Tensor, torch.dtype], Tensor] = _Linear.apply


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`, in fp8 where the sizes allow it."""
    dtype, rows = working_dtype(x), x.flatten(0, -2)
    if x.is_meta or any(size % _EVEN for size in (*rows.shape, *weight.shape)):
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        y = _linear(rows.to(dtype), weight, dtype).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias.to(dtype)


def use_fp8(blocks: Iterable[nn.Module]) -> None:
    """Let the linear layers of these blocks multiply in fp8. Norms, attention, the table and the head stay as they are:
    they are a small part of the time, and more depends on their digits."""
    for block in blocks:
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
            elif hasattr(layer, "multiply"):  # a piece of one
                layer.multiply = linear  # type: ignore[assignment]


def _forward(layer: Any, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
