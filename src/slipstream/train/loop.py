"""The loop: the whole life of a job on one page. It runs on every worker."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from slipstream.data import open_dataset
from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.plan import Plan
from slipstream.runs import Pulse, RunFolder
from slipstream.runs.checkpoints import Progress, read_progress
from slipstream.train import tasks
from slipstream.train.batches import Batches, Share, seed_everything
from slipstream.train.checkpoint import Checkpointer, load
from slipstream.train.control import Control
from slipstream.train.exchange import build_exchange
from slipstream.train.models import build_model, is_built_in
from slipstream.train.models.batchnorm import synchronise_batch_norm
from slipstream.train.models.dropout import own_dropout
from slipstream.train.precision import autocast, set_matrix_precision, weight_dtype
from slipstream.train.record import Recorder
from slipstream.train.update import Update
from slipstream.train.validation import judge
from slipstream.train.world import World


class NonFiniteLoss(RuntimeError):
    """The loss of a step is NaN or infinite, and the job says to stop."""


class PeerStopped(RuntimeError):
    """Another worker found the reason to stop; its report is the one to read."""


@dataclass(frozen=True)
class Trained:
    """What training hands to the stages after it."""

    model: nn.Module
    facts: Facts
    progress: Progress
    stopped: str | None
    """Why it stopped before the end, if it did."""


def train(
    job: Job, plan: Plan, run: RunFolder, world: World, pulse: Pulse, control: Control, restore: Path | None
) -> Trained:
    """Build, restore; for each batch: forward, backward, exchange, update, record; now and then evaluate and save."""
    with pulse.during("build"):
        set_matrix_precision(plan)
        dataset = open_dataset(job)
        batches = Batches(job, plan, dataset, world.rank)
        timeline = batches.timeline
        torch.manual_seed(job.seed)
        model = build_model(job, dataset.facts).to(world.device, weight_dtype(plan))
        worker = _Worker(job, plan, world, pulse, model)
        update = Update(job.train, model, timeline.samples, fp16=plan.precision == "fp16")
        checkpointer = Checkpointer(run.checkpoints, job.checkpoint.keep, world)
        recorder = Recorder(run, dataset.facts, world)
        progress = _restore(restore, model, update, world) if restore else Progress()
        recorder.start(model, timeline)

    stopped = None
    pulse.step = progress.step + 1
    for share in batches.from_sample(progress.samples, pulse):
        losses = worker.forward_backward(share, update.scale.value)
        with pulse.during("exchange"):
            worker.exchange.finish()
            agreed = control.agree(sum(losses), world)
        stopped = agreed.stop
        with pulse.during("update"):
            may_update = _check_finite(agreed.loss, losses, share, job, pulse.step)
            updated = update.apply(share.start, share.size, may_update)
            recorder.lap()
        progress = Progress(
            step=progress.step + 1,
            samples=share.start + share.size,
            skipped=progress.skipped + updated.skipped,
            scale=update.scale.value if update.scale.active else None,
            good_steps=update.scale.good_steps,
        )
        last = progress.step == timeline.steps
        judged = {}
        if batches.held_out and (last or timeline.is_due(job.train.evaluate.every, progress.step)):
            with pulse.during("evaluate"):
                samples = batches.held_out_samples(everything=last)
                judged = judge(model, batches.fetch_held_out, samples, job, plan, world, pulse.beat)
        recorder.step(progress, share.size, agreed.loss, updated, judged)
        with pulse.during("checkpoint"):
            checkpointer.check()
            if agreed.save or stopped or last or timeline.is_due(job.checkpoint.every, progress.step):
                checkpointer.save(progress, model, update.optimizer)
                control.saved()
        if stopped and not last:
            break
        pulse.step = progress.step + 1
    with pulse.during("checkpoint"):
        checkpointer.close()
    return Trained(model, dataset.facts, progress, stopped if progress.step < timeline.steps else None)


class _Worker:
    """The model as one worker runs it: forward and backward over its share, gradients on their way to the others."""

    def __init__(self, job: Job, plan: Plan, world: World, pulse: Pulse, model: nn.Module) -> None:
        self._job, self._plan, self._world, self._pulse, self._model = job, plan, world, pulse, model
        self._keys = own_dropout(model, job.seed)
        self._owns_outputs = is_built_in(job.model)  # a user's model may keep its outputs for itself
        normalised = synchronise_batch_norm(model)
        if normalised and job.layout.micro_batch:
            raise ValueError(
                "layout.micro_batch would change the curve: this model has batch norm, "
                "which takes its statistics over the whole batch; remove the setting"
            )
        self.exchange = build_exchange(job.exchange, model, world.size)

    def forward_backward(self, share: Share, scale: float) -> list[float]:
        """Leave the gradients of the batch's mean loss; return this worker's part of it for each micro-batch."""
        with self._pulse.during("exchange"):
            total = float(self._world.sum(torch.tensor(float(share.weight), dtype=torch.float64)))
        losses = []
        for number, micro in enumerate(share.micro_batches, 1):
            seed_everything(self._job.seed, int(micro.positions[0]))
            with self._pulse.during("forward"), self._keys.of(micro.positions), autocast(self._plan):
                outputs = self._model(micro.inputs.to(self._world.device))
                targets = micro.targets.to(self._world.device)
                loss = tasks.loss_sum(self._job.task, outputs, targets, self._owns_outputs) / max(1.0, total)
            if number == len(share.micro_batches):
                self.exchange.begin()
            with self._pulse.during("backward"):
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        return losses


def _restore(path: Path, model: nn.Module, update: Update, world: World) -> Progress:
    load(path, model, update.optimizer, alone=world.size == 1)
    progress = read_progress(path)
    if progress.scale is not None and update.scale.active:
        update.scale.value, update.scale.good_steps = progress.scale, progress.good_steps
    return progress


def _check_finite(loss: float, mine: list[float], share: Share, job: Job, step: int) -> bool:
    """Whether to update. Where the job says to stop, the worker whose samples did it says so."""
    if math.isfinite(loss):
        return True
    if job.train.on_nonfinite == "warn":
        return True
    if job.train.on_nonfinite == "skip":
        return False
    for part, micro in zip(mine, share.micro_batches, strict=True):
        if not math.isfinite(part):
            first, last = int(micro.positions[0]), int(micro.positions[-1])
            numbers = ", ".join(map(str, micro.indices[:8])) + (", …" if len(micro.indices) > 8 else "")
            raise NonFiniteLoss(
                f"the loss is {part} at step {step}, in samples {first} to {last} of the run "
                f"(numbers {numbers} of the data)"
            )
    raise PeerStopped(f"the loss is {loss} at step {step}, from another worker's samples")
