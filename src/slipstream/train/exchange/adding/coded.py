"""What all coded sums share: the lane they run in, and the memory of what their codes have left out so far.

A worker sends a code of its gradient plus its memory, and remembers what the code leaves out (error feedback;
Karimireddy et al. 2019, arXiv 1901.09847). What a step has left out counts only once the step does.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.job.codecs import AnyCodec
from slipstream.train.exchange.adding.base import Pending
from slipstream.train.exchange.adding.lane import Lane
from slipstream.train.exchange.base import Kept


class Coded:
    """Adds up one bucket in the lane. A way of doing so has `_add`."""

    def __init__(
        self, lane: Lane, group: dist.ProcessGroup, weights: list[nn.Parameter], setting: AnyCodec, even: bool = False
    ) -> None:
        self._lane, self._bucket, self._weights = lane, lane.number(), weights
        self._feedback, self._warmup = setting.feedback, setting.warmup
        self._track = lane.track(self._bucket, weights[0].device)
        self._group = lane.group(group, self._track)
        self._rank, self._workers = self._group.rank(), self._group.size()
        self.sent = 0
        """Bytes that this worker has sent for the last sum."""
        self._kept: list[Tensor] = []
        self._left: list[Tensor] = []
        """What the sum under way leaves for the next one, each for the one of `_kept` in the same place."""
        size = sum(weight.numel() for weight in weights)
        room = weights[0].detach().new_zeros(size + (-size % self._workers if even else 0))
        self._memory: Tensor | None = None
        self._x = room
        if setting.feedback:
            self._memory, self._x = self._keep(room)

    def start(self, flat: Tensor) -> Pending:
        position = self._lane.position
        early = position < self._warmup.samples(self._lane.total)
        work = partial(self._sum_plainly, flat) if early else partial(self._sum, flat, position)
        return self._lane.start(work, flat, self._track)

    def settle(self, skipped: Tensor) -> None:
        """The step is done: take over what it leaves, unless it was skipped."""
        for kept, left in zip(self._kept, self._left, strict=True):
            torch.where(skipped.bool(), kept, left, out=kept)

    def kept(self) -> list[Kept]:
        """What must be there when the run goes on."""
        if self._memory is None:
            return []
        return [
            Kept("memory", weight, memory.view_as(weight), self._rank, self._workers)
            for weight, memory in zip(self._weights, split_by(self._memory, self._weights), strict=True)
        ]

    def held_bytes(self) -> dict[str, int]:
        """What has been left out and what a step leaves; or where codes are made, if nothing is kept."""
        return {"codes": self._x.nbytes} if self._memory is None else {"unsent": self._memory.nbytes + self._x.nbytes}

    def _keep(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a tensor from step to step: what is kept, and where a step writes what it leaves."""
        self._kept.append(first)
        self._left.append(first.clone())
        return first, self._left[-1]

    def _sum_plainly(self, flat: Tensor) -> None:
        self.sent = 0
        self._all_reduce(flat)
        for kept, left in zip(self._kept, self._left, strict=True):
            left.copy_(kept)

    def _sum(self, flat: Tensor, position: int) -> None:
        size = flat.numel()
        self.sent = 0
        self._x[size:].zero_()
        if self._memory is None:
            self._x[:size].copy_(flat)
        else:
            torch.add(flat, self._memory[:size], out=self._x[:size])
        self._add(self._x, flat, position)

    def _add(self, x: Tensor, total: Tensor, position: int) -> None:
        """Make `total` the sum of what all workers' codes of x stand for; with feedback, take from x what was sent."""
        raise NotImplementedError

    def _all_reduce(self, code: Tensor) -> None:
        dist.all_reduce(code, group=self._group)
        self.sent += ring_bytes(code, self._workers)


def held_by_codes(adders: Iterable[Coded]) -> dict[str, int]:
    """What coded sums hold together."""
    held: Counter[str] = Counter()
    for adder in adders:
        held.update(adder.held_bytes())
    return dict(held)


def ring_bytes(code: Tensor, workers: int) -> int:
    """What each worker sends when a ring adds up tensors like this."""
    return 2 * (workers - 1) * code.numel() * code.element_size() // workers


def split_by(flat: Tensor, weights: list[nn.Parameter]) -> list[Tensor]:
    """The parts of a flat tensor that belong to each weight."""
    sizes = [weight.numel() for weight in weights]
    return list(torch.split(flat[: sum(sizes)], sizes))
