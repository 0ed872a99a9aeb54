"""How long the ways of adding up really take between these machines: tried once, when a run first starts.

A model knows little of what else decides: how TCP starts, how many connections a switch bears, which processor hands
over the messages. So the run's own buckets are tried, the largest first: TCP learns from them how quick a link is, and
later ones find it as they will in training. At each size the ways that may be the quickest by the model go in turn, and
one that falls behind by more than chance drops out: the time goes to those that are close. Which way leads may change
with the size, so large buckets are tried whole, too; there a round takes seconds, and fewer ways and rounds must do.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from slipstream.plan import Network
from slipstream.train.exchange.adding.backend import Backend
from slipstream.train.exchange.adding.base import Adder
from slipstream.train.exchange.adding.choose import worth_trying
from slipstream.train.exchange.adding.links import Algorithm, Links, PointToPoint, wait_for

_ALIKE = 1.1
"""A bucket goes by a larger one that by the model takes each way less than this factor longer."""
_MOST_SIZES = 6
_LONGEST, _LONG = 20.0, 2.0
"""Seconds that all ways together may take by the model: a bucket that takes more goes by a smaller one; and where it is
much more than the second, a round with less comes first, and only those that are close there go on."""
_LEAST, _SECONDS = 3, 1.5
"""Rounds, and seconds of sums, until the quickest counts, unless one way alone is left before."""
_PATIENCE = 12.0
"""Seconds of sums of one size: a round that should end later is not begun."""
_SOON = 0.5
"""Seconds of sums before which nobody drops out: where sums are short, one of them may be chance many times over."""
_BEHIND, _BEHIND_LONG = 1.0, 0.5
"""By how much longer than the quickest one may take, over the root of the rounds so far; the second where they are long
(a second and more), because chance is a smaller part of them."""
_IN_A_ROW, _QUICK = 4, 0.005
"""So many sums follow each other, as buckets do, where one should take no more seconds than this."""


def time_ways(network: Network, ways: dict[str, Algorithm], buckets: Iterable[int]) -> dict[str, dict[int, float]]:
    """Seconds by way and size, for buckets of so many bytes. All workers must call it."""
    group = dist.group.WORLD
    assert group is not None and network.latency, "there are several workers, and links between them"
    links = Links(group, network.nodes)
    adders: dict[str, Adder] = {name: PointToPoint(way, links) for name, way in ways.items()}
    adders["backend"] = Backend(group)
    sizes = sizes_to_try(buckets, network)
    for adder in adders.values():  # connections are made, memory is taken, TCP learns
        adder.start(torch.zeros(_first_size(sizes[0], network) // 4)).wait()
    meeting = _Meeting(links, network.latency)
    found: dict[str, dict[int, float]] = {}
    for size in sizes:
        worth = worth_trying(size, network)
        in_a_row = _IN_A_ROW if min(worth.values()) < _QUICK else 1
        some = {name: adders[name] for name in worth}
        if (less := _first_size(size, network)) <= size // 4:  # or else it takes longer than it saves
            some = _Race(some, less, in_a_row, meeting).close()
        for name, seconds in _Race(some, size, in_a_row, meeting).run().items():
            found.setdefault(name, {})[size] = seconds
    return found


def sizes_to_try(buckets: Iterable[int], network: Network) -> list[int]:
    """Few that stand for all, the largest first."""
    sizes: list[int] = []
    for size in sorted({_within(_LONGEST, bucket, network) for bucket in buckets}, reverse=True):
        if not sizes or not _alike(size, sizes[-1], network):
            sizes.append(size)
    return sizes[:_MOST_SIZES]


def _first_size(size: int, network: Network) -> int:
    """Bytes of the round that shows who is far behind."""
    return _within(_LONG, size, network)


def _within(seconds: float, size: int, network: Network) -> int:
    while sum(worth_trying(size, network).values()) > seconds:
        size //= 2
    return size


def _alike(size: int, larger: int, network: Network) -> bool:
    shorter, longer = worth_trying(size, network), worth_trying(larger, network)
    return shorter.keys() == longer.keys() and all(longer[name] < _ALIKE * shorter[name] for name in longer)


class _Race:
    """Ways that take turns at sums of one size."""

    def __init__(self, adders: dict[str, Adder], size: int, in_a_row: int, meeting: "_Meeting") -> None:
        self._adders, self._flat, self._in_a_row, self._meeting = adders, torch.zeros(size // 4), in_a_row, meeting
        self._times: dict[str, list[float]] = {name: [] for name in adders}
        self._left, self._rounds, self._spent = list(adders), 0, 0.0

    def close(self) -> dict[str, Adder]:
        """Those that one round does not leave far behind."""
        self._go_round()
        return {name: self._adders[name] for name in self._left}

    def run(self) -> dict[str, float]:
        """Seconds of a sum by each, the median of its rounds."""
        self._go_round()
        while len(self._left) > 1 and not self._enough():
            self._go_round()
        return {name: statistics.median(times) for name, times in self._times.items()}

    def _go_round(self) -> None:
        """Each adds up, and those that are far behind drop out. The others are left in the reverse order, so that what
        one leaves behind for the next falls on all alike."""
        for name in self._left:
            took = self._meeting.time(self._adders[name], self._flat, self._in_a_row)
            self._times[name].append(took / self._in_a_row)
            self._spent += took
        self._rounds += 1
        typical, behind = self._typical(), self._behind()
        self._left = [name for name in reversed(self._left) if typical[name] <= behind * min(typical.values())]

    def _behind(self) -> float:
        if self._spent < _SOON:
            return math.inf
        chance = _BEHIND if self._spent < self._rounds else _BEHIND_LONG
        return 1 + chance / math.sqrt(self._rounds)

    def _enough(self) -> bool:
        following = self._in_a_row * sum(self._typical().values())
        return (self._rounds >= _LEAST and self._spent >= _SECONDS) or self._spent + following > _PATIENCE

    def _typical(self) -> dict[str, float]:
        """By the better half of the rounds, for one bad round may be chance."""
        return {name: statistics.median_low(self._times[name]) for name in self._left}


class _Meeting:
    """Where workers say at the first one how long they took, and begin at the same time. (A barrier lets some go before
    others have heard of it; over a long link, by as much as a sum takes.)"""

    def __init__(self, links: Links, latency: float) -> None:
        self._links = links
        self._wait = latency if links.nodes[links.rank] == links.nodes[0] else 0.0
        self._agree(0.0, max)

    def time(self, adder: Adder, flat: torch.Tensor, in_a_row: int) -> float:
        """Seconds of some sums, as all workers know them: until the last is done. Where sums are quick, the mean,
        because not even here do workers begin at quite the same time."""
        began = time.perf_counter()
        for _ in range(in_a_row):
            adder.start(flat).wait()
        return self._agree(time.perf_counter() - began, max if in_a_row == 1 else statistics.fmean)

    def _agree(self, own: float, on: Callable[[list[float]], float]) -> float:
        """On something made of what all have."""
        links, others = self._links, range(1, self._links.size)
        said = torch.full((links.size, 1), own, dtype=torch.float64)
        if links.rank == 0:
            wait_for([links.receive(said[other], other) for other in others])
            said.fill_(on(said.flatten().tolist()))
            wait_for([links.send(said[other], other) for other in others])
        else:
            heard = links.receive(said[0], 0)
            links.send(said[links.rank], 0).wait()
            heard.wait()
        time.sleep(self._wait)  # until those on other machines have heard
        return said[0].item()
