"""`auto`: which way of adding up is the quickest for a bucket, by latency α and bandwidth 1/β of the links.

The usual model: a message of n bytes takes α + nβ (Thakur, Rabenseifner and Gropp 2005). What is chosen follows from
the bucket's size, the workers' machines and what was measured when the run first started, and from nothing else.
"""

from collections.abc import Callable, Sequence

from slipstream.plan import Network
from slipstream.train.exchange.adding.halving_doubling import SMALL

_ASKS = 2.1
"""Latencies of a step of gloo's ring: it asks at each whether the other is ready to receive."""
_HANDLING = 1.15
"""What a byte costs in our algorithms beside gloo's: messages are handled in Python, and received where they must be
added from."""


def choose(size: int, nodes: Sequence[int], network: Network | None) -> str:
    """The quickest for a bucket of so many bytes. On one machine it is the backend's own: there is nothing to gain that
    a measurement could tell."""
    if network is None or not network.latency or not network.bandwidth or len(set(nodes)) == 1:
        return "backend"
    costs = {name: cost(size, nodes) for name, cost in COSTS.items()}
    times = {name: steps * network.latency + moved / network.bandwidth for name, (steps, moved) in costs.items()}
    return min(times, key=times.__getitem__)


def _backend(size: int, nodes: Sequence[int]) -> tuple[float, float]:
    steps, moved = _ring(size, nodes)
    return _ASKS * steps, moved / _HANDLING


def _ring(size: int, nodes: Sequence[int]) -> tuple[float, float]:
    others = len(nodes) - 1
    return 2 * others, _HANDLING * 2 * others / len(nodes) * size


def _tree(size: int, nodes: Sequence[int]) -> tuple[float, float]:
    return 2 * (len(nodes).bit_length() - 1), _HANDLING * 2 * size


def _halving_doubling(size: int, nodes: Sequence[int]) -> tuple[float, float]:
    doublings = len(nodes).bit_length() - 1
    extra = 2 * (len(nodes) != 2**doublings)
    if size <= SMALL:
        return doublings + extra, _HANDLING * (doublings + extra) * size
    return 2 * doublings + extra, _HANDLING * (2 * (1 - 0.5**doublings) + extra) * size


def _hierarchical(size: int, nodes: Sequence[int]) -> tuple[float, float]:
    """Links inside a machine cost nothing beside those between machines. No choice where each worker has its own."""
    machines = sorted(set(nodes))
    steps, moved = _tree(size, machines)
    return (steps, moved) if len(machines) < len(nodes) else (float("inf"), moved)


COSTS: dict[str, Callable[[int, Sequence[int]], tuple[float, float]]] = {
    "backend": _backend,
    "ring": _ring,
    "tree": _tree,
    "halving-doubling": _halving_doubling,
    "hierarchical": _hierarchical,
}
"""Steps, each of which takes a latency, and bytes that one worker sends, as gloo's own ring sends them."""
