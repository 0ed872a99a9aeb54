"""Runs that were sent to a fleet: where they went, how they stand there, and what came of them."""

import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.fleet.base import Fleet, FleetError, Status
from slipstream.fleet.failure import EARLY, INTERRUPTED, WORKER_FAILED
from slipstream.fleet.fleets import open_fleet
from slipstream.fleet.mirror import SOON, Mirror
from slipstream.job.machines import Machines
from slipstream.planning import RUNS
from slipstream.runs import RunError, RunFolder, find_runs, read_lines


@dataclass(frozen=True)
class Submission:
    """What is kept of one: where it went, and by which name it is known there."""

    fleet: str
    id: str
    machines: int
    workers: int
    time: float
    settings: dict[str, Any]
    """How the fleet was to be reached: the section `machines` of the job file."""
    store: str | None = None
    """Where in object storage the run's folder is; then the one here is a copy."""
    asked: dict[str, Any] = field(default_factory=dict)
    """What else was asked of the fleet, as in `Order`."""


def read_submission(run: RunFolder) -> Submission | None:
    """Where a run was sent, if it was."""
    try:
        return Submission(**json.loads(run.submission.read_text()))
    except FileNotFoundError:
        return None


def record_of(run: RunFolder) -> Submission:
    """Where it was sent. Raises RunError if it was not."""
    record = read_submission(run)
    if record is None:
        raise RunError(f"{run.path} was not submitted to a fleet; whoever started it with `train` has it")
    return record


def submitted(root: Path = RUNS) -> list[tuple[RunFolder, Submission]]:
    """All runs that were sent to a fleet, oldest first."""
    return [(run, record) for run in find_runs(root) if (record := read_submission(run))]


def refresh(run: RunFolder, at_once: bool = True) -> RunFolder:
    """Bring this machine's copy of a run in object storage up to date; if not `at_once`, now and then."""
    record = read_submission(run)
    if record and record.store:
        mirror, last = _MIRRORS.get(record.store) or (Mirror(run, record.store, patience=SOON), 0.0)
        if at_once or time.monotonic() - last > _SOME:
            mirror.pull()
            _MIRRORS[record.store] = mirror, time.monotonic()
    return run


_SOME = 2.0
_MIRRORS: dict[str, tuple[Mirror, float]] = {}


def status_of(run: RunFolder) -> Status:
    """What the fleet says of a run. An engine that others use too is not asked all the time by who waits."""
    record = record_of(run)
    asked, said = _ANSWERS.get((record.fleet, record.id), (-_SELDOM, None))
    if said is None or time.monotonic() - asked >= _SELDOM or record.fleet == "local":
        said = _ask(record)
        _ANSWERS[record.fleet, record.id] = time.monotonic(), said
    return said


def _ask(record: Submission) -> Status:
    """An engine that has just not answered is not asked again for each of its runs."""
    engine = record.fleet, record.id.partition("@")[2]
    since, error = _SILENT.get(engine, (-math.inf, FleetError()))
    if time.monotonic() - since < _REST:
        raise error
    try:
        return _fleet_of(record).status(record.id)
    except FleetError as silence:
        _SILENT[engine] = time.monotonic(), silence
        raise


_SELDOM, _REST = 1.0, 5.0
"""Seconds after an answer, and after none, until an engine is asked again."""
_ANSWERS: dict[tuple[str, str], tuple[float, Status]] = {}
_SILENT: dict[tuple[str, str], tuple[float, FleetError]] = {}


def is_over(run: RunFolder) -> bool:
    """Whether nothing of a run is under way any more, here or on its fleet; if so, its folder here is up to date."""
    if run.is_running:
        return False
    over = read_submission(run) is None or status_of(run).state == "ended"
    refresh(run, at_once=over)
    return over


def standing_of(run: RunFolder, in_folder: str) -> str:
    """How a run stands: what its folder says once it has ended, before that what the fleet says."""
    if in_folder in ("finished", "running"):
        return in_folder
    try:
        status = status_of(run)
    except FleetError as error:
        return f"unknown: {error}"
    if status.state == "ended":
        return in_folder
    return f"{status.state} ({status.detail})" if status.state == "queued" and status.detail else status.state


def last_words(run: RunFolder) -> tuple[str, int]:
    """Why a run ended without a result, and the exit code for it."""
    ends = _ends(run)
    if not ends:
        return (
            f"{run.path} ended without a word{_engine_says(run)}\n`slipstream logs {run.path}` shows more",
            WORKER_FAILED,
        )
    last = ends[-1]
    return f"{last['text']}\n`slipstream logs {run.path}` shows more", last["code"]


def _ends(run: RunFolder) -> list[dict[str, Any]]:
    """Why it ended since it was last sent and started."""
    record, found = read_submission(run), list[dict[str, Any]]()
    for event in read_lines(run.events):
        if event["event"] == "launch":
            found.clear()
        if "code" in event and (record is None or event["time"] > record.time - _CLOCKS):
            found.append(event)
    return found


_CLOCKS = 5.0
"""Seconds by which the clocks of machines may differ."""


def _engine_says(run: RunFolder) -> str:
    record = read_submission(run)
    if record is None:
        return ""
    with suppress(FleetError):
        if detail := status_of(run).detail:
            return f"; {record.fleet} says: {detail}"
    return ""


def engine_log(run: RunFolder) -> tuple[str, str]:
    """The name of a run's fleet, if it was sent to one, and what that has kept of its output. Raises FleetError."""
    record = read_submission(run)
    return (record.fleet, _fleet_of(record).logs(record.id)) if record else ("", "")


def stop(run: RunFolder) -> None:
    """Ask the fleet to stop a run, with a checkpoint."""
    record = record_of(run)
    fleet = _fleet_of(record)
    before = fleet.status(record.id).state
    if before == "ended":
        raise RunError(f"{run.path} is not running: nothing to stop")
    fleet.stop(record.id)
    if before == "queued" and not run.events.exists():
        run.event("stopped", text=EARLY, code=INTERRUPTED)
    if record.store:
        Mirror(run, record.store).pass_on_wish()


def _fleet_of(record: Submission) -> Fleet:
    return open_fleet(record.fleet, Machines.model_validate(record.settings))
