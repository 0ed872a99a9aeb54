"""Linear layers whose three products are in fp8 (Micikevicius et al. 2022, arXiv 2209.05433).

What enters a product is scaled so that its largest number is fp8's largest; what leaves it is scaled back. Gradients,
too, are in e4m3: the paper gives them more range and fewer digits (e5m2), but a scale of their own is range enough, and
digits count (DeepSeek-AI 2024, arXiv 2412.19437, §3.3.2; llama-1b on text: with e5m2 they came out 0.6% too short, now
0.3%). The hardware takes the left matrix by rows and the right one by columns, so that of everything a transposed copy
is needed too. One scale for a whole matrix is the quickest: one kernel writes both copies. With one for each row an
outlier spoils only its own row, and either copy has scales of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.train.kernels.dtypes import cast, working_dtype

_DTYPE = torch.float8_e4m3fn
_MOST = torch.finfo(_DTYPE).max
_EVEN = 16
"""All sizes of a product must be multiples of this."""


class Short(NamedTuple):
    """A matrix [a, b] in fp8, with what to multiply it by: one number, or one for each row [a, 1]."""

    values: Tensor
    scale: Tensor


class _Linear(torch.autograd.Function):
    """x [rows, in] and weight [out, in] to [rows, out]."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, dtype: torch.dtype, by_row: bool) -> Tensor:
        short_x, turned_x = quantise(x, by_row)
        short_w, turned_w = quantise(weight, by_row)
        ctx.save_for_backward(*turned_x, *turned_w)
        ctx.dtypes = x.dtype, weight.dtype  # type: ignore[attr-defined]
        ctx.by_row = by_row  # type: ignore[attr-defined]
        return multiply(short_x, short_w, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, x_scale, w, w_scale = ctx.saved_tensors  # type: ignore[attr-defined]
        of_x, of_weight = ctx.dtypes  # type: ignore[attr-defined]
        gradient, turned = quantise(grads[0], ctx.by_row)  # type: ignore[attr-defined]
        return (
            multiply(gradient, Short(w, w_scale), of_x),
            multiply(turned, Short(x, x_scale), of_weight),
            None,
            None,
        )


def quantise(x: Tensor, by_row: bool) -> tuple[Short, Short]:
    """x [a, b] in fp8, and the same as [b, a]."""
    if by_row:
        return _quantise_rows(x), _quantise_rows(x.T)
    if x.is_cuda:
        x = x.bfloat16()  # of fp32 the kernel below gave NaN in the turned copy, in Triton 3.6
    scale = x.abs().amax().float().clamp(min=1e-12) / _MOST
    if x.is_cuda:
        from slipstream.train.kernels.fp8_cast import cast_both_ways

        straight, turned = cast_both_ways(x.contiguous(), scale)
    else:
        straight = _cast(x, scale)
        turned = straight.T.contiguous()
    return Short(straight, scale), Short(turned, scale)


def _quantise_rows(x: Tensor) -> Short:
    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / _MOST
    return Short(_cast(x, scale).contiguous(), scale)


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-_MOST, _MOST).to(_DTYPE)


def multiply(a: Short, b: Short, dtype: torch.dtype) -> Tensor:
    """a [m, k] times the transpose of b [n, k]."""
    by_row = a.scale.dim() == 2
    b_scale = b.scale.T.contiguous() if by_row else b.scale
    if not a.values.is_cuda:
        return cast((a.values.float() @ b.values.float().T) * (a.scale * b_scale), dtype)
    product: Tensor = torch._scaled_mm(
        a.values,
        b.values.T,
        a.scale,
        b_scale,
        out_dtype=torch.bfloat16 if by_row else dtype,  # it gives no other with scales for rows
        use_fast_accum=True,
    )
    return cast(product, dtype)


_linear: Callable[[Tensor, Tensor, torch.dtype, bool], Tensor] = _Linear.apply


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, by_row: bool = False) -> Tensor:
    """As `F.linear`, in fp8 where the sizes allow it."""
    dtype, rows = working_dtype(x), x.flatten(0, -2)
    if x.is_meta or any(size % _EVEN for size in (*rows.shape, *weight.shape)):
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        y = _linear(rows.to(dtype), weight, dtype, by_row).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias.to(dtype)
