"""Workers for tests, forked from a process that has imported torch, so that a distributed test costs its steps and not
the start of processes.

They run what the workers of a real run do (`run_rank`), over gloo and real run folders; only their start is shared.
"""

import multiprocessing as mp
import os
import shutil
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from slipstream.data import prepare
from slipstream.fleet.scratch import Scratch
from slipstream.fleet.workers import KEEP_MEMORY
from slipstream.job import Job, dump
from slipstream.plan import make_plan, this_machine
from slipstream.runs import Pulse, RunFolder, create_pulse, read_lines, truncate_metrics, write_yaml
from slipstream.runs.checkpoints import find_checkpoint, read_progress

PATIENCE = 120.0
PRELOAD = ["slipstream.train.loop", "torch.distributed.checkpoint", "torch.distributed.pipelining"]
"""Imported once, for all that are forked from it."""


class Pool:
    """As many workers as a job wants, for as long as it takes."""

    def train(self, job: Job, folder: Path, workers: int, around: str | None = None) -> list[dict[str, Any]]:
        """Run a job from the start; the lines of its metrics. `around` names a context manager for every worker."""
        prepare(job, lambda _: None)
        run = RunFolder.create(folder, dump(job))
        return self._run(run, job, workers, None, around)

    def resume(self, folder: Path, workers: int, layout: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Go on from the newest checkpoint, on another layout if there is one; the lines of all metrics."""
        from slipstream.job import load_job

        run = RunFolder.open(folder)
        if layout:
            write_yaml(run.job, {**dump(load_job(run.job)), "layout": layout})
        checkpoint = find_checkpoint(run.checkpoints, lambda _: None)
        truncate_metrics(run.metrics, read_progress(checkpoint).step if checkpoint else 0)
        return self._run(run, load_job(run.job), workers, checkpoint, None)

    def _run(
        self, run: RunFolder, job: Job, workers: int, restore: Path | None, around: str | None
    ) -> list[dict[str, Any]]:
        write_yaml(run.plan, make_plan(job, this_machine(), workers).model_dump(mode="json"))
        scratch = Scratch.create()
        run.event("launch", workers=workers, spent=0.0, folder=str(Path.cwd()), scratch=str(scratch.path), restore=None)
        create_pulse(scratch.pulse, workers)
        started = [_start(run.path, rank, workers, scratch.path, restore, around) for rank in range(workers)]
        try:
            errors = self._answers([pipe for _, pipe in started])
        finally:
            for process, _ in started:  # those that wait for a failed one would wait for long
                process.kill()
                process.join()
            scratch.remove()
        failed = [error for error in errors if error]
        assert not failed, "\n".join(failed)
        return list(read_lines(run.metrics))

    def _answers(self, pipes: list[Connection]) -> list[str | None]:
        """What each worker says at its end; after the first failure the others may be waiting for it."""
        answers: list[str | None] = []
        until = time.monotonic() + PATIENCE
        while pipes and not any(answers):
            ready = wait(pipes, until - time.monotonic())
            if not ready:
                return [*answers, f"{len(pipes)} workers gave no answer within {PATIENCE} s"]
            answers += [_said(pipe) for pipe in ready]  # type: ignore[arg-type]
            pipes = [pipe for pipe in pipes if pipe not in ready]
        return answers


def _said(pipe: Connection) -> str | None:
    try:
        answer: str | None = pipe.recv()
        return answer
    except EOFError:
        return "a worker died without a word"


def _start(*words: Any) -> tuple[Any, Connection]:
    os.environ.update(KEEP_MEMORY)  # as the local fleet starts its workers
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, *words), daemon=True)
    process.start()
    theirs.close()  # so that its end is heard
    return process, mine


def _serve(
    pipe: Connection, path: Path, rank: int, size: int, folder: Path, restore: Path | None, around: str | None
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from slipstream.fleet.worker import run_rank
    from slipstream.train.world import Seat

    run, scratch = RunFolder(path), Scratch(folder)
    try:
        with _named(around):
            run_rank(run, Seat(rank, size, scratch.rendezvous), restore, Pulse(scratch.pulse, rank))
        pipe.send(None)
    except BaseException:
        pipe.send(f"rank {rank}:\n{traceback.format_exc()}")


def _named(around: str | None) -> AbstractContextManager[None]:
    if around is None:
        return nullcontext()
    module, _, name = around.partition(":")
    made: AbstractContextManager[None] = getattr(import_module(module), name)()
    return made


def forget_after(folder: Path, step: int) -> None:
    """Leave a run as a crash after this step would."""
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    (folder / "result.json").unlink()
