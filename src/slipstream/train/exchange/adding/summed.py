"""Codes that add up themselves: fp16, bf16 and randomk."""

import torch.distributed as dist
from torch import Tensor, nn

from slipstream.job.codecs import AnyCodec
from slipstream.train.exchange.adding.coded import Coded
from slipstream.train.exchange.adding.lane import Lane
from slipstream.train.exchange.codecs import Codec


class Summed(Coded):
    """Every worker encodes with the same key, and the backend sums the codes."""

    def __init__(
        self, codec: Codec, lane: Lane, group: dist.ProcessGroup, weights: list[nn.Parameter], setting: AnyCodec
    ) -> None:
        super().__init__(lane, group, weights, setting)
        self._codec = codec
        # fp16 ends at 65,504, and the sum of many may come to more. By a power of two no digit is lost.
        self._scale = 0.5 ** (self._workers - 1).bit_length()

    def _add(self, x: Tensor, total: Tensor, position: int) -> None:
        key = self._lane.key(position, self._bucket)
        code = self._codec.encode(x * self._scale, key)
        if self._feedback:
            x.sub_(self._codec.decode(code, total, key), alpha=1 / self._scale)
        self._all_reduce(code)
        total.copy_(self._codec.decode(code, total, key)).div_(self._scale)
