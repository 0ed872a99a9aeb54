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


class Ray(Section):
    """How a Ray cluster is asked for machines."""

    address: str = "auto"
    """Of the cluster's dashboard, `http://host:8265`; `ray://host:10001` and `host:6379` stand for that, too. auto:
    what RAY_ADDRESS says, else a cluster that runs on this machine, else one that is started for this run alone."""
    python: str | None = None
    """Python on the cluster's head. Default: the one you submit with, if it is there, too; else `python`."""
    environment: tuple[str, ...] = ()
    """Names of variables that travel with the job from where you submit it, such as AWS_ACCESS_KEY_ID. Who may see the
    cluster's jobs sees what they hold."""


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
    ray: Ray = Field(default_factory=Ray)
    """How Ray is asked."""
