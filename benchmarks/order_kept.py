"""Whose order of samples survives a resume, and another number of processes. Batches are compared as sets, position by
position: on several ranks a batch is what all of them have together."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from common import console
from loaders import SIDES, Datasets, Turn

Batches = list[list[int]]


def compare_orders(data: Datasets, sides: Sequence[str]) -> list[dict[str, str]]:
    """What becomes of each side's order."""
    return [{"side": side, **_compare(data, side)} for side in sides]


def _compare(data: Datasets, side: str) -> dict[str, str]:
    straight = _read(data, side)
    ways: dict[str, Callable[[], Batches]] = {
        "resumed": partial(_resumed, data, side),
        "two_loader_processes": partial(_read, data, side, workers=2),
        "two_ranks": partial(_read, data, side, ranks=2),
        "resumed_on_two_ranks": partial(_resumed, data, side, ranks=2),
    }
    if not SIDES[side].peer:
        del ways["two_loader_processes"]
    found = {"two_loader_processes": "has none"}
    for name, read in ways.items():
        console.print(f"order of {side}: {name.replace('_', ' ')}", style="dim")
        try:
            found[name] = verdict(straight, read())
        except SystemExit as failure:
            found[name] = f"fails: {str(failure).strip().splitlines()[-1]}"
    return {name: found[name] for name in ("resumed", "two_loader_processes", "two_ranks", "resumed_on_two_ranks")}


def _read(data: Datasets, side: str, workers: int = 0, ranks: int = 1, resume: bool = False) -> Batches:
    return _together([rank["order"] for rank in data.read(Turn(side, workers), order=True, ranks=ranks, resume=resume)])


def _resumed(data: Datasets, side: str, ranks: int = 1) -> Batches:
    half = data.shape.batches // 2
    (before,) = data.read(Turn(side, 0), order=True, stop=half, save_after=half)
    return before["order"] + _read(data, side, ranks=ranks, resume=True)


def _together(ranks: list[Batches]) -> Batches:
    longest = max(map(len, ranks))
    return [[n for rank in ranks for n in (rank[place] if place < len(rank) else [])] for place in range(longest)]


def verdict(straight: Batches, other: Batches) -> str:
    """In words."""
    if [set(batch) for batch in straight] == [set(batch) for batch in other]:
        return "same"
    expected, found = (Counter(number for batch in batches for number in batch) for batches in (straight, other))
    lost, repeated = (expected - found).total(), (found - expected).total()
    return f"changed (lost {lost:,}, repeated {repeated:,})" if lost or repeated else "changed (all there)"
