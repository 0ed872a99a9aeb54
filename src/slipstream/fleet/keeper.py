"""One machine's agent as a child of a process that an engine may end at any time: when that goes, so does the agent."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

from slipstream.data.storage import is_remote
from slipstream.fleet.line import free_ports
from slipstream.runs import RunFolder
from slipstream.runs.folder import LAUNCHER_LOG

_GRACE = 3.0
"""Seconds in which an agent may put away what it has made."""


class Keeper:
    """Runs the agent of one machine. `stop` may be called from another thread."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._asked = False
        self._lock = threading.Lock()

    def look(self, run: str, address: str) -> tuple[int, str]:
        """A port that is free at this machine's address; and what is wrong here, if anything is."""
        if not is_remote(run) and not RunFolder(run).logs.is_dir():
            return 0, (
                f"{run} is not there: the run's folder must be on a disk that all machines share, or in object storage "
                "(machines.store)"
            )
        try:
            return free_ports(address, 1)[0], ""
        except OSError as error:
            return 0, f"nothing can listen at {address}: {error.strerror}"

    def keep(self, run: str, environment: dict[str, str], log: str = LAUNCHER_LOG) -> int:
        """Run the agent to its end, and return its exit code. What it says goes into the run's folder, or where that is
        far away to whoever reads this process."""
        folder = None if is_remote(run) else RunFolder(run)
        with self._lock, (folder.logs / log).open("ab") if folder else nullcontext() as file:
            if self._asked:
                return -signal.SIGTERM
            self._agent = subprocess.Popen(
                [sys.executable, "-P", "-m", "slipstream", "agent", run, "--tied"],
                stdin=subprocess.PIPE,  # held by this process alone
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=folder.path if folder else None,
                env=_own(dict(os.environ)) | environment,
            )
        return self._agent.wait()

    def stop(self) -> None:
        """Ask for a checkpoint and a stop."""
        with self._lock:
            self._asked = True
            if self._agent and self._agent.poll() is None:
                self._agent.send_signal(signal.SIGTERM)


def _own(environment: dict[str, str]) -> dict[str, str]:
    """Without what an engine has set for its own processes: the plan says how many threads a worker has."""
    return {name: value for name, value in environment.items() if name != "OMP_NUM_THREADS"}


def end_with_input() -> None:
    """Have this process, an agent, end when its standard input does, which its keeper holds."""
    threading.Thread(target=_end_with_input, daemon=True).start()


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    for _ in range(2):  # as when a person asks twice: at once, but everything is put away
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    time.sleep(_GRACE)
    os._exit(1)
