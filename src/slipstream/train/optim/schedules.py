"""Learning-rate schedules: pure functions of the samples seen, so that no number of workers changes them."""

import math
from collections.abc import Callable

from slipstream.job.train import Constant, Cosine, Linear, ScaleRate, Step, WarmupStableDecay
from slipstream.job.units import Span

AnySchedule = Constant | Linear | Cosine | Step | WarmupStableDecay
Shape = Callable[[float, float, AnySchedule], float]
"""(samples since the warm-up, samples from there to the end, the setting) → part of the peak rate."""


def _constant(_seen: float, _span: float, _schedule: AnySchedule) -> float:
    return 1.0


def _linear(seen: float, span: float, schedule: AnySchedule) -> float:
    assert isinstance(schedule, Linear)
    return 1 - (1 - schedule.floor) * min(1.0, seen / span)


def _cosine(seen: float, span: float, schedule: AnySchedule) -> float:
    assert isinstance(schedule, Cosine)
    return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, seen / span)))


def _step(seen: float, span: float, schedule: AnySchedule) -> float:
    assert isinstance(schedule, Step)
    return schedule.factor ** int(seen / max(1, _length(schedule.every, span)))


def _warmup_stable_decay(seen: float, span: float, schedule: AnySchedule) -> float:
    assert isinstance(schedule, WarmupStableDecay)
    last = max(1.0, _length(schedule.last, span))
    return 1 - (1 - schedule.floor) * min(1.0, max(0.0, seen - (span - last)) / last)


def _length(span: Span, whole: float) -> float:
    return span.amount * whole if span.unit == "run" else span.amount


SHAPES: dict[type[AnySchedule], Shape] = {
    Constant: _constant,
    Linear: _linear,
    Cosine: _cosine,
    Step: _step,
    WarmupStableDecay: _warmup_stable_decay,
}


def rate(schedule: AnySchedule, seen: int, batch: int, total: int) -> float:
    """Part of the peak rate for the update that takes `batch` samples after `seen` of `total`.

    The warm-up counts the samples after the update, so that the first one is not lost to a rate of zero; the decay
    counts those before it, so that the last one is not.
    """
    warmup = schedule.warmup.samples(total)
    if seen + batch < warmup:
        return (seen + batch) / warmup
    return SHAPES[type(schedule)](max(0, seen - warmup), max(1, total - warmup), schedule)


def batch_factor(scale: ScaleRate | None, batch: int) -> float:
    """What the rate is multiplied by for this batch."""
    if scale is None:
        return 1.0
    ratio = batch / scale.base_batch
    return ratio if scale.rule == "linear" else math.sqrt(ratio)
