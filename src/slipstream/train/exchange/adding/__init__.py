"""How the flat gradients of several workers become their sum: one file per way, one line each in the table."""

import torch.distributed as dist
from torch import nn

from slipstream.job.exchange import AllReduce
from slipstream.train.exchange.adding.backend import Backend
from slipstream.train.exchange.adding.base import Adder, Pending
from slipstream.train.exchange.adding.halving_doubling import halving_doubling
from slipstream.train.exchange.adding.hierarchical import hierarchical
from slipstream.train.exchange.adding.links import Algorithm
from slipstream.train.exchange.adding.ring import ring
from slipstream.train.exchange.adding.tree import tree

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "tree": tree,
    "halving-doubling": halving_doubling,
    "hierarchical": hierarchical,
}


def build_adder(setting: AllReduce, group: dist.ProcessGroup, weights: list[nn.Parameter]) -> Adder:  # noqa: ARG001
    """What adds up the gradients of these weights over a group."""
    return Backend(group)


__all__ = ["ALGORITHMS", "Adder", "Pending", "build_adder"]
