"""The workers of a launch: `python -m slipstream.fleet.worker RUN RANKS SIZE SCRATCH [CHECKPOINT]`.

One process imports torch, which takes seconds and much memory, and then forks into the ranks it was given: they share
both. A process with one rank is that rank. Where the exchange has servers, they are the ranks from SIZE on.
"""

import faulthandler
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Never

import yaml

from slipstream.fleet.failure import write_failure
from slipstream.fleet.scratch import Scratch
from slipstream.job import Job, load_job
from slipstream.job.servers import servers_of
from slipstream.plan import Plan
from slipstream.runs import Pulse, RunFolder, read_lines
from slipstream.runs.checkpoints import find_checkpoint
from slipstream.runs.result import Result, count_staleness, mean_traffic, part_waiting, steady_step, write_result

if TYPE_CHECKING:
    from torch import nn

    from slipstream.train.loop import Trained
    from slipstream.train.world import Seat


RENDEZVOUS = "SLIPSTREAM_RENDEZVOUS"
"""Where the ranks meet if they are on several machines: `tcp://host:port`."""
_asked_to_stop = threading.Event()
"""A wish to stop that came before there was anything to stop."""


def main() -> None:
    """Become the ranks named on the command line, and stay until the last has ended."""
    run, size, scratch = RunFolder(sys.argv[1]), int(sys.argv[3]), Scratch(Path(sys.argv[4]))
    ranks = [int(rank) for rank in sys.argv[2].split(",")]
    restore = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    signal.signal(signal.SIGTERM, lambda *_: _asked_to_stop.set())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the ranks, which answer with their stacks
    if len(ranks) == 1:
        _be_rank(run, ranks[0], size, scratch, restore)
    try:
        import slipstream.train.loop  # noqa: F401  (for all ranks at once)
        from slipstream.train.models import preload

        preload(load_job(run.job).model)
    except BaseException as error:
        for rank in ranks:  # it is the end of all of them
            write_failure(scratch, rank, 0, "start", error)
        raise
    rank_of: dict[int, int] = {}
    for rank in ranks:
        if not (child := os.fork()):
            _be_rank(run, rank, size, scratch, restore)
        rank_of[child] = rank
        scratch.leave_process(rank, child)
    while rank_of:
        child, status = os.wait()
        scratch.leave_exit_code(rank_of.pop(child), os.waitstatus_to_exitcode(status))


def _be_rank(run: RunFolder, rank: int, size: int, scratch: Scratch, restore: Path | None) -> Never:
    """Run one rank to its end. What goes wrong is left on record for the launcher."""
    with (run.logs / f"rank-{rank}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    pulse = Pulse(scratch.pulse, rank)
    try:
        with scratch.stack(rank).open("a") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            from slipstream.train.world import Seat

            run_rank(run, Seat(rank, size, os.environ.get(RENDEZVOUS) or scratch.rendezvous), restore, pulse)
        code = 0
    except BaseException as error:  # also what a library raises beside Exception
        write_failure(scratch, rank, pulse.step, pulse.phase, error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the thread of a checkpoint may wait for workers that are gone, and exit handlers for that thread.
    os._exit(code)


def _die_with_launcher() -> None:
    """The launcher holds the other end of standard input: when it is gone, however it went, so are its workers."""
    while os.read(0, 1):
        pass
    os._exit(1)


def run_rank(run: RunFolder, seat: "Seat", restore: Path | None, pulse: Pulse) -> None:
    """What every rank does: join the others, train, and (the first one) leave the result."""
    pulse.beat("start")
    job = load_job(run.job)
    plan = Plan.model_validate(yaml.safe_load(run.plan.read_text()))
    import torch

    from slipstream.train.compiled import wake_compiler

    if plan.compile:
        wake_compiler()
    from slipstream.train.control import Control
    from slipstream.train.loop import train
    from slipstream.train.world import Seat, World

    torch.set_num_threads(plan.threads)
    control = Control(job, run.seconds_spent())
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: control.interrupt())
    if _asked_to_stop.is_set():
        control.interrupt()
    servers = servers_of(job)
    if servers and seat.rank < seat.size:
        _work(job, plan, seat.rank, pulse)
        return
    if servers:  # they are a world of their own
        seat = Seat(seat.rank - seat.size, servers, seat.rendezvous)
    world = World.join(seat, "cpu" if servers else plan.device)
    try:
        trained = train(job, plan, run, world, pulse, control, restore)
        if world.rank == 0:
            with pulse.during("export"):
                _finish(run, job, plan, trained)
    finally:
        world.leave()


def _work(job: Job, plan: Plan, rank: int, pulse: Pulse) -> None:
    """A worker of servers, which tell it when to stop."""
    from slipstream.train.server.work import work

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    work(job, plan, rank, pulse)


def _finish(run: RunFolder, job: Job, plan: Plan, trained: "Trained") -> None:
    sample = export = None
    if trained.stopped is None and (servers_of(job) or plan.layout.workers != plan.layout.replicate):
        trained = replace(trained, model=_whole_model(run, job, plan, trained))
    if trained.stopped is None:
        sample, export = _write_sample(job, trained), _write_export(run, job, trained)
    lines = list(read_lines(run.metrics))
    last = max(lines, key=lambda line: int(line["step"]))
    seconds, price = run.seconds_spent(), job.machines.price_per_hour
    write_result(
        run,
        Result(
            run=str(run.path),
            status="stopped" if trained.stopped else "finished",
            reason=trained.stopped,
            step=trained.progress.step,
            samples=trained.progress.samples,
            tokens=trained.progress.samples * trained.facts.tokens_per_sample,
            parameters=trained.parameters,
            loss=last["loss"],
            val_loss=last.get("val_loss"),
            val_accuracy=last.get("val_accuracy"),
            skipped=trained.progress.skipped,
            workers=plan.layout.workers,
            seconds=round(seconds, 3),
            cost=round(seconds / 3600 * price, 4) if price else None,
            sample=sample,
            export=export,
            step_seconds=round(steady_step([line["seconds"] for line in lines]), 6),
            predicted_step_seconds=plan.predicted.step_seconds if plan.predicted else None,
            memory=max((line["memory"] for line in lines if "memory" in line), default=None),
            predicted_memory=plan.predicted.memory if plan.predicted else None,
            data_wait=round(part_waiting(lines), 4),
            **mean_traffic(lines),
            staleness=count_staleness(lines),
        ),
    )


def _whole_model(run: RunFolder, job: Job, plan: Plan, trained: "Trained") -> "nn.Module":
    """Where no worker holds all weights: the plain model, from the last checkpoint."""
    from slipstream.fleet.mirror import make_whole
    from slipstream.train.checkpoint import load_plain
    from slipstream.train.models import build_model
    from slipstream.train.precision import weight_dtype

    make_whole(run)
    checkpoint = find_checkpoint(run.checkpoints, print)
    assert checkpoint is not None, "the last step has written one"
    model = build_model(job, trained.facts).to(weight_dtype(plan))
    load_plain(checkpoint, model)
    return model


def _write_sample(job: Job, trained: "Trained") -> str | None:
    from slipstream.data import tokenizer_json
    from slipstream.evaluate.generate import generate

    wish = job.train.sample
    if wish is None:
        return None
    device = next(trained.model.parameters()).device
    context, tokenizer = trained.facts.inputs[0], tokenizer_json(job)
    assert tokenizer, "refused when the data was opened"
    return generate(trained.model, tokenizer, wish.prompt, wish.tokens, wish.temperature, job.seed, context, device)


def _write_export(run: RunFolder, job: Job, trained: "Trained") -> str:
    from slipstream.data import tokenizer_json
    from slipstream.evaluate.export import export

    return str(export(trained.model, job, trained.facts, run.export, tokenizer_json(job)))


if __name__ == "__main__":
    main()
