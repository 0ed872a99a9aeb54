"""Links between the workers of a group: what the algorithms that add up are written on, and who runs them."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.train.exchange.adding.base import Pending

SEGMENT = 2**21
"""Bytes of a message, at most: while one is added the next ones travel. Each costs a few threads' waking, and over a
long link TCP learns from long messages alone how quick it is; so there are few."""
_TAG = 7000


class Links:
    """Sends to and receives from each other worker of a group, on a CPU.

    Messages from one worker to another arrive in the order in which they were sent, on each stream. gloo lets a message
    go only when it knows where it will be received: an algorithm posts its receives first, all of them, and so waits
    for that once and not at every step.
    """

    def __init__(self, group: dist.ProcessGroup, nodes: Sequence[int], ranks: Sequence[int] | None = None) -> None:
        self._group = group
        self._ranks = list(ranks if ranks is not None else range(group.size()))
        self.rank, self.size = self._ranks.index(group.rank()), len(self._ranks)
        self.nodes = nodes
        """On which machine each worker is."""

    def among(self, ranks: Sequence[int]) -> "Links":
        """The links of some of the workers, who count themselves in this order."""
        return Links(self._group, [self.nodes[rank] for rank in ranks], [self._ranks[rank] for rank in ranks])

    def send(self, part: Tensor, to: int, stream: int = 0) -> Pending:
        """Begin to send; the part must stay as it is until that is done."""
        work: Pending = self._group.send([part], self._ranks[to], _TAG + stream)
        return work

    def receive(self, into: Tensor, source: int, stream: int = 0) -> Pending:
        """Begin to receive."""
        work: Pending = self._group.recv([into], self._ranks[source], _TAG + stream)
        return work

    def room(self, like: Tensor) -> Tensor:
        """Where as much as this may arrive, until the sum is over."""
        return _room.take(like)


class _Room:
    """Memory that every sum uses again. What comes fresh from the system must first be cleared: a first sum of 64 MB
    took up to twice as long as the others for that."""

    def __init__(self) -> None:
        self._memory, self._taken = torch.empty(0, dtype=torch.uint8), 0

    def clear(self) -> None:
        """Begin anew: the last sum is over."""
        self._taken = 0

    def take(self, like: Tensor) -> Tensor:
        begin, end = self._taken, self._taken + like.nbytes
        if end > self._memory.nbytes:
            self._memory = torch.zeros(end, dtype=torch.uint8)  # what was taken before holds on to its own
        self._taken = -(-end // _LINE) * _LINE
        return self._memory[begin:end].view(like.dtype)


_LINE = 64
"""Bytes that numbers are aligned to."""
_room = _Room()
"""The courier's."""

Algorithm = Callable[[Tensor, Links], None]
"""Makes a flat tensor the sum of all workers' ones, in place. The order of additions depends on nothing but size and
number of workers, and every element of the sum is computed once and copied: all have the same bits."""


def segments(part: Tensor) -> Sequence[Tensor]:
    """A part in the pieces in which it travels; nothing of an empty one."""
    return torch.split(part, SEGMENT // part.element_size()) if part.numel() else ()


def wait_for(works: Iterable[Pending]) -> None:
    """Return when all are done."""
    for work in works:
        work.wait()


class _Carried:
    """A sum that the courier is at, or will be."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


_courier = ThreadPoolExecutor(1, "courier")
"""One thread of each worker runs the algorithms, one bucket after the other, while backward computes the next."""


class PointToPoint:
    """Adds up by an algorithm over links."""

    def __init__(self, algorithm: Algorithm, links: Links) -> None:
        self._algorithm, self._links = algorithm, links

    def start(self, flat: Tensor) -> Pending:
        return _Carried(_courier.submit(self._add_up, flat))

    def _add_up(self, flat: Tensor) -> None:
        _room.clear()
        self._algorithm(flat, self._links)
