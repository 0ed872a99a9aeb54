"""How the flat gradients of several workers become their sum: one file per way, one line each in the table."""

import torch.distributed as dist
from torch import nn

from slipstream.job.codecs import AnyCodec, PowerSgd, is_worth_coding
from slipstream.job.exchange import Summing
from slipstream.plan import Network
from slipstream.train.exchange.adding.backend import Backend
from slipstream.train.exchange.adding.base import Adder, Pending
from slipstream.train.exchange.adding.choose import choose
from slipstream.train.exchange.adding.coded import Coded
from slipstream.train.exchange.adding.halving_doubling import halving_doubling
from slipstream.train.exchange.adding.hierarchical import hierarchical
from slipstream.train.exchange.adding.lane import Lane
from slipstream.train.exchange.adding.links import Algorithm, Links, PointToPoint
from slipstream.train.exchange.adding.low_rank import LowRank, as_matrix
from slipstream.train.exchange.adding.ring import ring
from slipstream.train.exchange.adding.scattered import Scattered
from slipstream.train.exchange.adding.summed import Summed
from slipstream.train.exchange.adding.tree import tree
from slipstream.train.exchange.codecs import CODECS

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "tree": tree,
    "halving-doubling": halving_doubling,
    "hierarchical": hierarchical,
}
ADDED = {"fp16": Summed, "bf16": Summed, "randomk": Summed, "int8": Scattered, "onebit": Scattered, "topk": Scattered}
"""How the sum of a codec's codes is taken."""


def build_adder(
    setting: Summing, network: Network | None, lane: Lane, group: dist.ProcessGroup, weights: list[nn.Parameter]
) -> Adder:
    """What adds up the gradients of these weights over a group."""
    if is_coded(setting, weights[0]):
        assert setting.codec, "or nothing is coded"
        return _build_coded(setting.codec, lane, group, weights)
    return _build_plain(setting, network, group, weights)


def _build_plain(
    setting: Summing, network: Network | None, group: dist.ProcessGroup, weights: list[nn.Parameter]
) -> Adder:
    if weights[0].device.type != "cpu":  # NCCL is told by the fleet; a dry run adds up nothing
        return Backend(group)
    ranks = dist.get_process_group_ranks(group)
    nodes = [network.nodes[rank] for rank in ranks] if network else [0] * len(ranks)
    name: str = setting.algorithm
    if name == "auto":
        name = choose(sum(weight.numel() * weight.element_size() for weight in weights), nodes, network)
    return Backend(group) if name == "backend" else PointToPoint(ALGORITHMS[name], Links(group, nodes))


def _build_coded(codec: AnyCodec, lane: Lane, group: dist.ProcessGroup, weights: list[nn.Parameter]) -> Coded:
    if isinstance(codec, PowerSgd):
        return LowRank(lane, group, weights, codec)
    return ADDED[codec.name](CODECS[codec.name](codec), lane, group, weights, codec)


def is_coded(setting: Summing, weight: nn.Parameter) -> bool:
    """Whether a weight's gradient goes through the codec."""
    if setting.codec is None or weight.dim() < 2:
        return False
    return bool(is_worth_coding(setting.codec, *as_matrix(weight)))


def matrices_of(model: nn.Module) -> list[tuple[int, int]]:
    """Rows and columns of the weights that a codec may take."""
    return [as_matrix(weight) for weight in model.parameters() if weight.dim() > 1]


__all__ = ["ALGORITHMS", "Adder", "Coded", "Lane", "Pending", "build_adder", "is_coded", "matrices_of"]
