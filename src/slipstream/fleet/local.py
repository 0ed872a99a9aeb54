"""The fleet `local`: this machine, beside the terminal."""

import os
import signal
import subprocess
from pathlib import Path

from slipstream.fleet.base import FleetError, Order, Room, Status
from slipstream.job.machines import Machines
from slipstream.plan import this_machine
from slipstream.runs import RunFolder
from slipstream.runs.folder import LAUNCHER_LOG


class LocalFleet:
    """One machine. A submission is the number of its agent's process, and when that began: numbers come again."""

    def __init__(self, settings: Machines) -> None:
        self._settings = settings

    def validate(self, order: Order) -> None:
        if order.machines != 1:
            raise FleetError(f"{order.machines} machines are asked for, and the fleet local is this one alone")

    def capacity(self, whole: bool = False) -> list[Room]:  # noqa: ARG002
        return [Room(1, this_machine())]

    def render(self, order: Order) -> str:
        return f"{order.written()}\n"

    def launch(self, order: Order) -> str:
        return launch_here(order.run, order.command())

    def status(self, submission: str) -> Status:
        return Status("running") if _process(submission) else Status("ended")

    def logs(self, submission: str) -> str:  # noqa: ARG002
        return ""  # all of it is in the run's folder

    def stop(self, submission: str) -> None:
        process = _process(submission)
        if process is None:
            raise FleetError("it is not running")
        os.kill(process, signal.SIGTERM)


def launch_here(folder: Path, command: list[str]) -> str:
    """Start a process that goes on when the terminal closes; what it says goes to the run's log."""
    with (RunFolder(folder).logs / LAUNCHER_LOG).open("ab") as log:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    return f"{started.pid}@{_began(started.pid)}"


def _process(submission: str) -> int | None:
    """The number of its process while it lives."""
    number, _, began = submission.partition("@")
    return int(number) if began and _began(int(number)) == began else None


def _began(process: int) -> str | None:
    """When a process was started, as the system counts; None if there is none, or it only waits to be buried."""
    try:
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc").is_dir():
            return None
        asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(process)], capture_output=True, text=True, check=False)
        return asked.stdout.strip() or None
    return None if state == "Z" else rest[18]
