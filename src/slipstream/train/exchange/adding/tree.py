"""Two binary trees, each for half of the tensor: sums climb to the root and come down again. Few steps at any size.

A worker that is an inner node of one tree is a leaf of the other, so that all send and receive alike and links are used
in both directions (Sanders, Speck and Träff 2009; NCCL's trees). Segments follow each other through a tree: while later
ones climb, earlier ones come down. A small tensor takes one tree: half as many messages.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from slipstream.train.exchange.adding.base import Pending
from slipstream.train.exchange.adding.links import Links, segments, wait_for

_SMALL = 2**18
"""Bytes up to which a tensor takes one tree."""


def tree(flat: Tensor, links: Links) -> None:
    """2 log₂ p steps; twice the tensor over each worker's links."""
    add_up(flat, links, [place_in_tree(number, links.rank, links.size) for number in trees_for(flat)])


def trees_for(flat: Tensor) -> range:
    """Their numbers."""
    return range(1 if flat.nbytes <= _SMALL else 2)


def add_up(flat: Tensor, links: Links, places: list["Place"]) -> None:
    """Through as many trees as this worker has places."""
    parts = enumerate(torch.tensor_split(flat, len(places)))
    flows = [_Flow(part, links, places[number], number) for number, part in parts]
    # Whatever a segment waits for stands earlier in the timetables of all workers: they never wait in a circle.
    timetable = sorted(line for flow in flows for line in flow.timetable())
    for _, number, segment, down in timetable:
        flows[number].go_down(segment) if down else flows[number].go_up(segment)
    for flow in flows:
        wait_for(flow.sent)


@dataclass(frozen=True)
class Place:
    """A worker's place in a tree."""

    parent: int | None
    children: list[int]
    height: int
    """Steps until a sum of what is below can be here."""
    down: int
    """Steps until the sum of all can be here."""


@cache
def place_in_tree(number: int, rank: int, size: int) -> Place:
    """In the first tree or in the second.

    Nodes are named 1, 2, … from left to right; the odd ones are leaves. In the second tree everybody moves on by one.
    """
    name = (rank + number) % size + 1
    children = [each for each in range(1, size + 1) if _parent(each, size) == name]
    depth, above = 0, name
    while (parent := _parent(above, size)) is not None:
        depth, above = depth + 1, parent
    parent = _parent(name, size)
    ranks = [(each - 1 - number) % size for each in children]
    return Place(
        parent=None if parent is None else (parent - 1 - number) % size,
        children=ranks,
        height=_height(name),
        down=_height(above) + depth,
    )


def _height(name: int) -> int:
    return (name & -name).bit_length() - 1


def _parent(name: int, size: int) -> int | None:
    bit = name & -name
    above = (name ^ bit) | (bit << 1)
    if above > size:
        above = name ^ bit
    return above or None


class _Flow:
    """One tree's part of the tensor, at one worker."""

    def __init__(self, part: Tensor, links: Links, place: Place, number: int) -> None:
        self._links, self._place, self._number = links, place, number
        self._own = segments(part)
        self._others = [segments(links.room(part)) for _ in place.children]
        self._climbing = [
            [links.receive(segment, child, number) for segment in other]
            for child, other in zip(place.children, self._others, strict=True)
        ]
        # A sum may be received where the worker's own numbers still stand: it cannot come before those were sent.
        above = [] if place.parent is None else self._own
        self._coming_down = [links.receive(segment, place.parent or 0, number) for segment in above]
        self.sent: list[Pending] = []

    def timetable(self) -> list[tuple[int, int, int, bool]]:
        """When which segment goes which way."""
        up, down = self._place.height, self._place.down
        lines = [(up + segment, self._number, segment, False) for segment in range(len(self._own))]
        return lines + [(down + segment, self._number, segment, True) for segment in range(len(self._coming_down))]

    def go_up(self, segment: int) -> None:
        own = self._own[segment]
        for works, other in zip(self._climbing, self._others, strict=True):
            works[segment].wait()
            own.add_(other[segment])
        if self._place.parent is None:
            self._hand_down(own)
        else:
            self.sent.append(self._links.send(own, self._place.parent, self._number))

    def go_down(self, segment: int) -> None:
        self._coming_down[segment].wait()
        self._hand_down(self._own[segment])

    def _hand_down(self, own: Tensor) -> None:
        self.sent += [self._links.send(own, child, self._number) for child in self._place.children]
