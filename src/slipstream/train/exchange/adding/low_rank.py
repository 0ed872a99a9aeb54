"""PowerSGD: thin matrices that add up, in two turns (Vogels et al. 2019, arXiv 1905.13727)."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.job.codecs import PowerSgd
from slipstream.train.exchange.adding.coded import Coded, split_by
from slipstream.train.exchange.adding.lane import Lane
from slipstream.train.exchange.base import Kept
from slipstream.train.exchange.codecs.base import generator
from slipstream.train.exchange.codecs.powersgd import decode, encode, orthogonal


class LowRank(Coded):
    """All left halves of a bucket travel together, then all right ones."""

    def __init__(self, lane: Lane, group: dist.ProcessGroup, weights: list[nn.Parameter], setting: PowerSgd) -> None:
        super().__init__(lane, group, weights, setting)
        self._shapes = [as_matrix(weight) for weight in weights]
        self._columns = setting.rank
        first = self._draw("first", weights[0].device).to(weights[0].dtype)
        self._basis: Tensor | None = None
        self._next_basis = first
        if setting.warm:
            self._basis, self._next_basis = self._keep(first)

    def kept(self) -> list[Kept]:
        """Also the directions that the last step found, which are the same with all workers."""
        if self._basis is None:
            return super().kept()
        bases = zip(self._weights, self._halves(self._basis, 1), strict=True)
        return [*super().kept(), *(Kept("basis", weight, basis, 0, 1) for weight, basis in bases)]

    def held_bytes(self) -> dict[str, int]:
        """Also the directions, and those that a step finds."""
        held = super().held_bytes()
        bases = self._next_basis.nbytes + (0 if self._basis is None else self._basis.nbytes)
        return {**held, "codes": held.get("codes", 0) + bases}

    def _add(self, x: Tensor, total: Tensor, position: int) -> None:
        start = self._draw(position, x.device).to(x.dtype) if self._basis is None else self._basis
        matrices = self._matrices(x)
        left_halves = x.new_empty(self._columns * sum(rows for rows, _ in self._shapes))
        lefts, rights = self._halves(left_halves, 0), self._halves(self._next_basis, 1)
        for matrix, right, left in zip(matrices, self._halves(start, 1), lefts, strict=True):
            left.copy_(encode(matrix, right))
        self._all_reduce(left_halves)
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            left.copy_(orthogonal(left))
            right.copy_(encode(matrix.T, left))
            if self._feedback:
                matrix.sub_(decode(left, right))
        self._all_reduce(self._next_basis)
        for matrix, left, right in zip(self._matrices(total), lefts, rights, strict=True):
            matrix.copy_(decode(left, right))

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(split_by(flat, self._weights), self._shapes, strict=True)]

    def _halves(self, flat: Tensor, dim: int) -> list[Tensor]:
        """The thin matrices in a flat tensor, one after the other, with as many rows as a matrix has along `dim`."""
        parts = torch.split(flat, [self._columns * shape[dim] for shape in self._shapes])
        return [part.view(-1, self._columns) for part in parts]

    def _draw(self, when: int | str, device: torch.device) -> Tensor:
        """Random directions, the same for all workers."""
        random = generator(self._lane.key(when, self._bucket), torch.device("cpu"))
        size = self._columns * sum(columns for _, columns in self._shapes)
        return torch.randn(size, generator=random).to(device)


def as_matrix(weight: Tensor) -> tuple[int, int]:
    """The shape of a weight as a matrix: what is not its first dimension is one."""
    return weight.shape[0], weight.numel() // max(1, weight.shape[0])
