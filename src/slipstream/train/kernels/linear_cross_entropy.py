"""The head and the loss in one, some tokens at a time: the scores of a whole batch are never held.

A score's gradient is known as soon as the score is, so what follows from it is computed in forward too, and backward
only scales it (Hsu et al. 2024, arXiv 2410.10989, §3.2).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.data.base import IGNORED
from slipstream.train.kernels import cublaslt
from slipstream.train.kernels.cross_entropy import overwrite_with_gradient
from slipstream.train.kernels.dtypes import working_dtype
from slipstream.train.kernels.products import multiply

ROWS = 4096
"""Tokens at a time: on an H200 no larger number was quicker, with 50 thousand classes or with 128 thousand."""
_aten: Any = torch.ops.aten


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        dtype = working_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            learns = any(ctx.needs_input_grad[:2])  # type: ignore[attr-defined]
            loss, *gradients = _by_rows(hidden, weight, targets, dtype, learns)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        of_hidden, of_weight = ctx.saved_tensors  # type: ignore[attr-defined]
        torch._foreach_mul_([of_weight], grads[0])  # by a number on the device: twice as quick as `mul_`
        return of_hidden.mul_(grads[0]), of_weight, None


def _by_rows(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, learns: bool) -> list[Tensor]:
    """The loss, and if something learns from it, the gradients of the hidden states and of the weight."""
    narrow = weight.to(dtype)
    of_hidden, of_weight = torch.empty_like(hidden) if learns else hidden, None
    losses = []
    for first in range(0, len(hidden), ROWS):
        rows = slice(first, first + ROWS)
        some = hidden[rows].to(dtype)
        scores = multiply(some, narrow.T, dtype)
        losses.append(_overwrite(scores, targets[rows]).sum())
        if learns:
            of_hidden[rows] = multiply(scores, narrow, dtype)
            of_weight = _add_product(of_weight, scores.mT, some, weight.dtype)
    loss = torch.stack(losses).sum()
    return [loss] if of_weight is None else [loss, of_hidden, of_weight]


def _overwrite(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of each row; the scores become its gradient."""
    if scores.is_cuda and scores.dtype != torch.float64:
        from slipstream.train.kernels import score_gradient

        return score_gradient.overwrite_with_gradient(scores, targets)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    losses = overwrite_with_gradient(wide, targets)
    counts = targets != IGNORED
    if not counts.all():
        wide.mul_(counts.unsqueeze(1))
    if wide is not scores:
        scores.copy_(wide)
    return losses


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a·b, in the precision of the weights."""
    if total is None:
        return multiply(a, b, dtype)
    if cublaslt.multiply(a, b, dtype, onto=total, out=total) is not None:
        return total
    if a.is_cuda and a.dtype != dtype:
        _aten.addmm.dtype_out(total, a, b, dtype, out=total)
        return total
    return total.addmm_(a, b) if a.dtype == dtype else total.add_(a @ b)


linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor] = _LinearCrossEntropy.apply
"""The sum over all rows of hidden [N, width] that have a target, with weight [classes, width]."""


def linear_cross_entropy_plainly(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same, written out."""
    scores = F.linear(hidden, weight)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")
