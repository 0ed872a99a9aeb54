"""`auto`: which way of adding up is the quickest for a bucket, by latency α and bandwidth 1/β of the links.

The usual model: a message of n bytes takes α + nβ (Thakur, Rabenseifner and Gropp 2005). What is chosen follows from
the bucket's size, the workers' machines and what was measured when the run first started, and from nothing else.
"""

from collections.abc import Callable, Sequence

from slipstream.plan import Network
from slipstream.train.exchange.adding.halving_doubling import SMALL

_ASKS = 2.1
"""Latencies of a step of gloo's ring: it asks at each whether the other is ready to receive."""
_AT_ONCE = 2**21
"""Bytes that gloo's ring has on their way at once, at most; more take more steps."""
_HANDLING = 4e-9
"""Seconds that a byte costs in our algorithms more than in gloo's: messages are handled in Python, and lie in memory
before they are added. As measured between processes of one machine (docs/benchmarks.md)."""
_WAITING = 8e-9
"""The same where a step waits for all of the one before."""
Cost = tuple[float, float, float]
"""Steps, each of which takes a latency; bytes that one worker sends; seconds beside."""


def choose(size: int, nodes: Sequence[int], network: Network | None) -> str:
    """The quickest for a bucket of so many bytes. On one machine it is the backend's own: there is nothing to gain that
    a measurement could tell."""
    if network is None or not network.latency or not network.bandwidth or len(set(nodes)) == 1:
        return "backend"
    costs = {name: cost(size, nodes) for name, cost in COSTS.items()}
    times = {name: n * network.latency + sent / network.bandwidth + more for name, (n, sent, more) in costs.items()}
    return min(times, key=times.__getitem__)


def _backend(size: int, nodes: Sequence[int]) -> Cost:
    steps, sent, _ = _ring(size, nodes)
    return _ASKS * steps * max(1.0, size / len(nodes) / _AT_ONCE), sent, 0.0


def _ring(size: int, nodes: Sequence[int]) -> Cost:
    steps = 2 * (len(nodes) - 1)
    sent = steps / len(nodes) * size
    return steps, sent, _HANDLING * sent


def _tree(size: int, nodes: Sequence[int]) -> Cost:
    return 2 * (len(nodes).bit_length() - 1), 2 * size, _HANDLING * 2 * size


def _halving_doubling(size: int, nodes: Sequence[int]) -> Cost:
    doublings = len(nodes).bit_length() - 1
    extra = 2 * (len(nodes) != 2**doublings)
    small = size <= SMALL
    steps = (doublings if small else 2 * doublings) + extra
    sent = (doublings if small else 2 * (1 - 0.5**doublings)) * size + extra * size
    return steps, sent, _WAITING * sent


def _hierarchical(size: int, nodes: Sequence[int]) -> Cost:
    """Links inside a machine cost nothing beside those between machines, but bytes are handled there, too. No choice
    where each worker has a machine of its own."""
    machines = sorted(set(nodes))
    steps, sent, more = _tree(size, machines)
    return steps, sent, 2 * more if len(machines) < len(nodes) else float("inf")


COSTS: dict[str, Callable[[int, Sequence[int]], Cost]] = {
    "backend": _backend,
    "ring": _ring,
    "tree": _tree,
    "halving-doubling": _halving_doubling,
    "hierarchical": _hierarchical,
}
