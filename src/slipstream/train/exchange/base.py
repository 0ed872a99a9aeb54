"""How workers agree on an update: what the loop asks of every exchange."""

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Sum:
    """Some parameters whose gradients are summed over a group of workers."""

    group: dist.ProcessGroup | None
    parameters: list[nn.Parameter]
    last: bool
    """Whether this sum is taken of what the others have given."""


class Exchange(Protocol):
    """Turns each worker's own gradients into the sums that the layout asks for."""

    def begin(self) -> None:
        """The last backward of this step comes next: gradients may travel as soon as they are complete."""
        ...

    def finish(self) -> None:
        """Return when every parameter's gradient is summed; a parameter that no worker's loss touched may have none."""
        ...
