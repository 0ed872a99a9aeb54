"""How long the ways of adding up really take between these machines: tried once, when a run first starts.

A model knows little of what else decides: how TCP starts, how many connections a switch bears, which processor hands
over the messages. Sizes are few, and ways that by the model are far behind are left out: it takes as long as a few
steps.
"""

import statistics
import time

import torch
import torch.distributed as dist

from slipstream.plan import Network
from slipstream.train.exchange.adding.backend import Backend
from slipstream.train.exchange.adding.base import Adder
from slipstream.train.exchange.adding.choose import worth_trying
from slipstream.train.exchange.adding.links import Algorithm, Links, PointToPoint

_SIZES = tuple(2**10 * 4**power for power in range(8))
"""Bytes: 1 KB to 16 MB."""
_SECONDS = 0.6
"""For the rounds of a size, about."""
_BEHIND = 1.5
"""How many times longer than the quickest a way may take, to be tried once more."""
_LONG = 2.5
"""Seconds of a first round that is not followed by another: it counts itself."""
_MOST = 60
"""Rounds: over quick links some ways differ by less than one round from the next."""
_IN_A_ROW, _QUICK = 4, 0.05
"""So many sums follow each other, where one takes no more seconds than this."""
_PATIENCE = 5.0
"""Seconds that a size may take by the model, all ways together, to be tried."""


def time_ways(network: Network, ways: dict[str, Algorithm], largest: int) -> dict[str, dict[int, float]]:
    """Seconds by way and size, for the sizes of buckets up to about `largest`. All workers must call it."""
    group = dist.group.WORLD
    assert group is not None, "there are several workers"
    links = Links(group, network.nodes)
    adders: dict[str, Adder] = {name: PointToPoint(way, links) for name, way in ways.items()}
    adders["backend"] = Backend(group)
    found: dict[str, dict[int, float]] = {}
    for size in (size for size in _SIZES if size < 3 * largest):
        worth = worth_trying(size, network)
        if sum(worth.values()) > _PATIENCE:
            break
        for name, seconds in _typical({name: adders[name] for name in worth}, size).items():
            found.setdefault(name, {})[size] = seconds
    return found


def _typical(adders: dict[str, Adder], size: int) -> dict[str, float]:
    """Seconds of each, the median of some rounds. The first one makes connections, and counts only where it is long."""
    flat = torch.zeros(size // 4)
    first = _round(adders, flat, 1)
    if sum(first.values()) > _LONG:
        return first
    repeats = _IN_A_ROW if max(first.values()) < _QUICK else 1
    times: dict[str, list[float]] = {name: [] for name in adders}
    left, spent = adders, 0.0
    while spent < _SECONDS and len(times[next(iter(left))]) < _MOST:
        for name, seconds in _round(left, flat, repeats).items():
            times[name].append(seconds)
            spent += seconds * repeats
        best = min(statistics.median(times[name]) for name in left)
        left = {name: adder for name, adder in left.items() if statistics.median(times[name]) < _BEHIND * best}
    return {name: statistics.median(each) for name, each in times.items()}


def _round(adders: dict[str, Adder], flat: torch.Tensor, repeats: int) -> dict[str, float]:
    """Seconds of a sum by each, as all workers know it: the mean of theirs, for a barrier does not let them go at the
    same time; and several sums follow each other, as buckets do."""
    times = torch.zeros(len(adders), dtype=torch.float64)
    for number, adder in enumerate(adders.values()):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            adder.start(flat).wait()
        times[number] = (time.perf_counter() - began) / repeats
    dist.all_reduce(times)
    return dict(zip(adders, (times / dist.get_world_size()).tolist(), strict=True))
