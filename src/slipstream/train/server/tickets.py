"""Tickets: who computes what, and which gradients make the next update.

Pure logic, without sockets, threads or clocks. The first server keeps it. A ticket is a piece of work that one worker
holds at a time; whose worker is gone goes to another, so each sample is used exactly once, whoever comes and goes.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

Worker = int


@dataclass(frozen=True)
class Ticket:
    """What a worker is to do next."""

    kind: str
    """`train`; `judge` or `judge all`: on some or all held-out samples; `end`: there is nothing more to do."""
    number: int = -1
    """Of training: which part of which batch."""
    version: int = 0
    """How many updates the weights have had when it is handed out: they must be at least as new."""


@dataclass(frozen=True)
class Push:
    """A gradient that an update has in it."""

    number: int
    worker: Worker
    staleness: int
    """Updates between its ticket and its own."""


class Tickets(ABC):
    """What is open, who holds what, and what is done and waits for its update."""

    def __init__(self, version: int, steps: int) -> None:
        self.version, self._steps = version, steps
        self._open: list[int] = []
        self._held: dict[int, tuple[Worker, int]] = {}
        """By ticket: who computes it, and the version when it was handed out."""
        self._done: dict[int, tuple[Worker, int]] = {}
        """The same of those whose gradients are there, in the order in which they came."""
        self._judge: str | None = None
        self._judge_by: Worker | None = None
        self.ended = False

    def ask(self, worker: Worker) -> Ticket | None:
        """A ticket for this worker, the same again if it has lost the answer; None: there is none yet."""
        if self.ended:
            return Ticket("end", version=self.version)
        if self._judge and self._judge_by in (None, worker):
            self._judge_by = worker
            return Ticket(self._judge, version=self.version)
        for number, (holder, version) in self._held.items():
            if holder == worker:
                return Ticket("train", number, version)
        opened = self._next(worker)
        if opened is None:
            return None
        self._held[opened] = worker, self.version
        return Ticket("train", opened, self.version)

    def done(self, worker: Worker, number: int) -> bool:
        """A worker's gradient is on all servers. False: the ticket is not this worker's any more, and it is void."""
        if self._held.get(number, (None, 0))[0] != worker:
            return False
        self._done[number] = self._held.pop(number)
        return True

    def leave(self, worker: Worker) -> None:
        """A worker is gone: what it has not done is for others."""
        for number in [number for number, (holder, _) in self._held.items() if holder == worker]:
            del self._held[number]
            heapq.heappush(self._open, number)
        if self._judge_by == worker:
            self._judge_by = None

    def judge(self, what: str | None) -> None:
        """Ask for a judgement of the weights as they are; None: it is here."""
        self._judge, self._judge_by = what, None

    def judged(self, worker: Worker) -> bool:
        """A worker brings a judgement. False: it was not asked for, or no longer."""
        return self._judge is not None and self._judge_by == worker

    def apply(self, update: Iterable[Push]) -> None:
        """These gradients are in the weights now."""
        for push in update:
            del self._done[push.number]
        self.version += 1

    @abstractmethod
    def ready(self) -> list[Push]:
        """The gradients of the next update, in the order in which they are added; none while it must wait."""

    @abstractmethod
    def late(self) -> list[int]:
        """Batches that later ones have overtaken: what a checkpoint must know beside the version."""

    @abstractmethod
    def _next(self, worker: Worker) -> int | None:
        """Open a ticket for a worker."""


class Sync(Tickets):
    """An update has all parts of a batch, added in their order: it does not matter who computed them."""

    def __init__(self, version: int, steps: int, shares: int) -> None:
        super().__init__(version, steps)
        self._shares = shares
        self._open_step()

    def ready(self) -> list[Push]:
        """All parts, or none."""
        if len(self._done) < self._shares:
            return []
        return [Push(number, worker, 0) for number, (worker, _) in sorted(self._done.items())]

    def apply(self, update: Iterable[Push]) -> None:
        """Go on to the next batch."""
        super().apply(update)
        self._open_step()

    def late(self) -> list[int]:
        """None: batches come in turn."""
        return []

    def _open_step(self) -> None:
        if self.version < self._steps:
            self._open = list(range(self.version * self._shares, (self.version + 1) * self._shares))

    def _next(self, worker: Worker) -> int | None:  # noqa: ARG002
        return heapq.heappop(self._open) if self._open else None


class Async(Tickets):
    """Every batch is an update, in the order in which they come, as far as the bound on staleness allows.

    The bound holds because those that are under way could always still be applied in time, the oldest first: if the
    i-th oldest was handed out at version v_i, it must be that version + i - 1 ≤ v_i + bound. So at most bound + 1 are
    under way at once, and a gradient that would leave too little time for the others waits for the oldest.
    """

    def __init__(self, version: int, steps: int, bound: int | None, late: Iterable[int] = ()) -> None:
        super().__init__(version, steps)
        self._bound = bound
        self._open = sorted(late)
        self._following = version + len(self._open)
        """The first batch that nobody had yet."""

    def ready(self) -> list[Push]:
        """The first that may be applied."""
        for number, (worker, version) in self._done.items():
            if self._leaves_time(number):
                return [Push(number, worker, self.version - version)]
        return []

    def late(self) -> list[int]:
        """All that has been handed out once and is in no update yet."""
        return sorted([*self._open, *self._held, *self._done])

    def _leaves_time(self, number: int) -> bool:
        if self._bound is None:
            return True
        others = sorted(v for one, (_, v) in (self._held | self._done).items() if one != number)
        return all(self.version + 1 + place <= v + self._bound for place, v in enumerate(others))

    def _next(self, worker: Worker) -> int | None:
        waits = any(holder == worker for holder, _ in self._done.values())  # its next fetch has its own update in it
        full = self._bound is not None and len(self._held) + len(self._done) > self._bound
        if waits or full:
            return None
        if self._open:
            return heapq.heappop(self._open)
        if self._following >= self._steps:
            return None
        self._following += 1
        return self._following - 1
