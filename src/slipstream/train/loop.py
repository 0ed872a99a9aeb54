"""The loop: the whole life of a job on one page. It runs on every worker."""

import gc
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from slipstream.data import open_dataset
from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.job.servers import Server
from slipstream.plan import Plan
from slipstream.runs import Pulse, RunFolder
from slipstream.runs.checkpoints import Progress, read_progress
from slipstream.train.batches import Share
from slipstream.train.checkpoint import Checkpointer, load
from slipstream.train.compiled import await_compiler
from slipstream.train.control import NO_DATA, Control
from slipstream.train.found import Found, Launched
from slipstream.train.learner import Learner
from slipstream.train.models import build_to_split
from slipstream.train.moment import Moment
from slipstream.train.network import know_network
from slipstream.train.parallel.split import SplitModel
from slipstream.train.parallel.trial import Trial
from slipstream.train.precision import set_arithmetic, weight_dtype
from slipstream.train.record import Recorder
from slipstream.train.server.served import Served
from slipstream.train.update import Update
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
        dataset = open_dataset(job)
        torch.manual_seed(job.seed)
        plain = build_to_split(job, dataset.facts, world.device, weight_dtype(plan))
        parameters = sum(weight.numel() for weight in plain.parameters())
        plan = know_network(job, plan, run, world, parameters * weight_dtype(plan).itemsize)
        trial = Trial(plain, job, plan, dataset, world.device)
        here = (Served if isinstance(job.exchange, Server) else Learner)(job, plan, world, pulse, plain, dataset)
        model, batches, timeline = here.model, here.batches, here.batches.timeline
        trial.compare(model)
        update = Update(job.train, model, timeline.samples, fp16=plan.precision == "fp16")
        checkpointer = Checkpointer(run.checkpoints, job.checkpoint.keep, world)
        recorder = Recorder(run, dataset.facts, world, batches.balance.works)
        progress = _restore(restore, model, update, world) if restore else Progress()
        recorder.start(parameters, timeline)
        here.open(progress.step)
        await_compiler()

    def settle(step: Launched) -> Found:
        with pulse.during("update"):
            found = step.found()
            _check_finite(found, step, job)
        return found

    stopped: str | None = None
    # On a GPU a step is read while the next one runs; where workers go by themselves, some steps later.
    late: deque[Launched] = deque()
    behind = model.exchange.behind
    pulse.step = first = progress.step + 1
    began = Moment(world.device)
    for share in batches.from_sample(progress.samples, pulse):
        last = pulse.step == timeline.steps
        with batches.balance.measuring(pulse.step - 1, share.own, world):
            losses = here.forward_backward(share, update.scale.value)
        with pulse.during("exchange"):
            asked = control.ask(losses, world, batches.lost is None, model.exchange.finish, wait=not behind)
        with pulse.during("update"):
            checkpointer.hold()
            updated = update.apply(share.start, share.size, asked.loss, asked.void)
        with pulse.during("exchange"):
            model.exchange.settle(updated.skipped, pulse.step, last)
        step = Launched(pulse.step, share, began, asked, updated, losses, model.exchange.traffic())
        if pulse.step == first:
            checkpointer.prepare(model, update.optimizer)
            gc.freeze()  # what has been made by now stays: no need to look through it again and again
        evaluates = batches.held_out and (last or timeline.is_due(job.train.evaluate.every, step.number))
        saves = last or timeline.is_due(job.checkpoint.every, step.number)
        while late and (evaluates or saves or len(late) >= behind):
            earlier = late.popleft()
            found = settle(earlier)
            if not found.agreed.void:
                progress = _advance(progress, earlier.share, found, update, model)
                recorder.step(progress, earlier.share, found, {})
            stopped = stopped or found.agreed.stop
            saves = saves or bool(stopped) or found.agreed.save
            checkpointer.check()
        if not (evaluates or saves or (update.waits and not behind)):
            late.append(step)
            began = step.ended
            pulse.step += 1
            continue
        found, judged = settle(step), None
        counts = not found.agreed.void
        if counts:
            progress = _advance(progress, share, found, update, model)
        stopped = stopped or found.agreed.stop
        if counts and evaluates:
            with pulse.during("evaluate"):
                judged = here.evaluate(everything=last)
                stopped = stopped if judged is not None else NO_DATA
        if counts:
            recorder.step(progress, share, found, judged or {})
        with pulse.during("checkpoint"):
            checkpointer.check()
            saves = saves or bool(stopped) or found.agreed.save
            if saves and (counts or not behind):  # otherwise those that had samples have gone on without the others
                checkpointer.save(progress, model, update.optimizer)
                control.saved()
        if stopped and not last:
            break
        began = Moment(world.device)
        pulse.step += 1
    with pulse.during("checkpoint"):
        checkpointer.close()
    here.close()
    if stopped == NO_DATA:
        raise batches.lost or PeerStopped("another worker could not have its samples")
    return Trained(plain, dataset.facts, progress, parameters, stopped if progress.step < timeline.steps else None)


def _restore(path: Path, model: SplitModel, update: Update, world: World) -> Progress:
    load(path, model, update.optimizer, update.state_device, alone=world.size == 1)
    progress = read_progress(path)
    if progress.scale is not None and update.scale.active:
        update.scale.value, update.scale.good_steps = progress.scale, progress.good_steps
    model.late = progress.late
    return progress


def _advance(before: Progress, share: Share, found: Found, update: Update, model: SplitModel) -> Progress:
    return Progress(
        step=before.step + 1,
        samples=share.start + share.size,
        skipped=before.skipped + found.skipped,
        scale=update.scale.value if update.scale.active else None,
        good_steps=update.scale.good_steps,
        late=model.late,
    )


def _check_finite(found: Found, step: Launched, job: Job) -> None:
    """Where the job says to stop, the worker whose samples did it says so."""
    loss = found.agreed.loss
    if math.isfinite(loss) or job.train.on_nonfinite != "stop":
        return
    refuse_nonfinite(found.losses, step.share, step.number)
    raise PeerStopped(f"the loss is {loss} at step {step.number}, from another worker's samples")


def refuse_nonfinite(losses: list[float], share: Share, step: int) -> None:
    """Name the samples whose loss is not finite, if there are any."""
    for loss, micro in zip(losses, share.micro_batches, strict=True):
        if not math.isfinite(loss):
            first, last = int(micro.positions[0]), int(micro.positions[-1])
            numbers = ", ".join(map(str, micro.indices[:8].tolist())) + (", …" if len(micro.indices) > 8 else "")
            raise NonFiniteLoss(
                f"the loss is {loss} at step {step}, in samples {first} to {last} of the run "
                f"(numbers {numbers} of the data)"
            )
