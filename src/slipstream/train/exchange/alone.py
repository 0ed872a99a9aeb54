"""The exchange of a single worker: its own gradients are the sum already."""

from torch import Tensor

from slipstream.train.exchange.base import Kept, Traffic


class Alone:
    """Nothing to exchange."""

    def begin(self, position: int, total: int) -> None:
        """Nothing travels."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def settle(self, skipped: Tensor) -> None:
        """Nothing is kept."""

    def kept(self) -> list[Kept]:
        """Nothing."""
        return []

    def traffic(self) -> Traffic | None:
        """There is nobody to send to."""
        return None
