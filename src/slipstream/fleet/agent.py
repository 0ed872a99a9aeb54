"""What a fleet starts on every machine: one agent each, which runs its part of a run to the end.

The first machine's agent is the head: it waits for the other machines, takes the run, says what they all must know,
and then watches over every rank as if it were its own. The others do what it says and end when it is gone.
"""

import os
import signal
import sys
import threading
import time

from slipstream.fleet.crew import Crew
from slipstream.fleet.failure import WORKER_FAILED
from slipstream.fleet.far import CrewThere, follow
from slipstream.fleet.launch import Company, Silence, Watcher, locked
from slipstream.fleet.line import Line, LineLost, Message, free_ports
from slipstream.fleet.place import Apart, Place, own_address
from slipstream.fleet.programs import ProgramWork
from slipstream.fleet.scratch import Scratch
from slipstream.fleet.work import JobWork, Work, gloo_at, home_of
from slipstream.runs import RunError, RunFolder, read_lines
from slipstream.runs.result import Result, read_result
from slipstream.version import VERSION

COUNTED = "JOB_COMPLETION_INDEX"
"""Kubernetes counts the machines that have ended well, and does not start one of them again."""
_WRITING, _TICK = 10.0, 0.1
_SELDOM = 2.0


class Attentive(Silence):
    """Says it to the log, and does what is wished in the run's folder or by whoever runs this machine."""

    def __init__(self, run: RunFolder, warned: threading.Event) -> None:
        self._run, self._looked = run, 0.0
        self._warned, self._heard = warned, False

    def say(self, text: str) -> None:
        print(text, flush=True)

    def tick(self) -> None:
        if time.monotonic() - self._looked > _SELDOM:  # the folder may be far away
            self._looked = time.monotonic()
            if self._run.heard_to_stop():
                _save_and_end()
        if self._warned.is_set() and not self._heard:
            self._heard = True
            _save_and_end()


def hear_warning() -> threading.Event:
    """From now on a scheduler's signal that a time limit is near sets this."""
    warned = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: warned.set())
    return warned


def _save_and_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def run_agent(run: RunFolder, watcher: Watcher) -> Result | None:
    """This machine's part of a run, from its newest checkpoint or the start. Its result, on the head of a job."""
    home = home_of(run)
    sys.path.insert(0, home)
    work: Work = ProgramWork.of(run, home) if run.program.exists() else JobWork.of(run, home)
    place = Place.of(work.machines, run.path)
    if place.machine:
        asked = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda *_: asked.set())  # the head says what is to be done
        _follow(run, work, place, watcher, asked)
        return None
    try:
        return _lead(run, work, place, watcher)
    except ValueError as error:
        run.event("refused", text=str(error), code=exit_code(error))  # for whoever is not at this machine
        raise


def exit_code(error: ValueError) -> int:
    """Of an agent that gives up: to start all machines again may help, or not."""
    return WORKER_FAILED if isinstance(error, Apart) else 2


def _lead(run: RunFolder, work: Work, place: Place, watcher: Watcher) -> Result | None:
    lines = place.gather(work.patience, watcher.say)
    try:
        with locked(run) as lock:
            work.prepare(watcher)
            company = _company(work, lines) if lines else None
            try:
                return work.lead(company, watcher, lock)
            finally:
                for crew in set(company.far.values()) if company else ():
                    crew.close()  # also where there was nothing left to do
    finally:
        for line, _ in lines:
            line.close()


def _company(work: Work, lines: list[tuple[Line, Message]]) -> Company:
    """All ranks, and what they must know of each other."""
    for number, (_, hello) in enumerate(lines, 1):
        if hello["version"] != VERSION:
            raise RunError(f"machine {number} has slipstream {hello['version']}, and the first one {VERSION}")
    here = own_address()
    addresses = [(here, free_ports(here, work.ports_on(0))), *((each["address"], each["ports"]) for _, each in lines)]
    meeting = work.meeting(addresses)
    far: dict[int, Crew] = {}
    for number, (line, _) in enumerate(lines, 1):
        line.say({"begin": meeting})
        far |= dict.fromkeys(work.ranks_on(number), CrewThere(line, str(number)))
    return Company(work.ranks_on(0), far, meeting | gloo_at(here))


def _follow(run: RunFolder, work: Work, place: Place, watcher: Watcher, asked: threading.Event) -> None:
    work.prepare(watcher)
    ports = free_ports("0.0.0.0", work.ports_on(place.machine))
    line = place.join(work.patience, version=VERSION, ports=ports)
    meeting = _hear_beginning(line, work.patience)
    scratch = Scratch.create()
    try:
        follow(line, work.crew(meeting, line.here, scratch), run.checkpoints, asked)
    except LineLost as error:
        raise Apart(f"the first machine is gone: {error}") from error
    finally:
        scratch.remove()
    if COUNTED in os.environ and not _finished(run):
        raise Apart("the run has not come to its end: this machine is to be started again with the others")


def _finished(run: RunFolder) -> bool:
    """Whether it has come to its end; the first machine may be about to write it down."""
    until = time.monotonic() + _WRITING
    while time.monotonic() < until:
        last = next((event["event"] for event in reversed(list(read_lines(run.events)))), None)
        result = read_result(run)
        if (result and result.status == "finished") or last == "finished":
            return True
        if last in ("failure", "stopped", "refused"):
            return False
        time.sleep(_TICK)
    return False


def _hear_beginning(line: Line, patience: float) -> dict[str, str]:
    """What the head says when all machines are there."""
    try:
        said = line.hear_one(patience)
    except LineLost as error:
        raise Apart(f"the first machine has given up: {error}") from error
    if said is None:
        raise Apart(f"the first machine has not begun in {patience:.0f} s")
    meeting: dict[str, str] = said["begin"]
    return meeting
