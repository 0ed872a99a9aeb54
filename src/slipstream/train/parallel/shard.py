"""The shard axis: workers share out weights, gradients and optimiser state (ZeRO: Rajbhandari et al. 2019, arXiv
1910.02054), by torch's FSDP2, or, where only the optimiser's state is shared out, by pieces of our own."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from slipstream.train.parallel.groups import Groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_module(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    groups: Groups,
    device: str,
    regather: bool,
    fill: Callable[[nn.Module], None],
) -> None:
    """Let FSDP2 share out a module, block by block, each filled with its weights just before, so that at no time much
    more is held than in the end; gradients are summed, also over replicas and contexts."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = _mesh(groups, device)
    for block in blocks:
        fill(block)
        fully_shard(block, mesh=mesh, reshard_after_forward=regather)
    fill(root)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)  # backward begins with what is in no block
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum, as everywhere here
            module.set_force_sum_reduction_for_comms(True)


def _mesh(groups: Groups, device: str) -> "DeviceMesh":
    """Workers that hold the same along one dimension, those that share out along the other."""
    from torch.distributed.device_mesh import DeviceMesh

    shard = groups.along("shard")
    outer = groups.along("replicate", "context")
    assert shard is not None, "there is something to share out"
    if outer is None:
        return DeviceMesh.from_group(shard, device)
    columns = [_along(groups, rank) for rank in groups.ranks("replicate", "context")]
    return DeviceMesh.from_group([outer, shard], device, mesh=torch.tensor(columns), mesh_dim_names=("same", "shard"))


def _along(groups: Groups, rank: int) -> list[int]:
    """The shard group that another worker is in."""
    return Groups(groups.layout, rank).ranks("shard")


class StatePieces:
    """For `sharded: optimizer`: each worker updates some rows of every parameter, and then all share them."""

    def __init__(self, groups: Groups) -> None:
        group = groups.along("shard")
        assert group is not None, "there is something to share out"
        self._group, self._ranks = group, groups.ranks("shard")
        self._wholes: list[nn.Parameter] = []

    def piece(self, whole: nn.Parameter) -> tuple[nn.Parameter, int]:
        """The rows of a parameter that this worker updates, in the same memory, and the first one's number."""
        self._wholes.append(whole)
        start, count = _rows(whole, self._group.rank(), self._group.size())
        return nn.Parameter(whole.detach()[start : start + count], requires_grad=whole.requires_grad), start

    def of_gradient(self, whole: nn.Parameter) -> torch.Tensor | None:
        """The same rows of its gradient."""
        if whole.grad is None:
            return None
        start, count = _rows(whole, self._group.rank(), self._group.size())
        return whole.grad[start : start + count]

    def gather(self) -> None:
        """Take the rows that the others have updated."""
        for number, rank in enumerate(self._ranks):
            for whole in self._wholes:
                start, count = _rows(whole, number, self._group.size())
                if count:
                    dist.broadcast(whole.detach()[start : start + count], rank, group=self._group)


def _rows(whole: torch.Tensor, index: int, workers: int) -> tuple[int, int]:
    """First row and number of rows of one worker, as `torch.chunk` would cut."""
    rows = whole.shape[0]
    each = -(-rows // workers)
    start = min(index * each, rows)
    return start, min(each, rows - start)
