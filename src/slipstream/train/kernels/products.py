"""Matrix products by the best way that is known here, and linear layers made of them.

A layer of such products gives the gradient of its weight in the weight's own precision: the sums are in fp32 anyway,
and are not rounded to bf16 on their way out.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.train.kernels import cublaslt
from slipstream.train.kernels.dtypes import working_dtype
from slipstream.train.kernels.steps import as_one_step

_WORTH = 4 * 10**10
"""Operations from which a product takes a GPU longer (about 60 µs) than Python takes to launch it."""


def multiply(
    a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """a [n, k] times b [k, m], plus a bias [m] for each row, plus `onto` [n, m], which is of that dtype."""
    made = cublaslt.multiply(a, b, dtype, onto, bias=bias)
    return multiply_plainly(a, b, dtype, bias, onto) if made is None else made


def multiply_plainly(
    a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """The same by torch alone."""
    if bias is not None:
        made = torch.addmm(bias, a, b).to(dtype)
    else:
        made = torch.mm(a, b, out_dtype=dtype) if a.is_cuda and a.dtype != dtype else (a @ b).to(dtype)
    return made if onto is None else onto + made


def _shaped(
    a: Tensor, b: Tensor, dtype: torch.dtype, _bias: Tensor | None = None, _onto: Tensor | None = None
) -> Tensor:
    return a.new_empty((len(a), b.shape[1]), dtype=dtype)


product = as_one_step("product", _shaped)(multiply)


class _Linear(torch.autograd.Function):
    """x [n, in] and weights [out, in] to [n, out], one beside the other, added to what is there."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, bias: Tensor | None, onto: Tensor | None, *weights: Tensor) -> Tensor:
        narrow = torch.cat([weight.to(x.dtype) for weight in weights]) if len(weights) > 1 else weights[0].to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.biased, ctx.dtype = bias is not None, weights[0].dtype  # type: ignore[attr-defined]
        ctx.sizes, ctx.adds = [len(weight) for weight in weights], onto is not None  # type: ignore[attr-defined]
        y: Tensor = product(x, narrow.T, x.dtype, None if bias is None else bias.to(x.dtype), onto)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        dtype: torch.dtype = ctx.dtype  # type: ignore[attr-defined]
        sizes: list[int] = ctx.sizes  # type: ignore[attr-defined]
        gradient = grads[0].contiguous()
        of_bias = gradient.sum(0, dtype=dtype) if ctx.biased else None  # type: ignore[attr-defined]
        of_weights = product(gradient.T, x, dtype)
        each = torch.split(of_weights, sizes) if len(sizes) > 1 else [of_weights]  # no second name: kernels/dtypes.py
        of_onto = gradient if ctx.adds else None  # type: ignore[attr-defined]
        return product(gradient, weight, x.dtype), of_bias, of_onto, *each


_linear: Callable[..., Tensor] = _Linear.apply


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`, by such products where they are large enough to be worth it."""
    return _by_products(x, bias, None, weight) if _worth(x, weight) else F.linear(x, weight, bias)


def linear_onto(stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """What a linear layer without bias makes of x, added to the stream where its product is written."""
    if not _worth(x, weight) or stream.dtype != working_dtype(x):
        return stream + F.linear(x, weight)
    return _by_products(x, None, stream, weight)


def linears(x: Tensor, *weights: Tensor) -> Tensor:
    """Through several layers without biases at once, what they give side by side: one product each way."""
    if not _worth(x, *weights):
        return torch.cat([F.linear(x, weight) for weight in weights], -1)
    return _by_products(x, None, None, *weights)


def _worth(x: Tensor, *weights: Tensor) -> bool:
    rows = x.numel() // x.shape[-1]
    return not x.is_meta and 2 * rows * min(weight.numel() for weight in weights) >= _WORTH


def _by_products(x: Tensor, bias: Tensor | None, onto: Tensor | None, *weights: Tensor) -> Tensor:
    dtype = working_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        onto = None if onto is None else onto.flatten(0, -2)
        return _linear(x.flatten(0, -2).to(dtype), bias, onto, *weights).view(*x.shape[:-1], -1)
