"""Two linear layers with GELU between them, the activation and its derivative folded into the products.

Apart, GELU reads what the first product wrote and writes as much again, and twice that in backward: of GPT-2's step on
an H200 that is a twentieth.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.train.kernels import cublaslt
from slipstream.train.kernels.dtypes import working_dtype
from slipstream.train.kernels.products import product
from slipstream.train.kernels.steps import as_one_step

_aten: Any = torch.ops.aten


def _shaped(x: Tensor, weight: Tensor, _bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))


@as_one_step("linear_gelu", _shaped)
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """GELU of x [n, in] through a linear layer, and what it was taken of."""
    before = x.new_empty(len(x), len(weight))
    made = cublaslt.multiply(x, weight.T, epilogue=cublaslt.GELU, bias=bias, kept=before)
    if made is None:
        before = F.linear(x, weight, bias)
        made = F.gelu(before, approximate="tanh")
    return made, before


@as_one_step("gelu_backward", lambda _gradient, _weight, before: before.new_empty(before.shape))
def _gelu_backward(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """The gradient of what GELU was taken of [n, in], by that of the next layer [n, out], whose weight is [out, in]."""
    made = cublaslt.multiply(gradient, weight, epilogue=cublaslt.GELU_BACKWARD, kept=before)
    if made is None:
        made = _aten.gelu_backward(gradient @ weight, before, approximate="tanh")
    return made


class _FeedForward(torch.autograd.Function):
    """x [n, hidden] to [n, hidden]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
    ) -> Tensor:
        short_up, short_down = up.to(x.dtype), down.to(x.dtype)
        inner, before = _linear_gelu(x, short_up, None if up_bias is None else up_bias.to(x.dtype))
        ctx.save_for_backward(x, short_up, short_down, before, inner)
        ctx.dtype, ctx.biased = up.dtype, up_bias is not None  # type: ignore[attr-defined]
        y: Tensor = product(inner, short_down.T, x.dtype, None if down_bias is None else down_bias.to(x.dtype))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, before, inner = ctx.saved_tensors  # type: ignore[attr-defined]
        dtype: torch.dtype = ctx.dtype  # type: ignore[attr-defined]
        gradient = grads[0].contiguous()
        of_before = _gelu_backward(gradient, down, before)
        of_x, of_up, of_down = (
            product(of_before, up, x.dtype),
            product(of_before.T, x, dtype),
            product(gradient.T, inner, dtype),
        )
        if not ctx.biased:  # type: ignore[attr-defined]
            return of_x, of_up, None, of_down, None
        return of_x, of_up, of_before.sum(0, dtype=dtype), of_down, gradient.sum(0, dtype=dtype)


_apply: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor] = _FeedForward.apply


def feed_forward(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Through one layer, GELU and the other; both have biases or none."""
    dtype = working_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        rows = x.flatten(0, -2).to(dtype)
        return _apply(rows, up.weight, up.bias, down.weight, down.bias).view(x.shape)
