"""The loop: the whole life of a job on one page. It runs on every worker."""

import gc
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
from slipstream.train.batches import timeline_of
from slipstream.train.checkpoint import Checkpointer, load
from slipstream.train.compiled import await_compiler
from slipstream.train.control import NO_DATA, Control
from slipstream.train.found import Launched
from slipstream.train.learner import Learner
from slipstream.train.models import build_to_split
from slipstream.train.moment import Moment
from slipstream.train.network import know_network
from slipstream.train.parallel.split import SplitModel
from slipstream.train.parallel.trial import Trial
from slipstream.train.precision import set_arithmetic, weight_dtype
from slipstream.train.record import Recorder
from slipstream.train.server.served import Served
from slipstream.train.tally import PeerStopped, Tally
from slipstream.train.update import Update
from slipstream.train.world import World


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
        steps = timeline_of(job, dataset).steps
        plan = know_network(job, plan, run, world, list(plain.parameters()), steps, lambda: _goes_on(pulse, control))
        trial = Trial(plain, job, plan, dataset, world.device)
        here = (Served if isinstance(job.exchange, Server) else Learner)(job, plan, world, pulse, plain, dataset)
        model, batches, timeline = here.model, here.batches, here.batches.timeline
        trial.compare(model)
        update = Update(job.train, model, timeline.samples, fp16=plan.precision == "fp16")
        checkpointer = Checkpointer(run.checkpoints, job.checkpoint.keep, world, control.saves)
        recorder = Recorder(run, dataset.facts, world, batches.balance.works)
        progress = _restore(restore, model, update, world) if restore else Progress()
        recorder.start(parameters, timeline)
        tally = Tally(job, model, update, recorder, pulse, progress)
        behind = model.exchange.behind
        here.open(progress.step)
        await_compiler()

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
        evaluates = bool(batches.held_out) and (last or timeline.is_due(job.train.evaluate.every, step.number))
        saves = last or timeline.is_due(job.checkpoint.every, step.number)
        saves = tally.catch_up(everything=evaluates or saves) or saves
        with pulse.during("checkpoint"):
            checkpointer.check()
        if not (evaluates or saves or tally.hurries):
            tally.put_off(step)
            began = step.ended
            pulse.step += 1
            continue
        found, judged = tally.count(step), None
        if evaluates and found.counts:
            with pulse.during("evaluate"):
                judged = here.evaluate(everything=last)
            tally.stopped = tally.stopped if judged is not None else NO_DATA
        tally.record(step, found, judged)
        # Where a step does not count and nobody waits, those that had samples have gone on without the others.
        if (saves or found.agreed.save or tally.stopped) and (found.counts or not behind):
            with pulse.during("checkpoint"):
                checkpointer.save(tally.progress, model, update.optimizer)
                control.saved()
        if tally.stopped and not last:
            break
        began = Moment(world.device)
        pulse.step += 1
    with pulse.during("checkpoint"):
        checkpointer.close()
    here.close()
    if tally.stopped == NO_DATA:
        raise batches.lost or PeerStopped("another worker could not have its samples")
    early = tally.stopped if tally.progress.step < timeline.steps else None
    return Trained(plain, dataset.facts, tally.progress, parameters, early)


def _goes_on(pulse: Pulse, control: Control) -> bool:
    """A sign of life from what takes long, and whether nobody wishes to stop."""
    pulse.beat()
    return not control.interrupted


def _restore(path: Path, model: SplitModel, update: Update, world: World) -> Progress:
    load(path, model, update.optimizer, update.state_device, alone=world.size == 1)
    progress = read_progress(path)
    if progress.scale is not None and update.scale.active:
        update.scale.value, update.scale.good_steps = progress.scale, progress.good_steps
    model.late = progress.late
    return progress
