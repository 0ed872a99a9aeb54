"""The plan: which machine, how the work is split, in what precision. Readable, saved, and exactly what is run."""

from math import prod
from typing import Literal

from pydantic import Field

from slipstream.job import Job
from slipstream.job.base import Section, refuse
from slipstream.job.job import OFFLOAD_ON_CPU, refused_in_fp16
from slipstream.job.models import DecoderModel, ResnetModel
from slipstream.plan.fit import exchange_misfits, misfits, nearest_layouts
from slipstream.plan.layout import Layout
from slipstream.plan.machine import ANY_MACHINE, Machine

_FP8_SIZES = 16
"""Sizes of matrices that GPUs multiply in fp8 are multiples of it."""


class Predicted(Section):
    """What a plan is expected to take."""

    step_seconds: float
    """Of one step."""
    memory: int
    """Bytes on the busiest worker."""


class Network(Section):
    """What is between the workers: learned by them when a run first starts, and kept, because it decides in what order
    gradients are added up and so must not change by chance when the run is resumed."""

    nodes: tuple[int, ...]
    """On which machine each worker is."""
    latency: float | None = None
    """Seconds that a small message takes between machines. Where there is but one machine, nothing is measured."""
    bandwidth: float | None = None
    """Bytes a second between machines, when all send at once."""
    sums: dict[str, dict[int, float]] = Field(default_factory=dict)
    """Seconds that all workers took to add up some bytes, by the way of adding up and the number of bytes."""


class Plan(Section):
    """What will be run."""

    machine: str
    """In words."""
    machines: int = 1
    """How many such machines."""
    device: Literal["cpu", "cuda"]
    """What the workers compute on."""
    layout: Layout
    """How the work is split."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64", "fp8", "fp8-rows", "int8"]
    """Arithmetic of forward and backward."""
    threads: int
    """CPU threads of each worker."""
    compile: bool = False
    """Whether the model's blocks are compiled."""
    predicted: Predicted | None = None
    """What it is expected to take; where nothing is known of the machine's speed there is none."""
    network: Network | None = None
    """What is between the workers, where the exchange goes by it."""


def make_plan(job: Job, machine: Machine, workers: int | None = None, layout: Layout | None = None) -> Plan:
    """Choose what the job leaves open, for this machine; the layout too, unless it is chosen already. Raises ValueError
    where the job asks for what the machine lacks."""
    device = _device(job, machine)
    there = machine.room(device)
    layout = layout or _choose_layout(job, there, workers)
    refuse(list(exchange_misfits(job, layout)))
    if device == "cuda" and layout.workers > there:
        raise ValueError(f"{layout.workers} workers need as many GPUs, and there are {there}; use --workers {there}")
    if device == "cpu" and layout.offload != "none" and machine != ANY_MACHINE:
        raise ValueError(OFFLOAD_ON_CPU)
    if job.train.precision in ("fp8", "fp8-rows") and isinstance(job.model, DecoderModel):
        _refuse_uneven(job, job.model, layout)
    _refuse_algorithm(job, device, layout)
    precision = _precision(job, device, machine)
    by_itself = job.exchange.kind == "local" and layout.workers == 1
    if precision == "fp16" and not by_itself:
        refuse(refused_in_fp16(job))
    return Plan(
        machine=str(machine),
        device=device,
        layout=layout,
        precision=precision,
        threads=max(1, machine.cores // layout.workers),
        compile=_compile(job, device, layout),
    )


def _refuse_uneven(job: Job, model: DecoderModel, layout: Layout) -> None:
    """No GPU multiplies other sizes in fp8: they would silently stay in 16 bits."""
    keys = model.hidden // model.heads * (model.kv_heads or model.heads)
    found = {
        "model.hidden": model.hidden // layout.tensor,
        "model.feed_forward": model.inner // layout.tensor,
        "the width of queries, keys and values": (model.hidden + 2 * keys) // layout.tensor,
        "layout.micro_batch × data.sequence": layout.micro_batch * job.sequence // layout.context,
    }
    for name, size in found.items():
        if size % _FP8_SIZES:
            raise ValueError(
                f"train.precision {job.train.precision} needs sizes that are multiples of {_FP8_SIZES}, and {name} is "
                f"{size} on a worker; change it, or use bf16"
            )


def refuse_on_gpus(job: Job) -> None:
    """Raise ValueError if workers on GPUs cannot agree in the way of the job."""
    algorithm = job.exchange.algorithm
    if algorithm in ("halving-doubling", "hierarchical"):
        raise ValueError(f"exchange.algorithm {algorithm} is for CPUs; on GPUs NCCL has ring and tree, or use auto")


def _refuse_algorithm(job: Job, device: Literal["cpu", "cuda"], layout: Layout) -> None:
    algorithm = job.exchange.algorithm
    if device == "cuda":
        refuse_on_gpus(job)
    if layout.shares_weights and algorithm not in ("auto", "backend"):
        raise ValueError(
            f"exchange.algorithm {algorithm} has no effect where weights are sharded, which the backend adds up; leave "
            "it out, or use sharded: optimizer"
        )


def _compile(job: Job, device: Literal["cpu", "cuda"], layout: Layout) -> bool:
    """Where it helps and nothing stands against it, unless the job says."""
    against = _against_compiling(job, layout)
    if job.train.compile and against:
        raise ValueError(f"train.compile: {against}; leave it out")
    return device == "cuda" and not against if job.train.compile is None else job.train.compile


def _against_compiling(job: Job, layout: Layout) -> str | None:
    if isinstance(job.model, ResnetModel):
        exchanges = job.model.norm == "batch" and layout.workers > 1
        return "batch norm over several workers exchanges in the middle, which is not compiled" if exchanges else None
    if not isinstance(job.model, DecoderModel):
        return "only decoders and resnets are compiled"
    if job.model.dropout:
        return "dropout whose masks belong to samples is not compiled"
    if layout.tensor > 1 or layout.context > 1:
        return "with layout.tensor or layout.context blocks exchange in their middle, which is not compiled"
    if layout.schedule == "zero-bubble" and layout.pipeline > 1:
        return "layout.schedule zero-bubble takes the backward of a block apart, which a compiled one does not allow"
    return None


def _choose_layout(job: Job, there: int, workers: int | None) -> Layout:
    """The layout that the job asks for, as many replicas of it as there is room for. Raises ValueError if none fits."""
    choice = job.layout
    axes = {axis: getattr(choice, axis) or 1 for axis in ("shard", "tensor", "pipeline", "context")}
    smallest = job.train.ramp.start if job.train.ramp else job.train.batch
    each = prod(axes.values())
    replicate = choice.replicate or max(
        1, workers // each if workers else min(there // each, smallest // axes["shard"])
    )
    chosen = {name: getattr(choice, name) for name in ("sharded", "schedule", "recompute", "offload")}
    layout = Layout(
        replicate=replicate,
        **axes,
        micro_batch=1,
        **{name: value for name, value in chosen.items() if value},
    )
    layout = layout.model_copy(update={"micro_batch": choice.micro_batch or _micro_batch(job, layout)})
    problems = misfits(job, layout)
    if workers and layout.workers != workers:
        problems.insert(0, f"the layout {layout} has {layout.workers} workers, and {workers} are asked for")
    if problems:
        many = layout.workers
        counts = {workers} if workers else {many, max(1, many - 1), max(1, many // 2), 2 ** (many.bit_length() - 1)}
        near = nearest_layouts(job, layout, counts) if layout.workers > 1 else []
        advice = f"; nearest layouts that fit: {' | '.join(each.written for each in near)}" if near else ""
        raise ValueError("; ".join(problems) + advice)
    return layout


def _micro_batch(job: Job, layout: Layout) -> int:
    """A worker's whole share; a pipeline works on as many micro-batches as it has stages, or a few more."""
    share = -(-job.train.batch // layout.data)
    if layout.pipeline == 1:
        return max(1, share)
    whole = [size for size in range(1, share + 1) if share % size == 0 and (share // size) % layout.pipeline == 0]
    return max(whole, default=1)


def _device(job: Job, machine: Machine) -> Literal["cpu", "cuda"]:
    if job.machines.device == "auto":
        return "cuda" if machine.gpus else "cpu"
    if job.machines.device == "cuda" and not machine.gpus:
        raise ValueError("machines.device is cuda, but no GPU was found; `slipstream doctor` says what is here")
    return job.machines.device


def _precision(
    job: Job, device: Literal["cpu", "cuda"], machine: Machine
) -> Literal["fp32", "tf32", "bf16", "fp16", "fp64", "fp8", "fp8-rows", "int8"]:
    wanted = job.train.precision
    if wanted == "auto":
        if device == "cpu":
            return "fp32"
        return "bf16" if machine.bf16 else "fp16"
    if wanted == "tf32" and device == "cpu":
        raise ValueError("train.precision tf32 exists on NVIDIA GPUs only; use fp32 on a CPU")
    if wanted in ("fp8", "fp8-rows") and device == "cuda" and not machine.fp8:
        raise ValueError(
            f"train.precision {wanted} needs a GPU of the Ada or Hopper kind or later, and there is {machine}; use int8"
        )
    if wanted == "int8" and device == "cuda" and not machine.bf16:
        raise ValueError(f"train.precision int8 needs a GPU of the Ampere kind or later, and there is {machine}")
    return wanted
