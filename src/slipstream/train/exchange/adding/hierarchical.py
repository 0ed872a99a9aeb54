"""Two levels: a sum inside each machine, one between machines by one worker of each, and back. For links between
machines that are much slower than those inside: they carry the tensor once for each machine, not for each worker.

Inside a machine workers stand in a row and pass segments on; between machines two trees do the rest.
"""

import torch
from torch import Tensor

from slipstream.train.exchange.adding.base import Pending
from slipstream.train.exchange.adding.links import Links, segments, wait_for
from slipstream.train.exchange.adding.tree import tree


def hierarchical(flat: Tensor, links: Links) -> None:
    """2(m − 1) steps among the m workers of a machine, 2 log₂ N between N machines."""
    first = {node: rank for rank, node in reversed(list(enumerate(links.nodes)))}
    here = links.among([rank for rank, node in enumerate(links.nodes) if node == links.nodes[links.rank]])
    own = segments(flat)
    # A sum may be received where the worker's own numbers still stand: it cannot come before those were sent.
    coming_down = [here.receive(segment, here.rank - 1) for segment in own] if here.rank else []
    sent = _sum_up(flat, here)
    if here.rank == 0:
        tree(flat, links.among(sorted(first.values())))
    wait_for(sent)
    sent = []
    for number, segment in enumerate(own):
        if here.rank:
            coming_down[number].wait()
        if here.rank + 1 < here.size:
            sent.append(here.send(segment, here.rank + 1))
    wait_for(sent)


def _sum_up(flat: Tensor, here: Links) -> list[Pending]:
    """Add what comes from the end of the row, and pass it on to its beginning."""
    sent, last = [], here.rank + 1 == here.size
    others = () if last else segments(torch.empty_like(flat))
    arriving = [here.receive(segment, here.rank + 1) for segment in others]
    for number, own in enumerate(segments(flat)):
        if not last:
            arriving[number].wait()
            own.add_(others[number])
        if here.rank:
            sent.append(here.send(own, here.rank - 1))
    return sent
