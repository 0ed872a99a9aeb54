"""The section `machines` of a job file: where it runs. What is said of one fleet matters there alone."""

from typing import Literal

from pydantic import Field

from slipstream.job.base import Section
from slipstream.job.units import Count, Duration, Money


class Slurm(Section):
    """How Slurm is asked for machines."""

    partition: str | None = None
    """Default: the cluster's own."""
    account: str | None = None
    """Who is charged."""
    qos: str | None = None
    """Quality of service."""
    gres: str | None = None
    """Generic resources of each machine, such as `gpu:a100:4`. Default: `gpu:N` for the GPUs that are used."""
    constraint: str | None = None
    """Features that nodes must have."""
    time: Duration | None = None
    """Time limit. Before its end the run saves itself and is queued again. Default: limits.deadline, else the
    partition's."""
    warning: Duration = 120.0
    """How long before the time limit the run is told to save itself."""
    setup: tuple[str, ...] = ()
    """Lines of shell before it starts: `module load cuda`, `source …/activate`."""


class Machines(Section):
    """Where it runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if there are any."""
    price_per_hour: Money | None = None
    """What this machine costs in an hour; the run then shows its cost."""
    count: Count | None = None
    """How many machines `submit` asks a fleet for. Default: those of the plan, else one."""
    slurm: Slurm = Field(default_factory=Slurm)
    """How Slurm is asked."""
