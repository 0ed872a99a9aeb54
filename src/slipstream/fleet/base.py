"""What every fleet can do, and what it is given to do."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from slipstream.job.machines import Machines
from slipstream.plan import Machine


class FleetError(ValueError):
    """A fleet cannot take a run, or cannot be asked: its engine is missing, full, out of reach or refuses."""


class Rents(FleetError):
    """A fleet cannot say what it could give: it gets machines when it is asked for them, and then they cost money."""


@dataclass(frozen=True)
class Order:
    """What a fleet is to start: one command on each of some machines, all of them or none."""

    run: Path
    """The run's folder, which every machine must see, unless there is a store."""
    machines: int
    cores: int
    """That are used on each machine."""
    gpus: int
    """The same; 0 where it runs on CPUs."""
    settings: Machines
    """The job file's section."""
    seconds: float | None = None
    """The longest it may take, where there is a limit."""
    offer: dict[str, Any] = field(default_factory=dict)
    """What a saved plan wants to rent."""
    kind: str = ""
    """Of the GPUs that were planned for, as the fleet names it."""
    where: str = ""
    """Where the fleet has the machines that it was planned for, as in `Room`."""
    store: str | None = None
    """Where in object storage the run's folder is, for machines that share no disk."""
    price: str | None = None
    """What it will cost, in words, where to launch it is to rent."""
    attempt: int = 0
    """How often it was sent before: an engine may still have what has ended."""

    @property
    def name(self) -> str:
        """As people know the run."""
        return self.run.name

    @property
    def target(self) -> str:
        """The run, as its machines find it."""
        return self.store or str(self.run)

    def command(self, python: str = sys.executable) -> list[str]:
        """What each machine runs."""
        return [python, "-P", "-m", "slipstream", "agent", self.target]  # -P: no modules of where it is started

    def written(self, python: str = sys.executable) -> str:
        """The same, for a shell."""
        return shlex.join(self.command(python))


@dataclass(frozen=True)
class Room:
    """Machines of one kind that a fleet could give now."""

    machines: int
    machine: Machine
    where: str = ""
    """A partition, a pool, a region: where the fleet has it."""


State = Literal["queued", "running", "ended", "unknown"]


@dataclass(frozen=True)
class Status:
    """What an engine knows of a submission. What came of the run is in its folder."""

    state: State
    detail: str = ""
    """In the engine's own words."""


class Fleet(Protocol):
    """One engine. A submission is known by the name that `launch` returns."""

    def validate(self, order: Order) -> None:
        """Raise FleetError if the engine is not there or could never take this."""
        ...

    def capacity(self, whole: bool = False) -> Sequence[Room]:
        """What it can give now; `whole`: what it has, busy or not. Raises FleetError; Rents where that is not known."""
        ...

    def render(self, order: Order) -> str:
        """Exactly what would be sent to the engine."""
        ...

    def launch(self, order: Order) -> str:
        """Send it. Raises FleetError; then nothing is left there."""
        ...

    def status(self, submission: str) -> Status:
        """How it stands. Raises FleetError if the engine cannot be asked."""
        ...

    def logs(self, submission: str) -> str:
        """What the engine has kept of its output, beside what is in the run's folder."""
        ...

    def stop(self, submission: str) -> None:
        """Ask for a checkpoint and a stop; one that has not begun is taken back."""
        ...
