"""The door to fleets: plan a job for one, show what would be sent, and send it."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from slipstream.api import create_run
from slipstream.data.importing import import_target
from slipstream.data.storage import StorageGone
from slipstream.fleet.base import Fleet, FleetError, Order, Rents, Room
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
from slipstream.runs import RunError, RunFolder, new_run_path, write_text, write_yaml
from slipstream.runs.result import read_result
from slipstream.submissions import Submission, is_over, read_submission, record_of, standing_of

_ASKED = ("cores", "gpus", "seconds", "offer", "kind", "where", "price", "attempt")


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
    record = record_of(run)
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
    order = replace(order, attempt=order.attempt + 1)
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
    workers = record_of(run).workers
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
    try:
        mirror.refuse_if_taken()
    except StorageGone as error:
        raise FleetError(f"machines.store: {error}; is the address right, and may you write there?") from error
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
    fleet.validate(order)
    program = Program(within, list(args), total, count, mpi)

    def fill(run: RunFolder) -> None:
        program.save(run)
        pack(Path.cwd(), run.code)

    return Prepared(on, fleet, order, script.stem, total, None, fill)


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


def capacity(on: str, job: str | Path | None = None) -> Sequence[Room]:
    """What a fleet can give now."""
    return open_fleet(on, load_job(job).machines if job else Machines()).capacity()
