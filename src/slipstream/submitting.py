"""The door to fleets: send a job there, and ask after it. What came of it is in its run folder, as always."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from slipstream.api import create_run
from slipstream.data.importing import import_target
from slipstream.fleet.base import Fleet, FleetError, Order, Rents, Room, Status
from slipstream.fleet.failure import WORKER_FAILED
from slipstream.fleet.fleets import open_fleet
from slipstream.fleet.luggage import pack
from slipstream.fleet.mirror import Mirror
from slipstream.fleet.programs import Program, check_script, mpirun
from slipstream.job import Job, load_job, locate
from slipstream.job.data import ImportData
from slipstream.job.file import check_machines
from slipstream.job.machines import Machines
from slipstream.job.models import ImportModel
from slipstream.plan import Machine, this_machine
from slipstream.plan.renting import Rent, read_rent
from slipstream.planning import RUNS, LateRefusal, machines_wanted, plan_here, plan_there, settings_of
from slipstream.runs import RunError, RunFolder, find_runs, new_run_path, read_lines, write_text, write_yaml
from slipstream.runs.result import read_result


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


_ASKED = ("cores", "gpus", "seconds", "offer", "kind", "where", "price")


@dataclass(frozen=True)
class Prepared:
    """What is ready to be sent."""

    on: str
    """The name of the fleet."""
    fleet: Fleet
    order: Order
    name: str
    workers: int
    job: Job | None
    fill: Callable[[RunFolder], None]
    """Puts into the new run's folder what its agents need."""


def send(ready: Prepared, run_dir: str | Path | None = None) -> RunFolder:
    """Send it to its fleet, and return when it is there. Raises FleetError or RunError; then nothing is left.

    Without `run_dir` the run gets the next free folder, which may be another than when it was prepared.
    """
    run = create_run(run_dir, ready.name, ready.job)
    order = _placed(ready.order, run.path.resolve())
    try:
        ready.fill(run)
        with _stored(run, order.store):
            known = ready.fleet.launch(order)
    except BaseException:
        shutil.rmtree(run.path)
        with suppress(OSError):  # other runs are in it
            RUNS.rmdir()
        raise
    _leave_record(run, ready.on, known, order, ready.workers)
    return run


def _leave_record(run: RunFolder, on: str, known: str, order: Order, workers: int) -> None:
    settings, asked = order.settings.model_dump(mode="json"), {name: getattr(order, name) for name in _ASKED}
    record = Submission(on, known, order.machines, workers, time.time(), settings, order.store, asked)
    write_text(run.submission, json.dumps(asdict(record), indent=2) + "\n")


def prepare_again(run: RunFolder, on: str) -> tuple[Fleet, Order]:
    """What the fleet of a run must do to go on with it. Raises RunError if there is nothing to go on with."""
    record = _record(run)
    if record.fleet != on:
        raise RunError(f"{run.path} was on {record.fleet}, and goes on there: --on {record.fleet}")
    if run.program.exists():
        raise RunError(f"{run.path} is a program's, and only that knows how to go on; `slipstream submit` it again")
    if not is_over(run):
        raise RunError(f"{run.path} is still {standing_of(run, '')}; `slipstream attach {run.path}` watches it")
    result = read_result(run)
    if result and result.status == "finished":
        raise RunError(f"{run.path} is finished; `slipstream show {run.path}` shows it")
    settings = Machines.model_validate(record.settings)
    order = Order(run.path.resolve(), record.machines, settings=settings, store=record.store, **record.asked)
    fleet = open_fleet(on, settings)
    fleet.validate(order)
    return fleet, order


def refuse_if_away(run: RunFolder) -> None:
    """What a fleet still has, or what is in object storage, does not go on in this terminal."""
    record = read_submission(run)
    if record and record.store:
        raise RunError(f"{run.path} is at {record.store}; `slipstream resume {run.path} --on {record.fleet}` goes on")
    if record and not is_over(run):
        raise RunError(f"{run.path} is still on {record.fleet}; `slipstream stop {run.path}` ends that")


def send_again(run: RunFolder, on: str, fleet: Fleet, order: Order) -> None:
    """Have it go on, from its newest checkpoint."""
    workers = _record(run).workers
    _leave_record(run, on, fleet.launch(order), order, workers)


def _placed(order: Order, run: Path) -> Order:
    """For this folder, and where machines share no disk for the address of the same name."""
    store = order.settings.store
    return replace(order, run=run, store=f"{store.rstrip('/')}/{run.name}" if store else None)


@contextmanager
def _stored(run: RunFolder, store: str | None) -> Iterator[None]:
    """With the run's folder in object storage, if it belongs there; unless the block fails."""
    if store is None:
        yield
        return
    mirror = Mirror(run, store)
    mirror.refuse_if_taken()
    try:
        mirror.push()
        yield
    except BaseException:
        mirror.remove()
        raise


def prepare(
    job: str | Path,
    on: str,
    *,
    settings: Sequence[str] = (),
    plan: Path | None = None,
    machines: int | None = None,
    workers: int | None = None,
    run_dir: str | Path | None = None,
) -> Prepared:
    """Plan a job for a fleet and have the fleet look at it, but send nothing."""
    wishes = [*settings, *(settings_of(plan, anywhere=True) if plan else [])]
    saved: dict[str, Any] = yaml.safe_load(plan.read_text()) if plan else {}
    loaded = load_job(job, wishes)
    fleet = open_fleet(on, loaded.machines)
    said = machines or loaded.machines.count or saved.get("machines")
    found = _Found(this_machine()) if on == "local" else _find(fleet, loaded, plan, saved, said or 1)
    free = loaded.layout.auto and not workers and found.free
    count = said or (machines_wanted(loaded, found.machine, found.free) if free else 1)
    try:
        _import_own_code(loaded)
        here = on == "local"
        planned = plan_here(loaded, workers, None) if here else plan_there(loaded, found.machine, count, workers)
    except LateRefusal as error:
        raise locate(error, job, settings) from error
    if found.rent and loaded.machines.price_per_hour is None:
        loaded = _priced(loaded, found.rent.price)
    each = -(-planned.layout.workers // count)
    order = Order(
        run=_folder(run_dir, loaded.name),
        machines=count,
        cores=each * planned.threads,
        gpus=each if planned.device == "cuda" else 0,
        settings=loaded.machines,
        seconds=loaded.limits.deadline,
        offer=saved.get("offer") or {},
        kind=found.machine.gpus[0] if on != "local" and planned.device == "cuda" else "",
        where=found.where,
        price=str(found.rent) if found.rent else None,
    )
    order = _placed(order, order.run)
    _refuse_store(on, order)
    fleet.validate(order)

    def fill(run: RunFolder) -> None:
        write_yaml(run.plan, planned.model_dump(mode="json"))
        if _has_own_code(loaded):
            pack(Path.cwd(), run.code)

    return Prepared(on, fleet, order, loaded.name, planned.layout.workers, loaded, fill)


def prepare_program(
    script: Path,
    args: Sequence[str],
    on: str,
    *,
    settings: Sequence[str] = (),
    machines: int | None = None,
    workers: int | None = None,
    mpi: bool = False,
    run_dir: str | Path | None = None,
) -> Prepared:
    """Have a fleet look at somebody's program, but send nothing."""
    where = check_machines(settings)
    within = check_script(script, Path.cwd())
    fleet = open_fleet(on, where)
    count = machines or where.count or 1
    try:
        room = _best_room(fleet, where.device)
    except Rents as error:
        raise FleetError(
            f"{error}; a program has no plan that would say which: use a fleet that has machines"
        ) from error
    machine = room.machine
    total = workers or count * machine.room(where.device)
    if total % count:
        raise RunError(f"{total} workers cannot be shared out evenly to {count} machines")
    if mpi and count > 1:
        raise RunError("--mpi runs a program on one machine: mpirun of several needs a way to log in to them")
    if mpi and on == "local":
        mpirun()
    each = total // count
    cores = each * max(1, machine.cores // each) if not machine.gpus else min(machine.cores, each)
    gpus = each if machine.gpus and where.device != "cpu" else 0
    kind, folder = machine.gpus[0] if gpus else "", _folder(run_dir, script.stem)
    order = Order(folder, count, min(cores, machine.cores), gpus, where, kind=kind, where=room.where)
    order = _placed(order, order.run)
    _refuse_store(on, order)
    fleet.validate(order)
    program = Program(within, list(args), total, count, mpi)

    def fill(run: RunFolder) -> None:
        program.save(run)
        pack(Path.cwd(), run.code)

    return Prepared(on, fleet, order, script.stem, total, None, fill)


def _refuse_store(on: str, order: Order) -> None:
    if order.store and on in ("slurm", "ray"):
        raise RunError(f"machines.store has no effect on {on}, whose machines share a disk; remove it")


def _folder(run_dir: str | Path | None, name: str) -> Path:
    if run_dir:
        RunFolder(run_dir).refuse_if_taken()
    return (Path(run_dir) if run_dir else new_run_path(RUNS, name)).resolve()


@dataclass(frozen=True)
class _Found:
    """The kind of machine that a job will run on."""

    machine: Machine
    free: int = 1
    """How many of them there are now."""
    where: str = ""
    rent: Rent | None = None
    """Where it is rented."""


def _find(fleet: Fleet, job: Job, plan: Path | None, saved: dict[str, Any], machines: int) -> _Found:
    """The best that a fleet has; of one that rents, what the saved plan names."""
    try:
        room = _best_room(fleet, job.machines.device)
        return _Found(room.machine, room.machines, room.where)
    except Rents as error:
        if plan is None:
            raise FleetError(
                f"{error}; choose them first: `slipstream plan JOB --save plan.yaml`, then submit with --plan plan.yaml"
            ) from error
    try:
        rent = read_rent(saved, machines)
    except ValueError as error:
        raise RunError(f"{plan}: {error}") from error
    return _Found(rent.machine, rent=rent)


def _best_room(fleet: Fleet, device: str) -> Room:
    """Machines of one kind: those of which most can be had now, else at all; those with GPUs first."""
    rooms = fleet.capacity() or fleet.capacity(whole=True)
    if not rooms:
        raise FleetError("there are no machines in this fleet")
    return max(rooms, key=lambda room: (bool(room.machine.gpus), room.machines * room.machine.room(device)))


def _priced(job: Job, dollars: float) -> Job:
    """What is rented has a price, which the run shows and the budget is held against."""
    return job.model_copy(update={"machines": job.machines.model_copy(update={"price_per_hour": dollars})})


def _has_own_code(job: Job) -> bool:
    return isinstance(job.model, ImportModel) or isinstance(job.data, ImportData)


def _import_own_code(job: Job) -> None:
    """What does not import here would not there, after a wait in a queue."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        for setting, section in (("model.import", job.model), ("data.import", job.data)):
            if isinstance(section, ImportModel | ImportData):
                import_target(section.target, setting)
    except ValueError as error:
        raise LateRefusal(job, str(error)) from error


def read_submission(run: RunFolder) -> Submission | None:
    """Where a run was sent, if it was."""
    try:
        return Submission(**json.loads(run.submission.read_text()))
    except FileNotFoundError:
        return None


def submitted(root: Path = RUNS) -> list[tuple[RunFolder, Submission]]:
    """All runs that were sent to a fleet, oldest first."""
    return [(run, record) for run in find_runs(root) if (record := read_submission(run))]


def refresh(run: RunFolder, at_once: bool = True) -> RunFolder:
    """Bring this machine's copy of a run in object storage up to date; if not `at_once`, now and then."""
    record = read_submission(run)
    if record and record.store:
        mirror, last = _MIRRORS.get(record.store) or (Mirror(run, record.store), 0.0)
        if at_once or time.monotonic() - last > _SOME:
            mirror.pull()
            _MIRRORS[record.store] = mirror, time.monotonic()
    return run


_SOME = 2.0
_MIRRORS: dict[str, tuple[Mirror, float]] = {}


def status_of(run: RunFolder) -> Status:
    """What the fleet says of a run. An engine that others use too is not asked all the time by who waits."""
    record = _record(run)
    asked, said = _ANSWERS.get((record.fleet, record.id), (-_SELDOM, None))
    if said is None or time.monotonic() - asked >= _SELDOM or record.fleet == "local":
        said = _fleet_of(record).status(record.id)
        _ANSWERS[record.fleet, record.id] = time.monotonic(), said
    return said


_SELDOM = 1.0
_ANSWERS: dict[tuple[str, str], tuple[float, Status]] = {}


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
    ends = [event for event in read_lines(run.events) if event["event"] in ("failure", "refused")]
    if not ends:
        return (
            f"{run.path} ended without a word{_engine_says(run)}\n`slipstream logs {run.path}` shows more",
            WORKER_FAILED,
        )
    last = ends[-1]
    return f"{last['text']}\n`slipstream logs {run.path}` shows more", last["code"]


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
    record = _record(run)
    fleet = _fleet_of(record)
    if fleet.status(record.id).state == "ended":
        raise RunError(f"{run.path} is not running: nothing to stop")
    fleet.stop(record.id)
    if record.store:
        Mirror(run, record.store).pass_on_wish()


def _record(run: RunFolder) -> Submission:
    record = read_submission(run)
    if record is None:
        raise RunError(f"{run.path} was not submitted to a fleet; whoever started it with `train` has it")
    return record


def _fleet_of(record: Submission) -> Fleet:
    return open_fleet(record.fleet, Machines.model_validate(record.settings))


def capacity(on: str, job: str | Path | None = None) -> Sequence[Room]:
    """What a fleet can give now."""
    return open_fleet(on, load_job(job).machines if job else Machines()).capacity()
