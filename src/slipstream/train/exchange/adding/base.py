"""What an exchange asks of every way of adding up."""

from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """A sum that is under way."""

    def wait(self) -> object:
        """Return when it is there."""
        ...


class Adder(Protocol):
    """Adds up one bucket of gradients over a group of workers, step after step."""

    def start(self, flat: Tensor) -> Pending:
        """Begin to make this flat tensor the sum of all workers' ones, in place. All of them begin their buckets in the
        same order."""
        ...
