"""Collectives that gradients pass through: each is the other's backward.

The sequence [B, T, …] is what tensor workers share out between the layers that they share out themselves (sequence
parallelism, Korthikanti et al. 2022, arXiv 2205.05198).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.train.parallel.groups import Group

# torch 2.13 renames these; 2.11 knows only the old names.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The parts of all workers, one after the other along a dimension."""
    x = x.movedim(dim, 0).contiguous()
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    _gather_into(whole, x, group=group)
    return whole.movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """This worker's part, along a dimension, of the sum over all workers."""
    x = x.movedim(dim, 0).contiguous()
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_into(part, x, group=group)
    return part.movedim(0, dim).contiguous()  # a pipeline sends nothing else


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over all workers, in place where that is possible."""
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grads[0], ctx.group, 1), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.group, 1), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].clone(), ctx.group), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ARG004
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


Moving = Callable[[Tensor, Group], Tensor]
gather_sequence: Moving = _Gather.apply
"""Every worker's part of the sequence; backward sums and shares out."""
scatter_sequence: Moving = _Scatter.apply
"""A part of the sequence of the sum; backward gathers."""
copy_to_all: Moving = _Copy.apply
"""The same for all; backward sums."""
add_up: Moving = _Add.apply
"""The sum; backward is the same for all."""
