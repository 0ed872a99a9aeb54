"""The exchange of a single worker: its own gradients are the sum already."""


class Alone:
    """Nothing to exchange."""

    def begin(self) -> None:
        """Nothing travels."""

    def finish(self) -> None:
        """Nothing to wait for."""
