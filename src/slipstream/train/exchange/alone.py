"""The exchange of a single worker: its own gradients are the sum already."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from slipstream.train.exchange.base import Kept, Traffic


class Alone:
    """Nothing to exchange."""

    behind = 0

    def begin(self, position: int, total: int) -> None:
        """Nothing travels."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def settle(self, skipped: Tensor, step: int, last: bool) -> None:
        """Nothing is kept."""

    def kept(self) -> list[Kept]:
        """Nothing."""
        return []

    def held_bytes(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def traffic(self) -> Traffic | None:
        """There is nobody to send to."""
        return None

    def agreed(self) -> AbstractContextManager[None]:
        """With nobody else."""
        return nullcontext()
