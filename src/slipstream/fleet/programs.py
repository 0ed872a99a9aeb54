"""Other people's programs: any script, with the environment that its framework expects."""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slipstream.fleet import guard
from slipstream.fleet.crew import CrewHere, Process
from slipstream.fleet.failure import PROGRAM, Failure, summarise
from slipstream.fleet.launch import Company, Watcher, interruptible
from slipstream.fleet.line import free_ports
from slipstream.fleet.scratch import Scratch
from slipstream.fleet.watch import Watch, WorkersFailed
from slipstream.fleet.work import Addresses, gloo_at, written
from slipstream.runs import RunError, RunFolder, write_text

_PATIENCE = 900.0
_ADDRESSES = "SLIPSTREAM_ADDRESSES"
"""`host:port` of every rank."""
_LAST_LINES, _LAST_BYTES = 25, 2**16
"""Of a log, in a report."""
_NEAR = 100
"""Lines at the end of a log in which an exception is what ended the program: libraries may say more after it."""
_TRACEBACK, _RANK = "Traceback (most recent call last):", re.compile(r"^\[rank\d+\]: ")


@dataclass(frozen=True)
class Program:
    """What is run: as many times as there are workers, or once by mpirun."""

    script: str
    """Within the run's code."""
    args: list[str]
    workers: int
    machines: int
    mpi: bool = False

    def save(self, run: RunFolder) -> None:
        """Leave it in a run's folder."""
        write_text(run.program, json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class ProgramWork:
    """A program, as the agents see it."""

    run: RunFolder
    program: Program
    home: str
    patience: float = _PATIENCE
    logged: dict[int, int] = field(default_factory=dict)
    """Bytes that each rank's log had when it was started here: of launches before."""

    @classmethod
    def of(cls, run: RunFolder, home: str) -> "ProgramWork":
        """As its folder has it."""
        try:
            return cls(run, Program(**json.loads(run.program.read_text())), home)
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{run.program} cannot be read: {error}") from error

    @property
    def machines(self) -> int:
        return self.program.machines

    @property
    def _each(self) -> int:
        return self.program.workers // self.machines

    def ranks_on(self, machine: int) -> tuple[int, ...]:
        if self.program.mpi:
            return (0,)  # mpirun makes the others
        return tuple(range(machine * self._each, (machine + 1) * self._each))

    def ports_on(self, machine: int) -> int:
        """One for each rank, at which TensorFlow listens; on the head two more, for torch and JAX."""
        return self._each + 2 * (machine == 0)

    def prepare(self, watcher: Watcher) -> None:
        """Nothing."""

    def meeting(self, addresses: Addresses) -> dict[str, str]:
        (head, (door, coordinator, *ports)), *others = addresses
        ranks = [f"{written(host)}:{port}" for host, free in [(head, ports), *others] for port in free]
        return {
            "MASTER_ADDR": head,
            "MASTER_PORT": str(door),
            "JAX_COORDINATOR_ADDRESS": f"{written(head)}:{coordinator}",
            _ADDRESSES: ",".join(ranks),
        }

    def crew(self, meeting: dict[str, str], here: str, scratch: Scratch) -> CrewHere:
        return self._crew(meeting | gloo_at(here), scratch, [])

    def _crew(self, told: dict[str, str], scratch: Scratch, hold: list[int]) -> CrewHere:
        seats = self.program.workers
        return CrewHere(
            lambda ranks, _: [self._process(rank, told) for rank in ranks], seats, scratch, hold, self._tell
        )

    def _process(self, rank: int, meeting: dict[str, str]) -> Process:
        program, log = self.program, self._log(rank)
        self.logged[rank] = log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-u", program.script, *program.args]
        if program.mpi:
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            command = [mpirun(), *root, "--oversubscribe", "-n", str(program.workers), *command]
        return Process(
            (rank,),
            [sys.executable, "-I", guard.__file__, *command],
            self._environment(rank, meeting),
            log,
            folder=self.home,
        )

    def _environment(self, rank: int, meeting: dict[str, str]) -> dict[str, str]:
        size, local = self.program.workers, rank % self._each
        path = os.pathsep.join(filter(None, [self.home, os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "SLIPSTREAM_RUN": str(self.run.path)}
        if self.program.mpi:  # which tells its ranks itself who they are
            return {**os.environ, **own}
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **own,
            **meeting,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self._each),
            "GROUP_RANK": str(rank // self._each),
            "NODE_RANK": str(rank // self._each),
            "JAX_NUM_PROCESSES": str(size),
            "JAX_PROCESS_ID": str(rank),
            "TF_CONFIG": _tensorflow(rank, meeting[_ADDRESSES].split(",")),
        }

    def lead(self, company: Company | None, watcher: Watcher, lock: int) -> None:
        run, scratch, company = self.run, Scratch.create(), company or self._alone()
        run.event("launch", spent=0.0, scratch=str(scratch.path), workers=self.program.workers, folder=self.home)
        try:
            crew = self._crew(dict(company.meeting), scratch, [lock])
            watch = Watch(run, scratch, {**dict.fromkeys(company.own, crew), **company.far}, range(0))
            with interruptible(watch, watcher, "the program is asked to end; once more to end it at once", firm=True):
                watch.run_to_end(None, None, watcher.tick)
        except KeyboardInterrupt:
            run.event("stopped", reason="interrupted")
            raise
        except WorkersFailed as error:
            failure = self._explained(error.failure)
            run.event("failure", rank=failure.rank, text=summarise(failure), code=failure.exit_code)
            raise WorkersFailed(failure, run, {}) from error
        finally:
            scratch.remove()
        run.event("finished")

    def _alone(self) -> Company:
        here = "127.0.0.1"
        meeting = self.meeting([(here, free_ports(here, self.ports_on(0)))])
        return Company(self.ranks_on(0), {}, meeting | gloo_at(here))

    def _explained(self, failure: Failure) -> Failure:
        """One that was killed, with the last of what the program has said."""
        if failure.error != "killed":
            return replace(failure, phase=PROGRAM)
        message = failure.message.replace("the worker", self.program.script)
        said = "\n".join(self._said(failure.rank)[-_LAST_LINES:])
        return replace(failure, phase=PROGRAM, error="ended", message=message, trace=said)

    def _tell(self, rank: int, code: int) -> Failure | None:
        """The exception that a rank ended with, by its log, or that it ended; nothing if it was killed. (With torch's
        process group at work the interpreter may abort instead of ending, after it has said so.)"""
        said = self._said(rank)
        raised = last_exception(said) if code in (1, -signal.SIGABRT) else None
        if raised is None and code < 0:
            return None
        error, message = raised or ("ended", f"{self.program.script} ended by itself with exit code {code}")
        time = self._log(rank).stat().st_mtime
        return Failure(rank, 0, PROGRAM, error, message, "\n".join(said[-_LAST_LINES:]), time)

    def _said(self, rank: int) -> list[str]:
        """The end of its log, of this launch."""
        if not self._log(rank).exists():
            return []
        with self._log(rank).open("rb") as log:
            log.seek(max(self.logged.get(rank, 0), log.seek(0, os.SEEK_END) - _LAST_BYTES))
            return log.read().decode(errors="replace").splitlines()

    def _log(self, rank: int) -> Path:
        return self.run.logs / f"rank-{rank}.log"


def last_exception(lines: Sequence[str]) -> tuple[str, str] | None:
    """Name and message of the last one that Python has written near the end of some lines, if any, but for those that
    it ignored. torch writes the number of the rank before each line."""
    bare = [_RANK.sub("", line) for line in lines]
    begins = [place for place, line in enumerate(bare) if line == _TRACEBACK]
    heeded = [place for place in begins if not (place and bare[place - 1].startswith("Exception ignored"))]
    after = range(heeded[-1] + 1, len(bare)) if heeded else ()
    end = next((place for place in after if bare[place] and not bare[place][0].isspace()), None)
    if end is None or end < len(bare) - _NEAR:
        return None
    name, _, message = bare[end].partition(": ")
    return name.rpartition(".")[2], message


def _tensorflow(rank: int, addresses: Sequence[str]) -> str:
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def mpirun() -> str:
    """Where it is. Raises RunError."""
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    if not found:
        raise RunError("mpirun was not found: install an MPI, such as Debian's openmpi-bin")
    return found


def check_script(script: Path, home: Path) -> str:
    """Its path within the folder that travels. Raises RunError if it is not there, or no Python."""
    try:
        within = script.resolve().relative_to(home.resolve())
        compile(script.read_text(), str(script), "exec")
    except ValueError:
        raise RunError(
            f"{script} is not below {home}, which travels with it; submit from a folder that holds it"
        ) from None
    except SyntaxError as error:
        raise RunError(f"{script}:{error.lineno}: {error.msg}") from error
    return str(within)
