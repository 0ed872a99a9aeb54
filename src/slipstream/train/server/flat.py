"""Tensors in one piece of memory, as they travel; and which server has which."""

import heapq
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_ALIGNED = 64
"""Bytes: where a tensor may begin."""


class Flat:
    """Memory for tensors like these, one behind the other: of its own, or as given."""

    def __init__(self, like: Sequence[Tensor], memory: Tensor | None = None) -> None:
        sizes = [_room(tensor) for tensor in like]
        self.is_own = memory is None
        self.bytes = torch.zeros(sum(sizes), dtype=torch.uint8) if memory is None else memory
        self.memory = self.bytes.numpy().data
        self.views = [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(torch.split(self.bytes, sizes), like, strict=True)
        ]

    @staticmethod
    def size(like: Sequence[Tensor]) -> int:
        """Bytes that tensors like these take."""
        return sum(map(_room, like))


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def share_out(sizes: Mapping[str, int], servers: int) -> list[list[str]]:
    """Which server has which tensors, by their bytes: the largest first, each to the one that has least so far. Whole
    tensors, because some optimisers need the whole of one."""
    if servers > len(sizes):
        raise ValueError(
            f"exchange.servers ({servers}) must be at most {len(sizes)}: each has whole tensors of the model"
        )
    loads = [(0, server) for server in range(servers)]
    server_of: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        load, server_of[name] = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], server_of[name]))
    return [[name for name in sizes if server_of[name] == server] for server in range(servers)]
