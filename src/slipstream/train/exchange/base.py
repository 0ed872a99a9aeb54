"""How workers agree on an update: what the loop asks of every exchange."""

from typing import Protocol


class Exchange(Protocol):
    """Turns each worker's own gradients into the sum over all workers."""

    def begin(self) -> None:
        """The last backward of this step comes next: gradients may travel as soon as they are complete."""
        ...

    def finish(self) -> None:
        """Return when every parameter's gradient is the sum over all workers; zero where no worker had any."""
        ...
