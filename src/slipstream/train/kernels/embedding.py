"""Looking up tokens, with a gradient that is the same each time and for which nobody waits.

torch's own asks the GPU how many different tokens there are, and the processor waits for the answer in every backward.
Here the tokens are sorted, and each run of equal ones is summed in order by one program, which finds its end itself.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.like = weight.shape, weight.dtype  # type: ignore[attr-defined]
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        from slipstream.train.kernels.embedding_gradient import sum_by_token

        (tokens,) = ctx.saved_tensors  # type: ignore[attr-defined]
        shape, dtype = ctx.like  # type: ignore[attr-defined]
        return sum_by_token(grads[0].flatten(0, -2), tokens.flatten(), shape, dtype), None


_look_up: Callable[[Tensor, Tensor], Tensor] = _LookUp.apply


def look_up(weight: Tensor, tokens: Tensor) -> Tensor:
    """As `F.embedding`."""
    return _look_up(weight, tokens) if weight.is_cuda and weight.dtype == torch.float32 else F.embedding(tokens, weight)
