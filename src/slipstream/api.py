"""The Python door: `slipstream.train(job)` and `slipstream.resume(run)`, with the words of the command line."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.fleet.launch import Launch, Silence, Watcher, locked, refuse_if_spent, rewind
from slipstream.fleet.watch import WorkersFailed
from slipstream.job import Job, check_job, dump, load_job, locate
from slipstream.plan import Plan
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
from slipstream.runs import RunError, RunFolder, new_run_path, read_lines, write_yaml
from slipstream.runs.result import Result, read_result

__all__ = [
    "RUNS", "LateRefusal", "Silence", "Watcher", "check_plans", "create_run", "dry_run", "find_run", "plan",
    "read_plan", "resume", "save_plan", "settings_of", "train",
]  # fmt: skip


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
    run = create_run(run_dir, job.name, job)
    with locked(run) as lock:
        try:
            return Launch(run, job, plan, home).to_end(watcher, lock)
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
    if run.program.exists():
        raise RunError(
            f"{run.path} is a program's, which only itself knows how to resume; `slipstream submit` it again"
        )
    job = load_job(run.job, ["layout={}", *settings] if settings else ())
    with locked(run) as lock:
        result = read_result(run)
        if result and result.status == "finished":
            raise RunError(f"{run.path} is finished; `slipstream show {run.path}` shows it")
        run.mend()
        spent, home = run.seconds_spent(), _home(run)
        refuse_if_spent(run, job, spent)
        before = read_plan(run)
        plan = plan_here(job, workers or (before.layout.workers if before and _is_of(job, before) else None), before)
        if settings:
            write_yaml(run.job, dump(job))
        prepare_data(job, watcher.say, home)
        checkpoint = rewind(run, watcher)
        return Launch(run, job, plan, home, checkpoint, spent).to_end(watcher, lock)


def _is_of(job: Job, before: Plan) -> bool:
    """Whether a plan has the axes that a job asks for: if not, its number of workers says nothing any more."""
    asked = {axis: getattr(job.layout, axis) for axis in SPOKEN}
    return all(size is None or size == getattr(before.layout, axis) for axis, size in asked.items())


def create_run(run_dir: str | Path | None, name: str, job: Job | None) -> RunFolder:
    """The folder asked for, or the next free one under `runs`, which another launch may take at the same moment."""
    while run_dir is None:
        path = new_run_path(RUNS, name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        run_dir = path
    return RunFolder.create(Path(run_dir), dump(job) if job else None)


def _home(run: RunFolder) -> str:
    """The folder the run was first started from: the user's own modules are found there."""
    return next((event["folder"] for event in read_lines(run.events) if event["event"] == "launch"), str(Path.cwd()))
