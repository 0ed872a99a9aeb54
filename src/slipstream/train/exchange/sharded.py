"""The exchange of weights that are shared out: FSDP2 sums gradients where they are complete, and shares them out."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from slipstream.train.exchange.allreduce import sum_now
from slipstream.train.exchange.base import Kept, Sum, Traffic


class Sharded:
    """Only says when; the rest FSDP2 does by itself."""

    behind = 0

    def __init__(self, modules: list[nn.Module], sums: list[Sum]) -> None:
        self._modules: list[Any] = modules
        self._sums = sums
        self._sync(False)

    def begin(self, position: int, total: int) -> None:  # noqa: ARG002
        """Sum in the backward that comes next."""
        self._sync(True)

    def finish(self) -> None:
        """What is left to sum; until the last backward of the next step, gradients stay here."""
        for each in self._sums:
            sum_now(each)
        self._sync(False)

    def settle(self, skipped: Tensor, step: int, last: bool) -> None:
        """Nothing is kept."""

    def kept(self) -> list[Kept]:
        """Nothing."""
        return []

    def held_bytes(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def traffic(self) -> Traffic | None:
        """FSDP2 does not say."""
        return None

    def agreed(self) -> AbstractContextManager[None]:
        """All have the same."""
        return nullcontext()

    def _sync(self, wanted: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(wanted)
