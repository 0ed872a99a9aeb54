"""How workers agree on an update: what the loop asks of every exchange."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Sum:
    """Some parameters whose gradients are summed over a group of workers."""

    group: dist.ProcessGroup | None
    parameters: list[nn.Parameter]
    last: bool
    """Whether this sum is taken of what the others have given."""


@dataclass(frozen=True)
class Kept:
    """What an exchange keeps of a parameter from step to step."""

    slot: Literal["memory", "basis"]
    """Of gradients, what has not been sent yet; or the directions of a codec."""
    parameter: nn.Parameter
    tensor: Tensor
    worker: int
    """Which of the workers that have one each has this one."""
    workers: int
    """How many have one each; 1 if it is the same with all."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of gradients that one worker sends in a step."""

    sent: int
    plain: int
    """What a ring would send of gradients as they are."""


class Exchange(Protocol):
    """Turns each worker's own gradients into the sums that the layout asks for."""

    def begin(self, position: int, total: int) -> None:
        """The last backward of this step comes next: gradients may travel as soon as they are complete. The step begins
        at this sample of the run, which has so many in total."""
        ...

    def finish(self) -> None:
        """Return when every parameter's gradient is summed; a parameter that no worker's loss touched may have none."""
        ...

    def settle(self, skipped: Tensor) -> None:
        """The update is done, or, where this is not 0, was skipped: then the step leaves no trace here either."""
        ...

    def kept(self) -> Iterable[Kept]:
        """What must be there again when the run goes on."""
        ...

    def traffic(self) -> Traffic | None:
        """What the last step has sent, where that is known."""
        ...
