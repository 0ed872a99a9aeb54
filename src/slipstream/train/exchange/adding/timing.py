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
_SECONDS = 1.0
"""For the rounds of a size, about."""
_LONG = 2.5
"""Seconds of a first round that is not followed by another: it counts itself."""
_MOST = 60
"""Rounds: over quick links some ways differ by less than one round from the next."""
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
    first = _round(adders, flat)
    rounds = min(_MOST, max(int(_SECONDS / sum(first)), sum(first) < _LONG))
    times = [_round(adders, flat) for _ in range(rounds)] or [first]
    return dict(zip(adders, map(statistics.median, zip(*times, strict=True)), strict=True))


def _round(adders: dict[str, Adder], flat: torch.Tensor) -> list[float]:
    """Seconds of each until the last worker has its sum."""
    times = torch.zeros(len(adders), dtype=torch.float64)
    for number, adder in enumerate(adders.values()):
        dist.barrier()
        began = time.perf_counter()
        adder.start(flat).wait()
        times[number] = time.perf_counter() - began
    dist.all_reduce(times, dist.ReduceOp.MAX)
    seconds: list[float] = times.tolist()
    return seconds
