"""How long the ways of adding up really take between these machines: tried once, when a run first starts.

A model knows little of what else decides: how TCP starts, how many connections a switch bears, which processor hands
over the messages. So the run's own buckets are tried, the largest first: TCP learns from them how quick a link is, and
later ones find it as they will in training. At each size the ways that may be the quickest by the model go in turn, and
one drops out once it is sure not to be ahead by more than a little: the time goes to those that are close. Which way
leads may change with the size, so large buckets are tried whole, too. How long that may go on follows from the run: a
hundredth of what it will spend on adding up buckets of this size.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from slipstream.plan import Network
from slipstream.train.exchange.adding.backend import Backend
from slipstream.train.exchange.adding.base import Adder
from slipstream.train.exchange.adding.choose import worth_trying
from slipstream.train.exchange.adding.halving_doubling import SMALL
from slipstream.train.exchange.adding.links import Algorithm, Links, PointToPoint, wait_for

_ALIKE = 1.1
"""A bucket goes by a larger one that by the model takes each way less than this factor longer."""
_MOST_SIZES = 6
_LONGEST, _LONG = 20.0, 2.0
"""Seconds that all ways together may take by the model: a bucket that takes more goes by a smaller one; and where it is
much more than the second, a round with less comes first, and only those that are close there go on."""
_PART = 0.01
"""Of the seconds in which a run will add up buckets of a size, what trials may take."""
_EACH = 0.01
"""Seconds for each step of the run, up to the shortest below: so long a short one may take them."""
_SHORTEST, _PATIENCE = 6.0, 60.0
"""Seconds that the trials of one size may take at least, if the run is not short, and at most: a round that should end
later is not begun, but for the first."""
_SOON = 2.0
"""Seconds before which nobody drops out: where sums are short, one of them may be chance many times over."""
_LEVEL = 0.04
"""How much quicker than the leader a way would have to be to be worth more rounds."""
_SURE = 2.5
"""Standard errors that make it sure that it is not."""
_FEW, _UNKNOWN, _KNOWN = 6, 0.25, 0.1
"""Before so many rounds how much chance there is cannot be told from them, and a round is taken to be off by the second
of these; later by the third at least."""
_NEW = 4
"""Sums that do not count, or half of them if there are fewer than twice as many."""
_HEARD, _ROW = 0.01, 0.3
"""Seconds for all to wake up before they begin, and of a row of sums."""
_ASKED, _ASKING = 8, 1.0
"""How often a worker is asked for the time, unless asking all of them would take more seconds than this: links so long
forgive a clock that is somewhat off."""


def trials_of(buckets: Iterable[int], steps: float, network: Network) -> dict[int, float]:
    """For a run that adds up buckets of so many bytes in each of so many steps: few sizes that stand for all, the
    largest first, and for how many seconds each may be tried."""
    spent: dict[int, float] = {}
    for size, bucket in sorted(((_within(_LONGEST, bucket, network), bucket) for bucket in buckets), reverse=True):
        alike = next((known for known in spent if _alike(size, known, network)), size)
        if alike in spent or len(spent) < _MOST_SIZES:
            spent[alike] = spent.get(alike, 0.0) + steps * min(worth_trying(bucket, network).values())
    shortest = min(_EACH * steps, _SHORTEST)
    return {size: min(max(shortest, _PART * seconds), _PATIENCE) for size, seconds in spent.items()}


def seconds_of(trials: dict[int, float], network: Network) -> float:
    """What they take in all, about: one round always is made, and for large sizes one with less."""
    rounds = {size: sum(worth_trying(size, network).values()) for size in trials}
    return sum(max(trials[size], rounds[size]) + _LONG * (rounds[size] > _LONG) for size in trials)


def time_ways(
    network: Network, ways: dict[str, Algorithm], trials: dict[int, float], goes_on: Callable[[], bool]
) -> dict[str, dict[int, float]] | None:
    """Seconds by way and size, found out in trials that take so many seconds for each size, or somewhat more; nothing
    if a worker is told that it need not go on, which it asks now and then. All workers must call it."""
    group = dist.group.WORLD
    assert group is not None and network.latency, "there are several workers, and links between them"
    links = Links(group, network.nodes)
    adders: dict[str, Adder] = {name: PointToPoint(way, links) for name, way in ways.items()}
    adders["backend"] = Backend(group)
    for adder in adders.values():  # connections are made, memory is taken, TCP learns
        adder.start(torch.zeros(_first_size(max(trials), network) // 4)).wait()
    found: dict[str, dict[int, float]] = {}
    for size, patience in trials.items():
        meeting = Meeting(links, network.latency, goes_on)  # anew, because clocks drift apart
        some = {name: adders[name] for name in worth_trying(size, network)}
        if (less := _first_size(size, network)) <= size // 4:  # or else it takes longer than it saves
            some = Race(some, less, meeting).close()
        for name, seconds in Race(some, size, meeting).run(patience).items():
            found.setdefault(name, {})[size] = seconds
        if meeting.over:
            return None
    return found


def _first_size(size: int, network: Network) -> int:
    """Bytes of the round that shows who is far behind."""
    return _within(_LONG, size, network)


def _within(seconds: float, size: int, network: Network) -> int:
    while size > SMALL and sum(worth_trying(size, network).values()) > seconds:  # of less only the latency is left
        size //= 2
    return size


def _alike(size: int, larger: int, network: Network) -> bool:
    shorter, longer = worth_trying(size, network), worth_trying(larger, network)
    return shorter.keys() == longer.keys() and all(longer[name] < _ALIKE * shorter[name] for name in longer)


class Race:
    """Ways that take turns at sums of one size."""

    def __init__(self, adders: dict[str, Adder], size: int, meeting: "Meeting") -> None:
        self._adders, self._flat, self._meeting = adders, torch.zeros(size // 4), meeting
        self._times: dict[str, list[float]] = {name: [] for name in adders}
        self._left, self._rounds, self._started = list(adders), 0, meeting.clock
        self._spent = self._each = 0.0

    def close(self) -> dict[str, Adder]:
        """Those that one round does not leave far behind."""
        self._go_round(0.0)
        self._drop()
        return {name: self._adders[name] for name in self._left}

    def run(self, patience: float) -> dict[str, float]:
        """Seconds of a sum by each: of the leader what it mostly took, of each other as many times more as it was
        behind in the rounds that it was in."""
        self._go_round(0.0)
        row = min(_ROW, patience / (2 * len(self._left)))
        while len(self._left) > 1 and not self._meeting.over and self._following() <= patience:
            self._go_round(row)
            # Who looks after every round finds chance to be on some side at last.
            if self._spent > _SOON and self._rounds.bit_count() == 1:
                self._drop()
        leader = self._times[self._leader()]
        return {name: math.exp(_usual(leader) + behind(times, leader)[0]) for name, times in self._times.items()}

    def _go_round(self, row: float) -> None:
        """Each adds up for so many seconds, once at least, in the reverse order of the round before, so that what one
        leaves behind for the next falls on all alike; as often as all others."""
        before, began = max(self._times[name][-1] if self._rounds else 0.0 for name in self._left), self._spent
        for name in self._left:
            self._times[name] += self._meeting.time(self._adders[name], self._flat, before, row)
        self._spent = self._meeting.clock - self._started
        self._each = (self._spent - began) / len(self._left)
        self._rounds += 1
        self._left.reverse()

    def _following(self) -> float:
        """Seconds spent, after another round."""
        return self._spent + self._each * len(self._left)

    def _drop(self) -> None:
        """Those that are sure to be no better than the leader, or by little."""
        leader = self._leader()
        self._left = [name for name in self._left if name == leader or self._may_lead(name, leader)]

    def _may_lead(self, name: str, leader: str) -> bool:
        gap, error = behind(self._times[name], self._times[leader])
        return gap - _SURE * error < -_LEVEL

    def _leader(self) -> str:
        return min(self._left, key=lambda name: _usual(self._times[name]))


def behind(times: Sequence[float], leader: Sequence[float]) -> tuple[float, float]:
    """By how much a way is behind the leader, as the logarithm of a ratio, and the standard error of that. Rounds are
    compared one by one, because what else the machines and links do falls on both."""
    ratios = [math.log(one / other) for one, other in list(zip(times, leader, strict=False))[_unlike(times) :]]
    return _middle(ratios), _chance(ratios) / math.sqrt(len(ratios))


def _usual(times: Sequence[float]) -> float:
    """Seconds of a sum, as a logarithm."""
    return _middle([math.log(seconds) for seconds in times[_unlike(times) :]])


def _unlike(times: Sequence[float]) -> int:
    """How many do not count: how memory and links first come into use is not what a run will see."""
    return min(len(times) // 2, _NEW)


def _middle(values: Sequence[float]) -> float:
    """The mean of the middle half: one bad round may be chance, and the median alone knows less."""
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _chance(values: Sequence[float]) -> float:
    """By how much one may be off, as a standard deviation."""
    if len(values) < _FEW:
        return _UNKNOWN
    low, _, high = statistics.quantiles(values, method="inclusive")
    return max((high - low) / 1.35, _KNOWN)  # 1.35 σ lie between the quartiles


class Meeting:
    """Where workers say at the first one how long they took, and are told when to begin, all at the same moment: it
    knows by how much the clock of each is ahead of its own. (A barrier lets some go before others have heard of it;
    over a long link, by as much as a sum takes.)"""

    def __init__(self, links: Links, latency: float, goes_on: Callable[[], bool]) -> None:
        self._links, self._others, self._goes_on = links, range(1, links.size), goes_on
        self._ahead, self._away = [0.0] * links.size, 0.0
        times = int(_ASKING / (2 * latency * len(self._others)))
        for other in self._others:
            self._compare_clocks(other, max(1, min(times, _ASKED)))
            goes_on()
        self.over = False
        """Whether a worker need not go on."""
        self._begin, self.clock = 0.0, 0.0
        """When the next sum begins, by the worker's own clock and by that of the first, which is the same for all."""
        self._agree([])

    def time(self, adder: Adder, flat: torch.Tensor, before: float, row: float) -> list[float]:
        """Seconds of each sum in a row of so many, one at least, as all workers know them: of the worker that took
        longest, for training waits for it. There is time for half as much again as they took before, and nobody says a
        word between them: each would disturb who is not done."""
        begin, apart, took = self._begin, 1.5 * before + _HEARD, []
        for _ in range(max(1, int(row / apart))):
            time.sleep(max(0.0, begin - time.monotonic()))
            adder.start(flat).wait()
            took.append(time.monotonic() - begin)
            begin += apart
        return self._agree(took)

    def _compare_clocks(self, other: int, times: int) -> None:
        """The quickest of some answers says it best, for it came in the middle of its time (Mills 1991)."""
        links, rank = self._links, self._links.rank
        asked = [torch.zeros(1, dtype=torch.float64) for _ in range(times)]
        if rank == other:
            for question, arriving in [(each, links.receive(each, 0)) for each in asked]:
                arriving.wait()
                links.send(question.fill_(time.monotonic()), 0).wait()
        if rank == 0:
            answers = []
            for answer, arriving in [(each, links.receive(each, other)) for each in asked]:
                began = time.monotonic()
                links.send(torch.zeros(1, dtype=torch.float64), other).wait()
                arriving.wait()
                took = time.monotonic() - began
                answers.append((took, answer.item() - began - took / 2))
            quickest, self._ahead[other] = min(answers)
            self._away = max(self._away, quickest)

    def _agree(self, own: list[float]) -> list[float]:
        """On the longest of all, when to begin, and whether to go on."""
        links = self._links
        said = torch.tensor([[0.0, 0.0, not self._goes_on(), *own]] * links.size, dtype=torch.float64)
        if links.rank == 0:
            wait_for([links.receive(said[other], other) for other in self._others])
            begin = time.monotonic() + self._away + _HEARD
            said[:] = said.amax(dim=0)
            said[:, 0] = begin
            said[:, 1] = begin + torch.tensor(self._ahead, dtype=torch.float64)
            wait_for([links.send(said[other], other) for other in self._others])
        else:
            heard = links.receive(said[0], 0)
            links.send(said[links.rank], 0).wait()
            heard.wait()
        self.clock, self._begin, over, *longest = said[0].tolist()
        self.over = bool(over)
        return longest
