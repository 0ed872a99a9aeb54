"""Codes that do not add up: int8, onebit and topk. A compressed reduce-scatter and all-gather.

Each worker adds up one part of the bucket: it gets the codes of the others for it, and sends all of them the code of
the sum. What it has itself of that part needs no code; so its memory of that part is free for what the code of the sum
leaves out, and with the memories of the other workers nothing is lost on the way.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.job.codecs import AnyCodec
from slipstream.train.exchange.adding.coded import Coded
from slipstream.train.exchange.adding.lane import Lane
from slipstream.train.exchange.codecs import Codec


class Scattered(Coded):
    """Two rounds, in each of which a worker sends as many codes of parts as there are others."""

    def __init__(
        self, codec: Codec, lane: Lane, group: dist.ProcessGroup, weights: list[nn.Parameter], setting: AnyCodec
    ) -> None:
        super().__init__(lane, group, weights, setting, even=True)
        self._codec = codec

    def _add(self, x: Tensor, total: Tensor, position: int) -> None:
        parts = x.view(self._workers, -1)
        own, others = parts[self._rank], [number for number in range(self._workers) if number != self._rank]
        arrived = self._scatter(parts, others, position)
        for number in others:
            own.add_(self._codec.decode(arrived[number], own, self._key(position, number, self._rank)))
        mine = self._codec.encode(own, self._key(position, self._rank, self._rank))
        dist.all_gather(list(arrived.unbind()), mine, group=self._group)
        self.sent += len(others) * mine.nbytes
        sums = [self._codec.decode(code, own, self._key(position, n, n)) for n, code in enumerate(arrived)]
        total.copy_(torch.cat(sums)[: total.numel()])
        if self._feedback:
            own.sub_(sums[self._rank])

    def _scatter(self, parts: Tensor, others: list[int], position: int) -> Tensor:
        """Send everyone the code of their part; the codes of this worker's one, one of each worker."""
        codes = {n: self._codec.encode(parts[n], self._key(position, self._rank, n)) for n in others}
        unused = torch.zeros_like(codes[others[0]])  # of its own part
        leaving = torch.stack([codes.get(number, unused) for number in range(self._workers)])
        arrived = torch.empty_like(leaving)
        travelling = dist.all_to_all_single(arrived, leaving, group=self._group, async_op=True)
        if self._feedback:
            for number, code in codes.items():
                parts[number].sub_(self._codec.decode(code, parts[number], self._key(position, self._rank, number)))
        travelling.wait()
        self.sent += sum(code.nbytes for code in codes.values())
        return arrived

    def _key(self, position: int, sender: int, part: int) -> int:
        return self._lane.key(position, self._bucket, sender, part)
