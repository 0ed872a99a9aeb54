"""Typical mistakes of parallel training, made on purpose in the workers: the tests of layouts must see each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from slipstream.train.exchange.base import Sum
from slipstream.train.parallel.parts import Norms
from slipstream.train.parallel.split import SplitModel

LAYOUT_OF = {
    "a_gradient_summed_twice": "replicate=2",
    "a_norm_gradient_of_one_tensor_worker_alone": "tensor=2",
    "a_norm_over_the_local_shard": "shard=2",
    "a_tied_weight_updated_on_one_stage": "pipeline=2",
    "dropout_by_worker": "tensor=2",
}


@contextmanager
def a_gradient_summed_twice() -> Iterator[None]:
    sums = SplitModel._sums

    def twice(self: SplitModel) -> list[Sum]:
        found = sums(self)
        return [*found, *(Sum(each.group, each.parameters[:1], last=True) for each in found)]

    with patch.object(SplitModel, "_sums", twice):
        yield


@contextmanager
def a_norm_gradient_of_one_tensor_worker_alone() -> Iterator[None]:
    sums = SplitModel._sums
    with patch.object(SplitModel, "_sums", lambda self: [each for each in sums(self) if len(each.parameters) == 0]):
        yield


@contextmanager
def a_norm_over_the_local_shard() -> Iterator[None]:
    def local(self: Norms) -> Tensor:
        return torch.stack([weight.grad.norm() for weight in self._part_of if weight.grad is not None]).norm()

    with patch.object(Norms, "of_all", local):
        yield


@contextmanager
def a_tied_weight_updated_on_one_stage() -> Iterator[None]:
    with patch.object(SplitModel, "_sums_over_ties", lambda _self: ()):
        yield


@contextmanager
def dropout_by_worker() -> Iterator[None]:
    from slipstream.train.models.dropout import SampleDropout

    def own(_self: Any, x: Tensor, elements: int) -> Tensor:
        return torch.arange(-(-elements // 4), device=x.device)

    with patch.object(SampleDropout, "_words", own):
        yield
