"""`auto`: which way of adding up is the quickest for a bucket, by latency α and bandwidth 1/β of the links.

The usual model: a message of n bytes takes α + nβ (Thakur, Rabenseifner and Gropp 2005), and what handling it costs.
Its constants were fitted to runs of `benchmarks/allreduce.py`. It says which ways are worth a trial (`timing.py`), and
what was measured there for all workers and some sizes means for other sizes and for groups of workers. What is chosen
follows from the bucket's size, the workers' machines and what was measured when the run first started, and from nothing
else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.plan import Network
from slipstream.train.exchange.adding.halving_doubling import SMALL

_ASKS = 2.1
"""Latencies of a step of gloo's ring: it asks at each whether the other is ready to receive."""
_AT_ONCE = 2**22
"""Bytes of a part that gloo's ring sends in one step; more take more steps."""
_WINDOW = 2.5e6
"""Bytes that TCP has under way on one connection, with Linux's usual buffers (4 MB, with what it notes down itself)."""
_WORTH = 3.0
"""How many times longer than the quickest a way may take by the model, to be tried."""


@dataclass(frozen=True)
class Cost:
    """What a sum costs a worker."""

    steps: float
    """Each takes a latency."""
    sent: float
    """Bytes."""
    narrow: float
    """Of them, those that take one connection at a time: what is more than a window in each step waits for answers."""
    handling: float
    """Seconds for each byte more than in gloo, where no message passes through Python or lies before it is added."""

    def seconds(self, latency: float, bandwidth: float) -> float:
        """On these links."""
        waiting = max(0.0, self.narrow / _WINDOW - self.steps) * 2 * latency
        return self.steps * latency + max(self.sent / bandwidth, waiting) + self.sent * self.handling


def choose(size: int, nodes: Sequence[int], network: Network | None) -> str:
    """The quickest for a bucket of so many bytes. On one machine it is the backend's own, and nothing is measured."""
    if network is None or not network.latency or len(set(nodes)) == 1:
        return "backend"
    expected = _expected(size, nodes, network)
    found = {name: expected[name] * _factor(name, size, network) for name in _tried_near(size, network)} or expected
    return min(found, key=lambda name: found[name])


def worth_trying(size: int, network: Network) -> dict[str, float]:
    """The ways that may be the quickest for all workers, and how long each should take."""
    expected = _expected(size, network.nodes, network)
    return {name: seconds for name, seconds in expected.items() if seconds <= _WORTH * min(expected.values())}


def _expected(size: int, nodes: Sequence[int], network: Network) -> dict[str, float]:
    assert network.latency and network.bandwidth, "both are measured, or none"
    return {name: cost(size, nodes).seconds(network.latency, network.bandwidth) for name, cost in COSTS.items()}


def _tried_near(size: int, network: Network) -> list[str]:
    """The ways that were tried at the size nearest to this: another may have been right to leave out there."""
    tried = {each for sizes in network.sums.values() for each in sizes}
    nearest = min(tried, key=lambda each: abs(math.log(each / size)), default=None)
    return [name for name, sizes in network.sums.items() if nearest in sizes]


def _factor(name: str, size: int, network: Network) -> float:
    """How many times longer a way took than it should by the model; between two sizes that were tried, in between."""
    tried = sorted(network.sums[name])
    factors = [network.sums[name][each] / _expected(each, network.nodes, network)[name] for each in tried]
    return math.exp(float(np.interp(math.log(size), np.log(tried), np.log(factors))))


def _backend(size: int, nodes: Sequence[int]) -> Cost:
    workers = len(nodes)
    steps, sent = 2 * (workers - 1) * max(1.0, size / workers / _AT_ONCE), 2 * (workers - 1) / workers * size
    return Cost(_ASKS * steps, sent, narrow=sent, handling=0.0)


def _ring(size: int, nodes: Sequence[int]) -> Cost:
    """Only steps between machines take their time."""
    workers = len(nodes)
    between = sum(nodes[rank] != nodes[rank - 1] for rank in range(workers)) / workers
    sent = 2 * (workers - 1) / workers * size
    return Cost(2 * (workers - 1) * between, sent, narrow=sent, handling=1e-9)


def _tree(size: int, nodes: Sequence[int]) -> Cost:
    return Cost(2 * (len(nodes).bit_length() - 1), 2 * size, narrow=size / 2, handling=1e-9)


def _halving_doubling(size: int, nodes: Sequence[int]) -> Cost:
    doublings = len(nodes).bit_length() - 1
    extra = 2 * (len(nodes) != 2**doublings)
    steps, sent = 2 * doublings + extra, (2 * (1 - 0.5**doublings) + extra) * size
    if size <= SMALL:
        steps, sent = doublings + extra, (doublings + extra) * size
    return Cost(steps, sent, narrow=sent, handling=2e-9)


def _hierarchical(size: int, nodes: Sequence[int]) -> Cost:
    """Two trees between machines; inside them bytes are only handled. No choice where each worker has its own."""
    machines = len(set(nodes))
    steps = 2 * (machines.bit_length() - 1) if machines < len(nodes) else float("inf")
    return Cost(steps, 2 * size, narrow=size / 2, handling=1e-9)


COSTS: dict[str, Callable[[int, Sequence[int]], Cost]] = {
    "backend": _backend,
    "ring": _ring,
    "tree": _tree,
    "halving-doubling": _halving_doubling,
    "hierarchical": _hierarchical,
}
