"""The Python door: `slipstream.train(job)` and `slipstream.resume(run)`, with the words of the command line."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import yaml

from slipstream.data import prepare
from slipstream.fleet.local import LocalFleet, WorkersFailed
from slipstream.fleet.scratch import Scratch
from slipstream.job import Job, JobError, check_job, dump, load_job
from slipstream.job.file import Problem
from slipstream.plan import Plan, make_plan, this_machine
from slipstream.runs import RunError, RunFolder, draw_curve, new_run_path, read_lines, truncate_metrics, write_yaml
from slipstream.runs.checkpoints import find_checkpoint, read_progress
from slipstream.runs.result import Result, read_result

RUNS = Path("runs")
"""Where runs go when nothing else is said."""


class Watcher(Protocol):
    """Someone who looks on while a job runs."""

    def say(self, text: str) -> None:
        """A line about what is being done."""
        ...

    def started(self, run: RunFolder, job: Job, plan: Plan) -> None:
        """The workers are being started."""
        ...

    def tick(self) -> None:
        """Called many times a second while the workers run."""
        ...


class Silence:
    """Nobody looks on."""

    def say(self, text: str) -> None:
        """Not heard."""

    def started(self, run: RunFolder, job: Job, plan: Plan) -> None:
        """Not seen."""

    def tick(self) -> None:
        """Not seen."""

    def close(self) -> None:
        """Nothing to leave."""


def train(
    job: Job | dict[str, Any] | str | Path,
    *,
    workers: int | None = None,
    run_dir: str | Path | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Plan and run a job on this machine, from the start to its result.

    Raises JobError if the job cannot be run as written (then nothing is left behind) and WorkersFailed if it fails.
    """
    watcher = watcher or Silence()
    if not isinstance(job, Job):
        job = check_job(job) if isinstance(job, dict) else load_job(job)
    plan = _make_plan(job, workers)
    path = Path(run_dir) if run_dir else new_run_path(RUNS, job.name)
    if (path / "job.yaml").exists():
        raise RunError(f"{path} already holds a run; go on with `slipstream resume {path}`, or choose another folder")
    _prepare(job, watcher)
    run = RunFolder.create(path, dump(job))
    try:
        return _launch(run, job, plan, None, watcher)
    except WorkersFailed as error:
        if error.failure.error == "ValueError" and error.failure.phase == "build":
            # What only the model and the data together could show to be wrong.
            shutil.rmtree(run.path)
            raise JobError([Problem(job.name, "", error.failure.message)]) from error
        raise


def resume(run_dir: str | Path, *, workers: int | None = None, watcher: Watcher | None = None) -> Result:
    """Go on with a run from its newest whole checkpoint, on the same or another number of workers."""
    watcher = watcher or Silence()
    run = find_run(run_dir)
    job = load_job(run.job)
    lock = run.lock()
    result = read_result(run)
    if result and result.status == "finished":
        os.close(lock)
        raise RunError(f"{run.path} is finished; `slipstream show {run.path}` shows it")
    before = Plan.model_validate(yaml.safe_load(run.plan.read_text())) if run.plan.exists() else None
    plan = _make_plan(job, workers or (before.layout.workers if before else None))
    _prepare(job, watcher)
    checkpoint = find_checkpoint(run.checkpoints, lambda text: _warn(run, watcher, text))
    progress = read_progress(checkpoint) if checkpoint else None
    truncate_metrics(run.metrics, progress.step if progress else 0)
    where = f"from step {progress.step}" if progress else "from the start: there is no whole checkpoint yet"
    watcher.say(f"resuming {run.name} {where}")
    return _launch(run, job, plan, checkpoint, watcher, lock)


def find_run(name: str | Path) -> RunFolder:
    """A run by its folder, or by its name under `runs`."""
    path = Path(name)
    if not (path / "job.yaml").exists() and (RUNS / path / "job.yaml").exists():
        path = RUNS / path
    return RunFolder.open(path)


def _launch(
    run: RunFolder, job: Job, plan: Plan, restore: Path | None, watcher: Watcher, lock: int | None = None
) -> Result:
    lock = run.lock() if lock is None else lock
    home, scratch = _home(run), Scratch.create()
    try:
        _remove_old_scratch(run)
        write_yaml(run.plan, plan.model_dump(mode="json"))
        run.result.unlink(missing_ok=True)
        from_ = restore.name if restore else None
        run.event("launch", workers=plan.layout.workers, folder=home, scratch=str(scratch.path), restore=from_)
        watcher.started(run, job, plan)
        fleet = LocalFleet(run, job, plan, home, scratch)
        with _interruptible(fleet, watcher):
            fleet.run_to_end(lock, restore, watcher.tick)
    except WorkersFailed as error:
        failure = error.failure
        with suppress(OSError):  # the disk may be what failed
            run.event("failure", rank=failure.rank, step=failure.step, phase=failure.phase, error=failure.error)
        raise
    finally:
        os.close(lock)
        scratch.remove()
    result = read_result(run)
    assert result is not None, "the first worker leaves one before it ends well"
    run.event(result.status, reason=result.reason, step=result.step, loss=result.loss)
    draw_curve(run)
    return result


def _remove_old_scratch(run: RunFolder) -> None:
    """What a launcher that was killed could not take away."""
    for event in read_lines(run.events):
        if event["event"] == "launch":
            Scratch(Path(event["scratch"])).remove()


def _home(run: RunFolder) -> str:
    """The folder the run was first started from: the user's own modules are found there."""
    return next((event["folder"] for event in read_lines(run.events) if event["event"] == "launch"), str(Path.cwd()))


def _make_plan(job: Job, workers: int | None) -> Plan:
    try:
        return make_plan(job, this_machine(), workers)
    except ValueError as error:
        raise JobError([Problem(job.name, "", str(error))]) from error


def _prepare(job: Job, watcher: Watcher) -> None:
    try:
        prepare(job, watcher.say)
    except ValueError as error:
        raise JobError([Problem(job.name, "", str(error))]) from error


def _warn(run: RunFolder, watcher: Watcher, text: str) -> None:
    run.event("warning", text=text)
    watcher.say(f"warning: {text}")


@contextmanager
def _interruptible(fleet: LocalFleet, watcher: Watcher) -> Iterator[None]:
    """The first Ctrl-C asks for a checkpoint and a stop; the second ends everything at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        watcher.say("stopping after this step, with a checkpoint; once more to stop at once")
        fleet.interrupt()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
