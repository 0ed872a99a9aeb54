"""All-reduce: the exact sum of all workers' gradients, in buckets that travel while backward still runs.

torch's DDP is not used, for the promise of one curve: it lays its buckets anew after its first step, so that a resumed
run adds in another order than an undisturbed one. Here the buckets follow from the model alone, in reverse order of
its parameters, which is about the order in which backward completes them (Li et al. 2020, arXiv 2006.15704).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.train.exchange.adding.base import Adder, Pending
from slipstream.train.exchange.adding.coded import Coded, held_by_codes, ring_bytes
from slipstream.train.exchange.adding.lane import Lane
from slipstream.train.exchange.base import Kept, Sum, Traffic


class _Bucket:
    """Some parameters whose gradients travel as one flat tensor."""

    def __init__(self, adder: Adder, weights: list[nn.Parameter], workers: int) -> None:
        self.adder, self.weights, self.workers = adder, weights, workers
        self.flat = torch.zeros(sum(w.numel() for w in weights), dtype=weights[0].dtype, device=weights[0].device)
        sizes = [w.numel() for w in weights]
        self.views = [part.view_as(w) for part, w in zip(torch.split(self.flat, sizes), weights, strict=True)]
        self.missing = len(weights)
        self.sent: Pending | None = None

    def put(self, index: int) -> None:
        """Take over the complete gradient of one parameter."""
        weight, view = self.weights[index], self.views[index]
        if weight.grad is None:
            view.zero_()
        else:
            view.copy_(weight.grad)
        weight.grad = view
        self.missing -= 1


class AllReduce:
    """The exchange of several workers that hold the same parameters."""

    behind = 0

    def __init__(
        self,
        sums: list[Sum],
        bucket_bytes: int,
        adder: Callable[[Lane, dist.ProcessGroup, list[nn.Parameter]], Adder],
        is_coded: Callable[[nn.Parameter], bool],
        seed: int,
    ) -> None:
        self._lane = Lane(seed)
        self._buckets = [
            _Bucket(adder(self._lane, each.group, weights), weights, each.group.size())
            for each in sums
            if not each.last and each.group
            for weights in fill_buckets(each.parameters, bucket_bytes, is_coded)
        ]
        self._coded = [bucket.adder for bucket in self._buckets if isinstance(bucket.adder, Coded)]
        self._last = [each for each in sums if each.last]
        self._next = 0
        self._sending = False
        for bucket in self._buckets:
            for index, weight in enumerate(bucket.weights):
                weight.register_post_accumulate_grad_hook(self._hook(bucket, index))  # type: ignore[no-untyped-call]

    def begin(self, position: int, total: int) -> None:
        """From now on a complete gradient goes into its bucket, and a full bucket on its way."""
        self._lane.position, self._lane.total = position, total
        self._sending = True
        self._next = 0
        for bucket in self._buckets:
            bucket.missing, bucket.sent = len(bucket.weights), None

    def finish(self) -> None:
        """Send what backward did not reach, then wait for all."""
        assert self._sending, "begin() comes before finish()"
        self._sending = False
        for bucket in self._buckets[self._next :]:
            for index, (weight, view) in enumerate(zip(bucket.weights, bucket.views, strict=True)):
                if weight.grad is not view:
                    bucket.put(index)
        self._send_full()
        for bucket in self._buckets:
            assert bucket.sent is not None, "every bucket was sent"
            bucket.sent.wait()
        for each in self._last:
            sum_now(each)

    def settle(self, skipped: Tensor, step: int, last: bool) -> None:  # noqa: ARG002
        """Take over what the codes of this step have left out, unless it was skipped."""
        for adder in self._coded:
            adder.settle(skipped)

    def kept(self) -> list[Kept]:
        """What codes have left out so far."""
        return [kept for adder in self._coded for kept in adder.kept()]

    def held_bytes(self) -> dict[str, int]:
        """Buckets, in which gradients lie once they are complete, and what codes are made of and leave out."""
        return {"buckets": sum(bucket.flat.nbytes for bucket in self._buckets), **held_by_codes(self._coded)}

    def traffic(self) -> Traffic:
        """Of plain sums, what a ring would send."""
        plain = [ring_bytes(bucket.flat, bucket.workers) for bucket in self._buckets]
        sent = [b.adder.sent if isinstance(b.adder, Coded) else p for b, p in zip(self._buckets, plain, strict=True)]
        last = sum(ring_bytes(w, each.group.size()) for each in self._last if each.group for w in each.parameters)
        return Traffic(sum(sent) + last, sum(plain) + last)

    def agreed(self) -> AbstractContextManager[None]:
        """All have the same."""
        return nullcontext()

    def _hook(self, bucket: _Bucket, index: int) -> Callable[[Tensor], None]:
        def complete(_weight: Tensor) -> None:
            if self._sending:
                bucket.put(index)
                self._send_full()

        return complete

    def _send_full(self) -> None:
        """Send full buckets, always in the same order: all workers must send the same one at the same time."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            bucket.sent = bucket.adder.start(bucket.flat)
            self._next += 1


def sum_now(each: Sum) -> None:
    """Sum gradients one by one, and wait."""
    for parameter in each.parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient: Any = parameter.grad
        dist.all_reduce(gradient.to_local() if hasattr(gradient, "to_local") else gradient, group=each.group)


def fill_buckets(
    parameters: list[nn.Parameter], bucket_bytes: int, is_coded: Callable[[nn.Parameter], bool]
) -> list[list[nn.Parameter]]:
    """Coded gradients and others travel apart; buckets stand in the order in which backward fills them."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    order = {weight: number for number, weight in enumerate(reversed(parameters))}
    for weight in order:
        bucket = filling.get(kind := (weight.dtype, is_coded(weight)))
        if bucket is None or sum(w.nbytes for w in bucket) + weight.nbytes > bucket_bytes:
            bucket = filling[kind] = []
            buckets.append(bucket)
        bucket.append(weight)
    return sorted(buckets, key=lambda bucket: order[bucket[-1]])
