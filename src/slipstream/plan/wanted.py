"""A job in the numbers that a search needs."""

from slipstream.job import Job
from slipstream.job.base import Section
from slipstream.job.data import reset_of
from slipstream.job.job import LayoutChoice, refused_in_fp16
from slipstream.job.models import DecoderModel
from slipstream.job.train import Adam, AdamW, Lamb, Lars, Momentum, Nesterov, Sgd
from slipstream.plan.exchange import Agreement
from slipstream.plan.grid import RECOMPUTE, SHARDED, of_products
from slipstream.plan.layout import AXES
from slipstream.plan.search import MOST_ACCELERATORS, Splits, Wanted
from slipstream.plan.work import Work, work_of_decoder

STATES: dict[type[Section], int] = {Sgd: 0, Momentum: 1, Nesterov: 1, Adam: 2, AdamW: 2, Lars: 1, Lamb: 2}
"""Numbers of a weight's size that each optimiser keeps."""
_SHORTEST_CONTEXT = 2048
"""Tokens of a sequence that are worth a worker."""


def states_of(optimizer: Section) -> float:
    """How many numbers of 32 bits an optimiser keeps for each weight."""
    return STATES[type(optimizer)] * (0.5 if getattr(optimizer, "state", "fp32") == "bf16" else 1.0)


def wanted_of(job: Job, work: Work, samples: float) -> Wanted:
    """What to plan for. `samples` is the length of the run."""
    limits = job.limits
    return Wanted(
        work=work,
        splits=_splits(job),
        batch=job.train.batch,
        samples=samples,
        optimizer_states=states_of(job.train.optimizer),
        precisions=_precisions(job),
        data_bytes=2.0 * samples * float(work.tokens),
        checkpoints=job.checkpoint.keep,
        deadline=limits.deadline,
        budget=limits.budget,
        quota=limits.accelerators or MOST_ACCELERATORS,
        preemption=limits.preemption,
        fixed=_fixed(job.layout),
        agreement=Agreement(job.exchange, _plainly(job, samples)),
        eager=job.train.compile is False or bool(getattr(job.model, "dropout", 0)),
        fixed_order=job.train.deterministic,
        by_rows=job.train.precision == "fp8-rows",
    )


def _precisions(job: Job) -> tuple[str, ...]:
    if job.train.precision != "auto":
        return (of_products(job.train.precision),)
    return ("bf16",) if refused_in_fp16(job) else ("bf16", "fp16")


def _plainly(job: Job, samples: float) -> float:
    """Part of the run in which gradients travel as they are."""
    return min(1.0, job.exchange.codec.warmup.samples(int(samples)) / samples) if job.exchange.codec else 0.0


def _fixed(layout: LayoutChoice) -> tuple[tuple[str, float], ...]:
    """What a job says of its layout, in the columns of a grid."""
    said = {name: getattr(layout, name) for name in layout.model_fields_set if getattr(layout, name) is not None}
    axes = {name: float(said[name]) for name in AXES if name in said}
    if "sharded" in said:
        axes["sharded"] = float(SHARDED.index(said["sharded"]))
    if "recompute" in said:
        axes["recompute"] = float(RECOMPUTE.index(said["recompute"]))
    return tuple(axes.items())


def decoder_of(job: Job, vocabulary: int) -> Work | None:
    """The work of a decoder, which is known without building it."""
    if not isinstance(job.model, DecoderModel):
        return None
    return work_of_decoder(job.model, job.model.vocabulary or vocabulary, job.sequence)


def _splits(job: Job) -> Splits:
    model = job.model
    if not isinstance(model, DecoderModel):
        return Splits(micro_batch=job.layout.micro_batch)
    sequence = job.sequence
    heads = model.kv_heads or model.heads
    powers = [2**power for power in range(8)]
    ring = "attention" not in reset_of(job.data)  # it does not stop at documents
    context = tuple(
        c for c in powers if c == 1 or (ring and sequence % (2 * c) == 0 and sequence // c >= _SHORTEST_CONTEXT)
    )
    tensor = tuple(
        t for t in powers if heads % t == 0 and model.inner % t == 0 and all(sequence // c % t == 0 for c in context)
    )
    stages = 1 if job.train.ramp else model.layers
    return Splits(tensor, stages, context, recompute=True, micro_batch=job.layout.micro_batch)
