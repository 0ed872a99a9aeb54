"""The plan: which machine, how the work is split, in what precision. Readable, saved, and exactly what is run."""

from typing import Literal

from slipstream.job import Job
from slipstream.job.base import Section
from slipstream.plan.machine import Machine


class Layout(Section):
    """How the work is split."""

    replicate: int
    """Workers that each hold the whole model."""
    micro_batch: int
    """Samples a worker takes through the model at once."""

    @property
    def workers(self) -> int:
        """Processes that run this layout."""
        return self.replicate

    def share(self, rank: int, start: int, size: int) -> range:
        """The positions of a batch that one worker takes: consecutive, and as even as can be."""
        even, left = divmod(size, self.replicate)
        first = start + rank * even + min(rank, left)
        return range(first, first + even + (rank < left))

    def __str__(self) -> str:
        return f"replicate {self.replicate}, micro-batch {self.micro_batch}"


class Plan(Section):
    """What will be run."""

    machine: str
    """In words."""
    device: Literal["cpu", "cuda"]
    """What the workers compute on."""
    layout: Layout
    """How the work is split."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"]
    """Arithmetic of forward and backward."""
    threads: int
    """CPU threads of each worker."""


def make_plan(job: Job, machine: Machine, workers: int | None = None) -> Plan:
    """Choose what the job leaves open, for this machine. Raises ValueError where the job asks for what it lacks."""
    device = _device(job, machine)
    smallest = job.train.ramp.start if job.train.ramp else job.train.batch
    there = len(machine.gpus) if device == "cuda" else machine.cores
    replicate = workers or job.layout.replicate or min(there, smallest)
    if replicate > smallest:
        which = "train.ramp.start" if job.train.ramp else "train.batch"
        raise ValueError(
            f"{replicate} workers cannot share a batch of {smallest}; use at most {smallest}, or raise {which}"
        )
    if device == "cuda" and replicate > there:
        raise ValueError(f"{replicate} workers need as many GPUs, and there are {there}; use --workers {there}")
    largest_share = -(-job.train.batch // replicate)
    micro_batch = job.layout.micro_batch or largest_share
    if micro_batch > largest_share:
        raise ValueError(
            f"layout.micro_batch ({micro_batch}) is more than a worker's share of the batch "
            f"({job.train.batch} over {replicate} workers = {largest_share}); lower it or leave it out"
        )
    return Plan(
        machine=str(machine),
        device=device,
        layout=Layout(replicate=replicate, micro_batch=micro_batch),
        precision=_precision(job, device, machine),
        threads=max(1, machine.cores // replicate),
    )


def _device(job: Job, machine: Machine) -> Literal["cpu", "cuda"]:
    if job.machines.device == "auto":
        return "cuda" if machine.gpus else "cpu"
    if job.machines.device == "cuda" and not machine.gpus:
        raise ValueError("machines.device is cuda, but no GPU was found; `slipstream doctor` says what is here")
    return job.machines.device


def _precision(
    job: Job, device: Literal["cpu", "cuda"], machine: Machine
) -> Literal["fp32", "tf32", "bf16", "fp16", "fp64"]:
    wanted = job.train.precision
    if wanted == "auto":
        if device == "cpu":
            return "fp32"
        return "bf16" if machine.bf16 else "fp16"
    if wanted == "tf32" and device == "cpu":
        raise ValueError("train.precision tf32 exists on NVIDIA GPUs only; use fp32 on a CPU")
    return wanted
