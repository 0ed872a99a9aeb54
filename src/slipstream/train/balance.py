"""Unequal workers: each takes as much of a batch as it can do in the time of the others (`exchange.balance`).

How fast each computes is measured as it goes, and now and then all workers tell each other. What they agree on counts
some steps later, when nobody has begun to fetch samples for it. Losses are weighed by sample, so that only the order of
additions depends on who computes what.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

from slipstream.data.mixing import apportion
from slipstream.job import Job
from slipstream.job.exchange import is_balanced
from slipstream.plan import Plan
from slipstream.train.moment import Moment
from slipstream.train.world import World

ROUND = 8
"""Steps from one measurement to the next."""
AHEAD = 6
"""Steps after which a measurement counts: more than are fetched ahead."""
Rates = tuple[float, ...]
"""Samples a second, of each worker."""


class Balance:
    """Who takes which samples of a step; evenly, unless the job wants it otherwise."""

    def __init__(self, job: Job, plan: Plan, rank: int) -> None:
        self.works = is_balanced(job) and plan.layout.workers > 1
        self._layout, self._rank = plan.layout, rank
        self._unit = plan.layout.micro_batch if plan.compile else 1  # every other length would be compiled anew
        self._rates: list[tuple[int, Rates]] = [(0, (1.0,) * plan.layout.data)]
        """From which step on, and what."""
        self._asked = 0
        """The last step that somebody fetches samples for."""
        self._measured: list[tuple[int, Moment, Moment]] = []
        self._even = lru_cache(lambda size: plan.layout.share(rank, 0, size))

    def part(self, step: int, size: int) -> range:
        """Which samples of a step, of so many, are this worker's."""
        if not self.works:
            return self._even(size)
        self._asked = max(self._asked, step)
        rates = next(rates for since, rates in reversed(self._rates) if since <= step)
        ends = list(itertools.accumulate(shares(rates, size, self._unit)))
        return range(ends[self._rank - 1] if self._rank else 0, ends[self._rank])

    @contextmanager
    def measuring(self, step: int, samples: int, world: World) -> Iterator[None]:
        """Around the computation of this worker's samples of a step."""
        if not self.works:
            yield
            return
        if len(self._measured) == ROUND:
            self._agree(step, world)
        began = Moment(world.device)
        yield
        self._measured.append((samples, began, Moment(world.device)))

    def _agree(self, step: int, world: World) -> None:
        """Before gradients travel, which would be in the way."""
        self._measured[-1][2].wait()
        seconds = sum(ended.since(began) for _, began, ended in self._measured[1:])  # the first may have had to wait
        done = sum(samples for samples, *_ in self._measured[1:])
        mine = torch.zeros(world.size, dtype=torch.float64)
        mine[world.rank] = done / max(seconds, 1e-9)
        self._measured.clear()
        assert self._asked < step + AHEAD, "all workers must take the same step by the same rates"
        self._rates = [*self._rates[-1:], (step + AHEAD, tuple(world.sum(mine).tolist()))]


@lru_cache(maxsize=64)
def shares(rates: Rates, size: int, unit: int = 1) -> tuple[int, ...]:
    """How many of `size` samples each worker takes, in proportion to its rate: whole units, and at least one each where
    there are as many, so that its speed is known; the last takes what does not fill a unit."""
    units = -(-size // unit)
    given = apportion(rates, units)
    for worker in np.flatnonzero(given == 0) if units >= len(rates) else ():
        given[given.argmax()] -= 1
        given[worker] = 1
    taken = given * unit
    taken[np.flatnonzero(taken)[-1]] -= units * unit - size
    return tuple(taken.tolist())
