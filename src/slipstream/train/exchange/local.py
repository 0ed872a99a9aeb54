"""Local steps: every worker updates weights of its own, and every H steps all agree again.

The anchor is what all agreed on last. What a worker has changed since, anchor − weights, is averaged over all workers
and taken for a gradient: an outer step moves the anchor by it, and the workers go on from there. All the way it is the
mean of their weights (local SGD; Stich 2018, arXiv 1805.09767); with Nesterov's momentum it is DiLoCo (Douillard et al.
2023, arXiv 2311.08105). The changes travel as gradients do, in buckets, by any algorithm and through any codec.

With `overlap` they travel while the workers go on, for a fixed number of steps; when they arrive, a worker takes the
step from where it was when they left, and keeps what it has changed in the meantime (Shen et al. 2019, arXiv
1906.12043).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from slipstream.job.exchange import Local as Setting
from slipstream.job.exchange import Outer
from slipstream.plan import Network
from slipstream.train.exchange.adding import build_adder, is_coded
from slipstream.train.exchange.adding.base import Adder, Pending
from slipstream.train.exchange.adding.coded import Coded, held_by_codes, ring_bytes
from slipstream.train.exchange.adding.lane import Lane
from slipstream.train.exchange.allreduce import fill_buckets
from slipstream.train.exchange.base import Kept, Sum, Traffic

_BEHIND = 4
"""Steps, at most, after which a worker must know what the others said of one: their word crosses long links too."""


@dataclass(frozen=True)
class Held:
    """What is held of one weight between exchanges. All workers hold the same, but for `change`."""

    anchor: Tensor
    """What all agreed on last."""
    momentum: Tensor | None
    """Of the outer step, where it has one."""
    mean: Tensor
    """Of the exchange under way: what all workers have changed on average, once it is here."""
    change: Tensor | None
    """Of the exchange under way: what this worker has changed, where it goes on in the meantime."""


class _Bucket:
    """Some weights whose changes travel as one flat tensor."""

    def __init__(self, adder: Adder, weights: list[nn.Parameter], workers: int, outer: Outer, overlap: int) -> None:
        self.adder, self.weights, self._workers, self._outer = adder, weights, workers, outer
        self.values: list[Tensor] = [weight.detach() for weight in weights]
        self.anchor = torch.cat([value.flatten() for value in self.values])
        self.mean = torch.zeros_like(self.anchor)
        self.momentum = torch.zeros_like(self.anchor) if outer.momentum else None
        self.change = torch.zeros_like(self.anchor) if overlap else None
        self.sent: Pending | None = None

    def send(self) -> None:
        torch._foreach_copy_(self.views(self.mean), self.values)
        torch.sub(self.anchor, self.mean, out=self.mean)
        if self.change is not None:
            self.change.copy_(self.mean)
        self.mean /= self._workers
        self.sent = self.adder.start(self.mean)

    def settle(self) -> int:
        """What was sent is here: bytes that this worker has sent for it."""
        if not isinstance(self.adder, Coded):
            return ring_bytes(self.mean, self._workers)
        self.adder.settle(torch.zeros((), device=self.mean.device))
        return self.adder.sent

    def step(self, stood: bool) -> None:
        """Move the anchor by the mean, and the weights with it: to the same place, if they stood still meanwhile."""
        step, outer = self.mean, self._outer
        if self.momentum is not None:
            self.momentum.mul_(outer.momentum).add_(self.mean)
            step = self.mean.add(self.momentum, alpha=outer.momentum) if outer.nesterov else self.momentum
        self.anchor.sub_(step, alpha=outer.lr)
        if stood:
            torch._foreach_copy_(self.values, self.views(self.anchor))
        else:
            assert self.change is not None, "there is an overlap"
            torch._foreach_add_(self.values, self.views(self.change.sub_(step, alpha=outer.lr)))

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [weight.numel() for weight in self.weights])
        return [part.view_as(weight) for part, weight in zip(parts, self.weights, strict=True)]

    def held(self) -> Iterator[Held]:
        flats = (self.anchor, self.momentum, self.mean, self.change)
        none: list[None] = [None] * len(self.weights)
        for anchor, momentum, mean, change in zip(*(none if f is None else self.views(f) for f in flats), strict=True):
            assert anchor is not None and mean is not None, "always there"
            yield Held(anchor, momentum, mean, change)


class Local:
    """The exchange of workers that each hold all weights."""

    def __init__(self, sums: list[Sum], setting: Setting, network: Network | None, seed: int) -> None:
        (whole,) = sums
        assert whole.group, "there are several workers"
        self._group, self._setting, self._network = whole.group, setting, network
        self.worker, self.workers = whole.group.rank(), whole.group.size()
        self.behind = min(_BEHIND, setting.every)
        self.sent = 0
        """The step after which the exchange under way began; 0 if there is none."""
        self.bytes = 0
        """That this worker has sent for it, once it has arrived."""
        self._lane = Lane(seed)
        self._gradients = whole.parameters
        self._names: dict[nn.Parameter, str] = {}
        """Of buffers, by what stands for them in a bucket."""
        self._buckets: list[_Bucket] = []
        self._add(whole.parameters, setting)
        self._traffic = Traffic(0, 0)

    def carry(self, buffers: Mapping[str, Tensor]) -> None:
        """Average these too: running statistics, which every worker has of its own samples. They go as they are, and
        all the way."""
        numbers = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._names = {nn.Parameter(buffer, requires_grad=False): name for name, buffer in numbers.items()}
        self._add(list(self._names), self._setting.model_copy(update={"codec": None, "outer": Outer()}))

    def begin(self, position: int, total: int) -> None:
        """Nothing travels during backward."""
        self._lane.position, self._lane.total = position, total

    def finish(self) -> None:
        """Gradients are parts of the mean over all workers' samples: make them those of a whole batch, so that on
        average over the workers each sample counts as it should."""
        torch._foreach_mul_([w.grad for w in self._gradients if w.grad is not None], float(self.workers))

    def settle(self, skipped: Tensor, step: int, last: bool) -> None:  # noqa: ARG002
        """After H steps begin to exchange, and some steps later take the outer step. A run ends in agreement."""
        self._traffic = Traffic(0, 0)
        every, overlap = self._setting.every, self._setting.overlap
        if self.sent and (last or step >= self.sent + overlap):
            self._take_step(stood=False)
        if last or step % every == 0:
            self.sent, self.bytes = step, 0
            for bucket in self._buckets:
                bucket.send()
            if last or not overlap:
                self._take_step(stood=True)

    def arrive(self) -> None:
        """Return when the exchange under way is here; its step is taken when the time for it has come."""
        for bucket in self._buckets:
            if bucket.sent is not None:
                bucket.sent.wait()
                bucket.sent = None
                self.bytes += bucket.settle()

    def kept(self) -> list[Kept]:
        """What codes have left out so far."""
        self.arrive()
        coded = [kept for bucket in self._buckets if isinstance(bucket.adder, Coded) for kept in bucket.adder.kept()]
        return [replace(kept, slot="change") if kept.slot == "memory" else kept for kept in coded]

    def held_bytes(self) -> dict[str, int]:
        """The anchor, the momentum of outer steps, what is on its way, and what codes are made of and leave out."""
        buckets = self._buckets
        return {
            "anchor": sum(bucket.anchor.nbytes for bucket in buckets),
            "outer": sum(bucket.momentum.nbytes for bucket in buckets if bucket.momentum is not None),
            "travelling": sum(b.mean.nbytes + (0 if b.change is None else b.change.nbytes) for b in buckets),
            **held_by_codes(bucket.adder for bucket in buckets if isinstance(bucket.adder, Coded)),
        }

    def held(self) -> dict[nn.Parameter | str, Held]:
        """What belongs to each weight, and to each buffer by its name."""
        self.arrive()
        pairs = ((w, held) for bucket in self._buckets for w, held in zip(bucket.weights, bucket.held(), strict=True))
        return {self._names.get(weight, weight): held for weight, held in pairs}

    def begin_anew(self) -> None:
        """All workers have the same weights."""
        for bucket in self._buckets:
            torch._foreach_copy_(bucket.views(bucket.anchor), bucket.values)

    def forget_own(self) -> None:
        """Other workers began the exchange under way: this one has changed what they had on average."""
        for bucket in self._buckets:
            if bucket.change is not None:
                bucket.change.copy_(bucket.mean)

    def traffic(self) -> Traffic:
        """Of the exchange whose step was just taken; `plain` is what gradients would have been since the one before."""
        return self._traffic

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """With the weights that all agreed on last in place of this worker's own."""
        values = [value for bucket in self._buckets for value in bucket.values]
        own = [value.clone() for value in values]
        torch._foreach_copy_(values, [view for bucket in self._buckets for view in bucket.views(bucket.anchor)])
        yield
        torch._foreach_copy_(values, own)

    def _add(self, weights: list[nn.Parameter], setting: Setting) -> None:
        for some in fill_buckets(weights, setting.bucket, partial(is_coded, setting)):
            adder = build_adder(setting, self._network, self._lane, self._group, some)
            self._buckets.append(_Bucket(adder, some, self.workers, setting.outer, setting.overlap))

    def _take_step(self, stood: bool) -> None:
        """`stood`: no worker has taken another step since the exchange began."""
        self.arrive()
        for bucket in self._buckets:
            bucket.step(stood)
        plain = sum(ring_bytes(bucket.mean, self.workers) for bucket in self._buckets)
        steps = (self.sent - 1) % self._setting.every + 1  # of this round: the last one may be short
        self._traffic = Traffic(self._traffic.sent + self.bytes, self._traffic.plain + steps * plain)
        self.sent = 0
