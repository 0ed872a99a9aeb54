"""The loop: the whole life of a job on one page. It runs on every worker."""

import gc
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
from slipstream.train.batches import Batches, Share
from slipstream.train.checkpoint import Checkpointer, load
from slipstream.train.compiled import await_compiler
from slipstream.train.control import NO_DATA, VOID, Control
from slipstream.train.found import Found, Launched, Moment
from slipstream.train.models import build_to_split
from slipstream.train.network import know_network
from slipstream.train.parallel.split import SplitModel
from slipstream.train.parallel.trial import Trial
from slipstream.train.precision import set_arithmetic, weight_dtype
from slipstream.train.record import Recorder
from slipstream.train.update import Update
from slipstream.train.validation import judge
from slipstream.train.worker import Worker
from slipstream.train.world import World


class NonFiniteLoss(RuntimeError):
    """The loss of a step is NaN or infinite, and the job says to stop."""


class PeerStopped(RuntimeError):
    """Another worker found the reason to stop; its report is the one to read."""


@dataclass(frozen=True)
class Trained:
    """What training hands to the stages after it."""

    model: nn.Module
    """The plain model; with its weights only where one worker holds all of them."""
    facts: Facts
    progress: Progress
    parameters: int
    stopped: str | None
    """Why it stopped before the end, if it did."""


def train(
    job: Job, plan: Plan, run: RunFolder, world: World, pulse: Pulse, control: Control, restore: Path | None
) -> Trained:
    """Build, restore; for each batch: forward, backward, exchange, update, record; now and then evaluate and save."""
    with pulse.during("build"):
        set_arithmetic(job, plan)
        plan = know_network(job, plan, run, world)
        dataset = open_dataset(job)
        batches = Batches(job, plan, dataset, world.rank)
        timeline = batches.timeline
        torch.manual_seed(job.seed)
        plain = build_to_split(job, dataset.facts, world.device, weight_dtype(plan))
        parameters = sum(weight.numel() for weight in plain.parameters())
        trial = Trial(plain, job, plan, dataset, world.device)
        worker = Worker(job, plan, world, pulse, plain, dataset.facts.white)
        model = worker.model
        trial.compare(model)
        update = Update(job.train, model, timeline.samples, fp16=plan.precision == "fp16")
        checkpointer = Checkpointer(run.checkpoints, job.checkpoint.keep, world)
        recorder = Recorder(run, dataset.facts, world)
        progress = _restore(restore, model, update, world) if restore else Progress()
        recorder.start(parameters, timeline)
        await_compiler()

    def settle(step: Launched) -> Found:
        with pulse.during("update"):
            found = step.found()
            _check_finite(found, step, job)
        return found

    stopped, save = None, False
    late: Launched | None = None  # on a GPU a step is read while the next one runs
    pulse.step = first = progress.step + 1
    began = Moment(world.device)
    for share in batches.from_sample(progress.samples, pulse):
        losses = worker.forward_backward(share, update.scale.value)
        with pulse.during("exchange"):
            model.exchange.finish()
            answer = control.ask(losses, world, has_data=batches.lost is None)
        with pulse.during("update"):
            checkpointer.hold()
            updated = update.apply(share.start, share.size, answer[0], answer[VOID])
            model.exchange.settle(updated.skipped)
        step = Launched(pulse.step, share, began, answer, updated, losses, model.exchange.traffic())
        if pulse.step == first:
            checkpointer.prepare(model, update.optimizer)
            gc.freeze()  # what has been made by now stays: no need to look through it again and again
        if late:
            found = settle(late)
            if not found.agreed.void:
                progress = _advance(progress, late.share, found, update)
                recorder.step(progress, late.share, found, {})
            stopped, save, late = found.agreed.stop, found.agreed.save, None
            checkpointer.check()
        last = step.number == timeline.steps
        evaluates = batches.held_out and (last or timeline.is_due(job.train.evaluate.every, step.number))
        saves = save or bool(stopped) or last or timeline.is_due(job.checkpoint.every, step.number)
        if not (update.waits or evaluates or saves):
            late, began = step, Moment(world.device)
            pulse.step += 1
            continue
        found, judged = settle(step), None
        counts = not found.agreed.void
        if counts:
            progress = _advance(progress, share, found, update)
        stopped, save = stopped or found.agreed.stop, saves or found.agreed.save
        if counts and evaluates:
            with pulse.during("evaluate"):
                samples = batches.held_out_samples(everything=last)
                judged = judge(worker, batches, samples, pulse.beat)
                stopped = stopped if judged is not None else NO_DATA
        if counts:
            recorder.step(progress, share, found, judged or {})
        with pulse.during("checkpoint"):
            checkpointer.check()
            if save or stopped:
                checkpointer.save(progress, model, update.optimizer)
                control.saved()
                save = False
        if stopped and not last:
            break
        began = Moment(world.device)
        pulse.step += 1
    with pulse.during("checkpoint"):
        checkpointer.close()
    if stopped == NO_DATA:
        raise batches.lost or PeerStopped("another worker could not have its samples")
    return Trained(plain, dataset.facts, progress, parameters, stopped if progress.step < timeline.steps else None)


def _restore(path: Path, model: SplitModel, update: Update, world: World) -> Progress:
    load(path, model, update.optimizer, update.state_device, alone=world.size == 1)
    progress = read_progress(path)
    if progress.scale is not None and update.scale.active:
        update.scale.value, update.scale.good_steps = progress.scale, progress.good_steps
    return progress


def _advance(before: Progress, share: Share, found: Found, update: Update) -> Progress:
    return Progress(
        step=before.step + 1,
        samples=share.start + share.size,
        skipped=before.skipped + found.skipped,
        scale=update.scale.value if update.scale.active else None,
        good_steps=update.scale.good_steps,
    )


def _check_finite(found: Found, step: Launched, job: Job) -> None:
    """Where the job says to stop, the worker whose samples did it says so."""
    loss = found.agreed.loss
    if math.isfinite(loss) or job.train.on_nonfinite != "stop":
        return
    for part, micro in zip(found.losses, step.share.micro_batches, strict=True):
        if not math.isfinite(part):
            first, last = int(micro.positions[0]), int(micro.positions[-1])
            numbers = ", ".join(map(str, micro.indices[:8].tolist())) + (", …" if len(micro.indices) > 8 else "")
            raise NonFiniteLoss(
                f"the loss is {part} at step {step.number}, in samples {first} to {last} of the run "
                f"(numbers {numbers} of the data)"
            )
    raise PeerStopped(f"the loss is {loss} at step {step.number}, from another worker's samples")
