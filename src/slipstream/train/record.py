"""Recording a run: one line of metrics for each step, written by the first worker."""

import math
from typing import Any

import torch

from slipstream.data.base import Facts
from slipstream.runs import RunFolder, append_line
from slipstream.runs.checkpoints import Progress
from slipstream.train.batches import Share
from slipstream.train.found import Found
from slipstream.train.timeline import Timeline
from slipstream.train.world import World

_MOST_WARNINGS = 10


class Recorder:
    """The first worker's pen; with the others it does not write."""

    def __init__(self, run: RunFolder, facts: Facts, world: World, balanced: bool) -> None:
        self._run, self._facts, self._balanced = run, facts, balanced
        self._writes, self._device = world.rank == 0, world.device
        self._warnings = 0

    def start(self, parameters: int, timeline: Timeline) -> None:
        """Say what is about to be trained."""
        if self._writes:
            self._run.event(
                "build",
                parameters=parameters,
                steps=timeline.steps,
                samples=timeline.samples,
                tokens=timeline.samples * self._facts.tokens_per_sample,
            )

    def step(self, progress: Progress, share: Share, found: Found, judged: dict[str, float]) -> None:
        """Write one step's line."""
        if not self._writes:
            return
        line: dict[str, Any] = {
            "step": progress.step,
            "samples": progress.samples,
            "loss": _finite(found.agreed.loss),
            "lr": found.lr,
            "tokens_per_s": round(share.size * self._facts.tokens_per_sample / found.seconds, 1),
            "seconds": round(found.seconds, 6),
            "data_wait": round(share.waited, 6),
        }
        if self._balanced:
            line["share"] = share.own
        if found.traffic:
            line["sent"] = found.traffic.sent
            if found.traffic.sent:
                line["compression"] = round(found.traffic.plain / found.traffic.sent, 3)
            line |= found.traffic.figures
        if self._device.type == "cuda":
            line["memory"] = torch.cuda.max_memory_allocated(self._device)
        if found.norm is not None:
            line["grad_norm"] = _finite(found.norm)
        if found.skipped:
            line["skipped"] = True
        if progress.scale is not None:
            line["loss_scale"] = progress.scale
        append_line(self._run.metrics, line | {key: _finite(value) for key, value in judged.items()})
        if line["loss"] is None and self._warnings < _MOST_WARNINGS:
            self._warnings += 1
            what = "skipped" if found.skipped else "done all the same"
            self._run.event(
                "warning", text=f"the loss of step {progress.step} is {found.agreed.loss}; its update was {what}"
            )


def _finite(value: float) -> float | None:
    """JSON knows no NaN."""
    return value if math.isfinite(value) else None
