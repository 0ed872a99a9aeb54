"""How the flat gradients of several workers become their sum: one file per way, one line each in the table."""

import torch.distributed as dist
from torch import nn

from slipstream.job.exchange import AllReduce
from slipstream.plan import Network
from slipstream.train.exchange.adding.backend import Backend
from slipstream.train.exchange.adding.base import Adder, Pending
from slipstream.train.exchange.adding.choose import choose
from slipstream.train.exchange.adding.halving_doubling import halving_doubling
from slipstream.train.exchange.adding.hierarchical import hierarchical
from slipstream.train.exchange.adding.links import Algorithm, Links, PointToPoint
from slipstream.train.exchange.adding.ring import ring
from slipstream.train.exchange.adding.tree import tree

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "tree": tree,
    "halving-doubling": halving_doubling,
    "hierarchical": hierarchical,
}


def build_adder(
    setting: AllReduce, network: Network | None, group: dist.ProcessGroup, weights: list[nn.Parameter]
) -> Adder:
    """What adds up the gradients of these weights over a group."""
    if weights[0].device.type != "cpu":  # NCCL is told by the fleet; a dry run adds up nothing
        return Backend(group)
    ranks = dist.get_process_group_ranks(group)
    nodes = [network.nodes[rank] for rank in ranks] if network else [0] * len(ranks)
    name: str = setting.algorithm
    if name == "auto":
        name = choose(sum(weight.numel() * weight.element_size() for weight in weights), nodes, network)
    return Backend(group) if name == "backend" else PointToPoint(ALGORITHMS[name], Links(group, nodes))


__all__ = ["ALGORITHMS", "Adder", "Pending", "build_adder"]
