"""Whether a layout fits a job, and the nearest ones that do."""

from collections.abc import Iterable, Iterator
from math import log2

from slipstream.job import Job
from slipstream.job.data import reset_of
from slipstream.job.exchange import is_balanced
from slipstream.job.models import DecoderModel, HuggingFaceModel, ImportModel
from slipstream.plan.layout import SPOKEN, Layout


def misfits(job: Job, layout: Layout) -> list[str]:
    """Why a job cannot run on a layout: one line for each reason, none if it can."""
    return [*_model_misfits(job, layout), *_batch_misfits(job, layout), *exchange_misfits(job, layout)]


def exchange_misfits(job: Job, layout: Layout) -> Iterator[str]:
    """Why workers cannot agree in the way of the job."""
    if job.exchange.kind in ("local", "server") and layout.replicate != layout.workers:
        yield (
            f"exchange.kind {job.exchange.kind} is for workers that hold the whole model each, and the layout is "
            f"{layout}; use layout.replicate alone, or exchange.kind allreduce"
        )
    elif is_balanced(job) and layout.replicate != layout.workers:
        yield (
            f"exchange.balance is for workers that hold the whole model each, and the layout is {layout}; use "
            "layout.replicate alone, or leave it out"
        )
    elif job.exchange.codec and layout.shares_weights:
        yield (
            f"exchange.codec {job.exchange.codec.name} does not go with layout.shard: FSDP2 sums the gradients of "
            "weights that are shared out by itself, as they are; use layout.replicate, set layout.sharded: optimizer, "
            "or leave the codec out"
        )


def _model_misfits(job: Job, layout: Layout) -> Iterator[str]:
    model = job.model
    if isinstance(model, DecoderModel):
        yield from _decoder_misfits(job, model, layout)
        return
    kind = "model.import" if isinstance(model, ImportModel) else f"model.kind {getattr(model, 'kind', 'huggingface')}"
    able = {"tensor": _has_tensor_plan(model), "pipeline": _has_blocks(model), "context": False}
    for axis in ("tensor", "pipeline", "context"):
        if getattr(layout, axis) > 1 and not able[axis]:
            why = "; only the decoder shares out sequences" if axis == "context" else _missing(model, axis)
            yield f"layout.{axis}: {kind} cannot be split this way{why}"
    if isinstance(model, HuggingFaceModel) and isinstance(model.source, dict):
        heads = model.source.get("num_key_value_heads") or model.source.get("num_attention_heads")
        if isinstance(heads, int) and heads % layout.tensor:
            yield f"layout.tensor ({layout.tensor}) must divide the model's {heads} key and value heads"
    if layout.recompute != "none" and not _has_blocks(model):
        why = _missing(model, "pipeline") or ", and this one has none"
        yield f"layout.recompute needs to know the model's blocks{why}"


def _has_tensor_plan(model: object) -> bool:
    """Hugging Face's models carry theirs, which shows when they are built."""
    return isinstance(model, HuggingFaceModel) or (
        isinstance(model, ImportModel) and bool(model.split and model.split.tensor)
    )


def _has_blocks(model: object) -> bool:
    return isinstance(model, ImportModel) and bool(model.split and model.split.blocks)


def _missing(model: object, axis: str) -> str:
    if not isinstance(model, ImportModel) or axis == "context":
        return ""
    return f"; say how in model.split.{'tensor' if axis == 'tensor' else 'blocks'}"


def _decoder_misfits(job: Job, model: DecoderModel, layout: Layout) -> Iterator[str]:
    kv_heads, tensor = model.kv_heads or model.heads, layout.tensor
    if kv_heads % tensor:
        which = "model.kv_heads" if model.kv_heads else "model.heads"
        yield f"layout.tensor ({tensor}) must divide {which} ({kv_heads})"
    if model.inner % tensor:
        yield f"layout.tensor ({tensor}) must divide the feed-forward width ({model.inner})"
    if layout.stages > model.layers:
        yield f"layout.pipeline needs {layout.stages} stages ({layout.schedule}), and model.layers is {model.layers}"
    if layout.context > 1 and "attention" in reset_of(job.data):
        yield "layout.context cannot keep attention inside documents: take attention out of data.reset, or use tensor"
    sequence = getattr(job.data, "sequence", None)
    if sequence and layout.context > 1 and sequence % (2 * layout.context):
        yield f"data.sequence ({sequence}) must be a multiple of {2 * layout.context}: twice layout.context"
    elif sequence and (sequence // layout.context) % tensor:
        yield f"data.sequence ({sequence}) over layout.context must be a multiple of layout.tensor ({tensor})"


def _batch_misfits(job: Job, layout: Layout) -> Iterator[str]:
    smallest = job.train.ramp.start if job.train.ramp else job.train.batch
    which = "train.ramp.start" if job.train.ramp else "train.batch"
    if layout.data > smallest:
        yield (f"{layout.data} workers cannot share a batch of {smallest}; use at most {smallest}, or raise {which}")
        return
    largest_share = -(-job.train.batch // layout.data)
    if layout.micro_batch > largest_share:
        yield (
            f"layout.micro_batch ({layout.micro_batch}) is more than a worker's share of the batch "
            f"({job.train.batch} over {layout.data} = {largest_share}); lower it or leave it out"
        )
    if layout.pipeline > 1:
        if job.train.ramp:
            yield "train.ramp does not go with layout.pipeline, whose micro-batches are all of one size and number"
        if job.train.batch % (layout.data * layout.micro_batch):
            yield (
                f"layout.pipeline needs equal micro-batches: train.batch ({job.train.batch}) must be a multiple of "
                f"{layout.data} × {layout.micro_batch} (layout.micro_batch)"
            )
        elif layout.schedule in ("interleaved", "zero-bubble"):
            count = job.train.batch // (layout.data * layout.micro_batch)
            if count % layout.pipeline:
                yield (
                    f"layout.schedule {layout.schedule} needs a multiple of {layout.pipeline} micro-batches, "
                    f"and there are {count}"
                )


def nearest_layouts(job: Job, layout: Layout, counts: Iterable[int], count: int = 3) -> list[Layout]:
    """Layouts that fit, of one of these numbers of workers, those that differ least first, all with other axes."""
    every = (candidate for workers in counts for candidate in _candidates(job, layout, workers))
    found = sorted(
        (candidate for candidate in every if not misfits(job, candidate)),
        key=lambda candidate: _distance(candidate, layout),
    )
    different: dict[tuple[int, ...], Layout] = {}
    for candidate in found:
        different.setdefault(candidate.sizes, candidate)
    return list(different.values())[:count]


def _candidates(job: Job, layout: Layout, workers: int) -> Iterator[Layout]:
    for sizes in _factorisations(workers, len(SPOKEN)):
        axes = dict(zip(SPOKEN, sizes, strict=True))
        changed = layout.model_copy(update=axes)
        share = job.train.batch // changed.data
        for micro_batch in {layout.micro_batch, share, max(1, share // changed.pipeline), 1}:
            if micro_batch:
                yield changed.model_copy(update={"micro_batch": micro_batch})


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, parts - 1):
                yield (first, *rest)


def _distance(one: Layout, other: Layout) -> float:
    axes = sum(abs(log2(getattr(one, axis) / getattr(other, axis))) for axis in SPOKEN)
    return axes + 0.1 * abs(log2(one.micro_batch / other.micro_batch))
