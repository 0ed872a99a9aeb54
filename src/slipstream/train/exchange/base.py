"""How workers agree on an update: what the loop asks of every exchange."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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

    slot: Literal["memory", "change", "basis"]
    """What has not been sent yet of gradients, or of changes of the weight; or the directions of a codec."""
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
    figures: dict[str, float] = field(default_factory=dict)
    """What else is to be recorded of the step."""


class Exchange(Protocol):
    """Turns each worker's own gradients into the sums that the layout asks for; or lets each go on by itself for a
    while."""

    behind: int
    """0 where all workers update alike, and must know of each other before they do. Otherwise each goes by itself, and
    learns so many steps later what the others said."""

    def begin(self, position: int, total: int) -> None:
        """The last backward of this step comes next: gradients may travel as soon as they are complete. The step begins
        at this sample of the run, which has so many in total."""
        ...

    def finish(self) -> None:
        """Return when every parameter's gradient is summed; a parameter that no worker's loss touched may have none."""
        ...

    def settle(self, skipped: Tensor, step: int, last: bool) -> None:
        """The update is done, or, where `skipped` is not 0, was not: then the step leaves no trace here either. The
        first step of a run is 1."""
        ...

    def kept(self) -> Iterable[Kept]:
        """What must be there again when the run goes on."""
        ...

    def held_bytes(self) -> dict[str, int]:
        """What it holds beside weights and gradients, by the names that the planner has for it (`plan/memory.py`)."""
        ...

    def traffic(self) -> Traffic | None:
        """What the last step has sent, where that is known."""
        ...

    def agreed(self) -> AbstractContextManager[None]:
        """Around what is done with the weights that all workers agree on."""
        ...
