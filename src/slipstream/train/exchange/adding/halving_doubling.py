"""Halving and doubling: workers exchange with ever nearer ones half of what they had before, then back. Few steps, and
as little to send as in a ring.

Where the number of workers is no power of two, some hand their tensor to a neighbour first and get the sum from it last
(Thakur, Rabenseifner and Gropp 2005). A small tensor is not halved: whole, it needs half of the steps.
"""

import torch
from torch import Tensor

from slipstream.train.exchange.adding.links import Links, segments, wait_for

SMALL = 2**16
"""Bytes up to which whole tensors are exchanged."""


def halving_doubling(flat: Tensor, links: Links) -> None:
    """2 log₂ p steps, log₂ p for a small tensor; two more where p is no power of two."""
    extra = links.size - 2 ** (links.size.bit_length() - 1)
    paired = links.rank < 2 * extra
    if paired and links.rank % 2 == 0:
        arriving = [links.receive(segment, links.rank + 1) for segment in segments(flat)]
        wait_for([*(links.send(segment, links.rank + 1) for segment in segments(flat)), *arriving])
        return
    if paired:
        _add_from(flat, links.rank - 1, links)
    inner = links.among([*range(1, 2 * extra, 2), *range(2 * extra, links.size)])
    (_double if flat.numel() * flat.element_size() <= SMALL else _halve_and_double)(flat, inner)
    if paired:
        wait_for([links.send(segment, links.rank - 1) for segment in segments(flat)])


def _double(flat: Tensor, links: Links) -> None:
    """Exchange all with every partner. Both add the same two numbers, and a + b is b + a to the bit."""
    partners = _partners(links)
    received = [links.room(flat) for _ in partners]
    arriving = [
        [links.receive(segment, partner) for segment in segments(other)]
        for partner, other in zip(partners, received, strict=True)
    ]
    for partner, other, works in zip(partners, received, arriving, strict=True):
        wait_for([*(links.send(segment, partner) for segment in segments(flat)), *works])
        flat.add_(other)


def _halve_and_double(flat: Tensor, links: Links) -> None:
    part, steps = flat, []
    for partner in _partners(links):
        lower, upper = torch.tensor_split(part, 2)
        part, given = (lower, upper) if links.rank < partner else (upper, lower)
        steps.append((partner, part, given, links.room(part)))
    halves = [[links.receive(piece, partner) for piece in segments(other)] for partner, _, _, other in steps]
    wholes = [[links.receive(piece, partner) for piece in segments(given)] for partner, _, given, _ in reversed(steps)]
    sent = []
    for (partner, part, given, other), works in zip(steps, halves, strict=True):
        sent += [links.send(piece, partner) for piece in segments(given)]
        for work, own, piece in zip(works, segments(part), segments(other), strict=True):
            work.wait()
            own.add_(piece)
    for (partner, part, _, _), works in zip(reversed(steps), wholes, strict=True):
        sent += [links.send(piece, partner) for piece in segments(part)]
        wait_for(works)
    wait_for(sent)


def _partners(links: Links) -> list[int]:
    """The farthest first; the number of workers is a power of two."""
    return [links.rank ^ 2**bit for bit in reversed(range(links.size.bit_length() - 1))]


def _add_from(flat: Tensor, source: int, links: Links) -> None:
    other = links.room(flat)
    works = [links.receive(segment, source) for segment in segments(other)]
    for work, own, segment in zip(works, segments(flat), segments(other), strict=True):
        work.wait()
        own.add_(segment)
