"""Two levels: a sum inside each machine, one between machines by one worker of each, and back. For links between
machines that are much slower than those inside: they carry the tensor once for each machine, not for each worker.

Inside a machine workers stand in a row and pass segments on, the first of them to two trees between machines: to the
trees the row is one more child, and while later segments come along it, earlier ones climb.
"""

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from slipstream.train.exchange.adding.links import Links
from slipstream.train.exchange.adding.tree import Place, add_up, place_in_tree, trees_for


def hierarchical(flat: Tensor, links: Links) -> None:
    """2(m − 1) steps among the m workers of a machine, 2 log₂ N between N machines."""
    add_up(flat, links, [place_in_levels(number, links.rank, tuple(links.nodes)) for number in trees_for(flat)])


@cache
def place_in_levels(number: int, rank: int, nodes: Sequence[int]) -> Place:
    """In a row and, for the first of it, in the first tree or in the second."""
    rows: dict[int, list[int]] = {}
    for each, node in enumerate(nodes):
        rows.setdefault(node, []).append(each)
    row, longest = rows[nodes[rank]], max(map(len, rows.values())) - 1
    firsts, step = sorted(each[0] for each in rows.values()), row.index(rank)
    top = place_in_tree(number, firsts.index(row[0]), len(firsts))
    if step:
        return Place(row[step - 1], row[step + 1 :][:1], height=longest - step, down=top.down + longest + step)
    return Place(
        parent=None if top.parent is None else firsts[top.parent],
        children=[*(firsts[child] for child in top.children), *row[1:2]],
        height=top.height + longest,
        down=top.down + longest,
    )
