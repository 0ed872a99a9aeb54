"""Cross-entropy that turns the scores into their own gradient, in place.

The scores of a language model are its largest tensor. torch's own function makes two more of that size on the way
(the logarithms and the gradient); here the one there is becomes the softmax, and in backward the gradient.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.data.base import IGNORED


def overwrite_with_gradient(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of each row, log Σ exp(s) - s[target], zero where the target does not count; the scores, in fp32 or
    fp64, become softmax(s) - onehot(target), its gradient where it counts."""
    target = targets.clamp(min=0).unsqueeze(1)
    highest, where = scores.max(1, keepdim=True)
    score_of_target = scores.gather(1, target)
    torch.softmax(scores, 1, out=scores)
    # The highest probability is at least one in the number of classes: its logarithm is always safe to take.
    total = highest - scores.gather(1, where).log_()
    scores.scatter_add_(1, target, scores.new_full((1, 1), -1.0).expand_as(target))
    return torch.where(targets != IGNORED, (total - score_of_target).squeeze(1), 0.0)


class _CrossEntropy(torch.autograd.Function):
    """The sum over all rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, scores: Tensor, targets: Tensor) -> Tensor:
        own = scores.detach()  # the same memory, and the same count of versions: who still needs it will hear of it
        losses = overwrite_with_gradient(own, targets)
        ctx.save_for_backward(targets != IGNORED)
        ctx.gradient = own  # type: ignore[attr-defined]
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (counts,) = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient: Tensor = ctx.gradient  # type: ignore[attr-defined]
        return gradient.mul_((grads[0] * counts).unsqueeze(1)), None


class _SharedOut(torch.autograd.Function):
    """The same where workers have the scores of some classes each: only three numbers of a row are exchanged."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, scores: Tensor, targets: Tensor, first_class: int, group: dist.ProcessGroup
    ) -> Tensor:
        own = scores.detach()
        counts = targets != IGNORED
        target = (targets - first_class).unsqueeze(1)
        here = counts.unsqueeze(1) & (target >= 0) & (target < own.shape[1])
        target = torch.where(here, target, 0)
        highest = own.amax(1, keepdim=True) if own.shape[1] else own.new_full((len(own), 1), -torch.inf)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        score_of_target = own.gather(1, target).masked_fill_(~here, 0.0) if own.shape[1] else torch.zeros_like(highest)
        own.sub_(highest).exp_()
        both = torch.cat((own.sum(1, keepdim=True), score_of_target), 1)
        dist.all_reduce(both, group=group)
        total, score_of_target = both[:, :1], both[:, 1:]
        own.div_(total)
        if own.shape[1]:
            own.scatter_add_(1, target, -here.to(own.dtype))
        ctx.save_for_backward(counts)
        ctx.gradient = own  # type: ignore[attr-defined]
        return torch.where(counts, (total.log() + highest - score_of_target).squeeze(1), 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (counts,) = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient: Tensor = ctx.gradient  # type: ignore[attr-defined]
        return gradient.mul_((grads[0] * counts).unsqueeze(1)), None, None, None


shared_out_cross_entropy: Callable[[Tensor, Tensor, int, dist.ProcessGroup], Tensor] = _SharedOut.apply
"""The sum over all rows of scores [N, some of the classes], from `first_class` on; the scores are lost."""
overwriting_cross_entropy: Callable[[Tensor, Tensor], Tensor] = _CrossEntropy.apply
"""The sum over all rows of scores [N, classes] in fp32 or fp64; the scores are lost."""
