"""The Python door: `slipstream.train(job)` and `slipstream.resume(run)`, with the words of the command line."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from slipstream.fleet.local import LocalFleet, WorkersFailed
from slipstream.fleet.scratch import Scratch
from slipstream.job import Job, check_job, dump, load_job, locate
from slipstream.plan import Plan, this_machine
from slipstream.plan.here import Here
from slipstream.plan.layout import SPOKEN
from slipstream.planning import (
    RUNS,
    LateRefusal,
    check_plans,
    dry_run,
    find_run,
    plan,
    plan_here,
    prepare_data,
    read_plan,
    save_plan,
    settings_of,
)
from slipstream.runs import RunError, RunFolder, draw_curve, new_run_path, read_lines, truncate_metrics, write_yaml
from slipstream.runs.checkpoints import find_checkpoint, read_progress
from slipstream.runs.result import Result, read_result

__all__ = [
    "RUNS", "LateRefusal", "Silence", "Watcher", "check_plans", "dry_run", "find_run", "plan", "read_plan", "resume",
    "save_plan", "settings_of", "train",
]  # fmt: skip


_TEACHES = 20
"""Steps of a run from which the planner learns."""


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

    run: RunFolder | None = None

    def say(self, text: str) -> None:
        """Not heard."""

    def started(self, run: RunFolder, job: Job, plan: Plan) -> None:  # noqa: ARG002
        self.run = run

    def tick(self) -> None:
        """Not seen."""

    def close(self) -> None:
        """Nothing to leave."""


def train(
    job: Job | dict[str, Any] | str | Path,
    *,
    settings: Sequence[str] = (),
    workers: int | None = None,
    run_dir: str | Path | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Plan and run a job on this machine, from the start to its result. `settings` change what a job file says.

    Raises JobError if the job cannot be run as written (then nothing is left behind) and WorkersFailed if it fails.
    """
    watcher = watcher or Silence()
    if isinstance(job, str | Path):
        try:
            return _train(load_job(job, settings), workers, run_dir, watcher)
        except LateRefusal as error:
            raise locate(error, job, settings) from error
    if settings:
        raise ValueError("settings change a job file; change the values of a job made in Python where it is made")
    return _train(check_job(job) if isinstance(job, dict) else job, workers, run_dir, watcher)


def _train(job: Job, workers: int | None, run_dir: str | Path | None, watcher: Watcher) -> Result:
    if job.limits.budget and not job.machines.price_per_hour:
        raise LateRefusal(job, "limits.budget has no effect on this machine without machines.price_per_hour")
    plan = plan_here(job, workers, None)
    if run_dir:
        RunFolder(run_dir).refuse_if_taken()
    home = str(Path.cwd())
    prepare_data(job, watcher.say, home)
    run = _create(run_dir, job)
    with _locked(run) as lock:
        try:
            return _launch(run, job, plan, None, watcher, lock, home, spent=0.0)
        except WorkersFailed as error:
            if error.failure.error == "ValueError" and error.failure.phase == "build":
                # What only the model and the data together could show to be wrong.
                shutil.rmtree(run.path)
                with suppress(OSError):  # other runs are in it
                    RUNS.rmdir()
                raise LateRefusal(job, error.failure.message) from error
            raise


def resume(
    run_dir: str | Path, *, workers: int | None = None, settings: Sequence[str] = (), watcher: Watcher | None = None
) -> Result:
    """Go on with a run from its newest whole checkpoint, on the same or another number of workers.

    `settings` say another layout (`layout.shard=2`), which then is the run's.
    """
    watcher = watcher or Silence()
    run = find_run(run_dir)
    try:
        return _resume(run, workers, settings, watcher)
    except LateRefusal as error:
        raise locate(error, run.job, settings) from error


def _resume(run: RunFolder, workers: int | None, settings: Sequence[str], watcher: Watcher) -> Result:
    job = load_job(run.job, ["layout={}", *settings] if settings else ())
    with _locked(run) as lock:
        result = read_result(run)
        if result and result.status == "finished":
            raise RunError(f"{run.path} is finished; `slipstream show {run.path}` shows it")
        run.mend()
        spent, home = run.seconds_spent(), _home(run)
        _refuse_if_spent(run, job, spent)
        before = read_plan(run)
        plan = plan_here(job, workers or (before.layout.workers if before and _is_of(job, before) else None), before)
        if settings:
            write_yaml(run.job, dump(job))
        prepare_data(job, watcher.say, home)
        checkpoint = find_checkpoint(run.checkpoints, lambda text: _warn(run, watcher, text))
        progress = read_progress(checkpoint) if checkpoint else None
        truncate_metrics(run.metrics, progress.step if progress else 0)
        where = f"from step {progress.step}" if progress else "from the start: there is no whole checkpoint yet"
        watcher.say(f"resuming {run.name} {where}")
        return _launch(run, job, plan, checkpoint, watcher, lock, home, spent)


def _is_of(job: Job, before: Plan) -> bool:
    """Whether a plan has the axes that a job asks for: if not, its number of workers says nothing any more."""
    asked = {axis: getattr(job.layout, axis) for axis in SPOKEN}
    return all(size is None or size == getattr(before.layout, axis) for axis, size in asked.items())


def _create(run_dir: str | Path | None, job: Job) -> RunFolder:
    """The folder asked for, or the next free one under `runs`, which another launch may take at the same moment."""
    while run_dir is None:
        path = new_run_path(RUNS, job.name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        run_dir = path
    return RunFolder.create(Path(run_dir), dump(job))


@contextmanager
def _locked(run: RunFolder) -> Iterator[int]:
    lock = run.lock()
    try:
        yield lock
    finally:
        os.close(lock)


def _refuse_if_spent(run: RunFolder, job: Job, spent: float) -> None:
    deadline, budget, price = job.limits.deadline, job.limits.budget, job.machines.price_per_hour
    if deadline is not None and spent >= deadline:
        raise RunError(f"the deadline is spent: {spent:.0f} s of {deadline:.0f} s; raise limits.deadline in {run.job}")
    if budget and price and spent / 3600 * price >= budget:
        cost = spent / 3600 * price
        raise RunError(f"the budget is spent: ${cost:.2f} of ${budget:.2f}; raise limits.budget in {run.job}")


def _launch(
    run: RunFolder,
    job: Job,
    plan: Plan,
    restore: Path | None,
    watcher: Watcher,
    lock: int,
    home: str,
    spent: float,
) -> Result:
    scratch = Scratch.create()
    try:
        _remove_old_scratch(run)
        write_yaml(run.plan, plan.model_dump(mode="json"))
        run.result.unlink(missing_ok=True)
        facts = {"workers": plan.layout.workers, "folder": home, "restore": restore.name if restore else None}
        run.event("launch", spent=round(spent, 3), scratch=str(scratch.path), **facts)
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
        scratch.remove()
    result = read_result(run)
    assert result is not None, "the first worker leaves one before it ends well"
    run.event(result.status, reason=result.reason, step=result.step, loss=result.loss)
    draw_curve(run)
    alike = job.exchange.kind == "allreduce"  # otherwise the median step is not the mean, which was predicted
    if result.status == "finished" and result.step >= _TEACHES and result.step_seconds and plan.predicted and alike:
        Here(this_machine()).learn(plan.predicted.step_seconds, result.step_seconds)
    return result


def _remove_old_scratch(run: RunFolder) -> None:
    """What a launcher that was killed could not take away."""
    for event in read_lines(run.events):
        if event["event"] == "launch":
            Scratch(Path(event["scratch"])).remove()


def _home(run: RunFolder) -> str:
    """The folder the run was first started from: the user's own modules are found there."""
    return next((event["folder"] for event in read_lines(run.events) if event["event"] == "launch"), str(Path.cwd()))


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
