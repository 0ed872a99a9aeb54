"""How the flat gradients of several workers become their sum: one file per way, one line each in the table."""

import torch.distributed as dist
from torch import nn

from slipstream.job.codecs import AnyCodec, PowerSgd
from slipstream.job.exchange import AllReduce
from slipstream.train.exchange.adding.backend import Backend
from slipstream.train.exchange.adding.base import Adder, Pending
from slipstream.train.exchange.adding.coded import Coded
from slipstream.train.exchange.adding.lane import Lane
from slipstream.train.exchange.adding.low_rank import LowRank, as_matrix
from slipstream.train.exchange.adding.scattered import Scattered
from slipstream.train.exchange.adding.summed import Summed
from slipstream.train.exchange.codecs import CODECS

ADDED = {"fp16": Summed, "bf16": Summed, "randomk": Summed, "int8": Scattered, "onebit": Scattered, "topk": Scattered}
"""How the sum of a codec's codes is taken."""
_SMALL = 1024
"""Tensors of fewer numbers travel as they are, and so do those of one dimension: biases and norms."""


def build_adder(setting: AllReduce, lane: Lane, group: dist.ProcessGroup, weights: list[nn.Parameter]) -> Adder:
    """What adds up the gradients of these weights over a group."""
    if is_coded(setting, weights[0]):
        assert setting.codec, "or nothing is coded"
        return _build_coded(setting.codec, lane, group, weights)
    return Backend(group)


def _build_coded(codec: AnyCodec, lane: Lane, group: dist.ProcessGroup, weights: list[nn.Parameter]) -> Coded:
    if isinstance(codec, PowerSgd):
        return LowRank(lane, group, weights, codec)
    return ADDED[codec.name](CODECS[codec.name](codec), lane, group, weights, codec)


def is_coded(setting: AllReduce, weight: nn.Parameter) -> bool:
    """Whether a weight's gradient goes through the codec."""
    if setting.codec is None or weight.dim() < 2 or weight.numel() < _SMALL:
        return False
    if isinstance(setting.codec, PowerSgd):  # two thin matrices must be a good deal smaller than the one
        return 2 * setting.codec.rank * sum(as_matrix(weight)) <= weight.numel()
    return True


__all__ = ["Adder", "Coded", "Lane", "Pending", "build_adder", "is_coded"]
