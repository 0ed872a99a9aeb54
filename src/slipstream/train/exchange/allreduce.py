"""All-reduce: the exact sum of all workers' gradients, in buckets that travel while backward still runs.

torch's DDP is not used, for the promise of one curve: it lays its buckets anew after its first step, so that a resumed
run adds in another order than an undisturbed one. Here the buckets follow from the model alone, in reverse order of
its parameters, which is about the order in which backward completes them (Li et al. 2020, arXiv 2006.15704).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.train.exchange.adding.base import Adder, Pending
from slipstream.train.exchange.base import Sum


class _Bucket:
    """Some parameters whose gradients travel as one flat tensor."""

    def __init__(self, adder: Adder, weights: list[nn.Parameter]) -> None:
        self.adder, self.weights = adder, weights
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

    def __init__(
        self,
        sums: list[Sum],
        bucket_bytes: int,
        adder: Callable[[dist.ProcessGroup, list[nn.Parameter]], Adder],
    ) -> None:
        self._buckets = [
            _Bucket(adder(each.group, weights), weights)
            for each in sums
            if not each.last and each.group
            for weights in _fill_buckets(each.parameters, bucket_bytes)
        ]
        self._last = [each for each in sums if each.last]
        self._next = 0
        self._sending = False
        for bucket in self._buckets:
            for index, weight in enumerate(bucket.weights):
                weight.register_post_accumulate_grad_hook(self._hook(bucket, index))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """From now on a complete gradient goes into its bucket, and a full bucket on its way."""
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


def _fill_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for weight in reversed(parameters):
        bytes_of_weight = weight.numel() * weight.element_size()
        other_kind = buckets and buckets[-1][0].dtype != weight.dtype
        if not buckets or other_kind or size + bytes_of_weight > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(weight)
        size += bytes_of_weight
    return buckets
