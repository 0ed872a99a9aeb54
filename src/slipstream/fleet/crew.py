"""The ranks of a launch that are on this machine: their processes, what is known of each, and their end."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slipstream.fleet.failure import Failure, read_failure
from slipstream.fleet.scratch import Scratch
from slipstream.runs import Pulse, create_pulse, read_pulse

_TICK = 0.05
_GRACE = 2.0
"""Seconds that processes have to be gone after they were killed."""


@dataclass(frozen=True)
class Process:
    """One that is to be started, and the ranks that it is or forks into."""

    ranks: tuple[int, ...]
    command: list[str]
    environment: dict[str, str]
    log: Path
    folder: str | None = None
    """Where it is started, if that matters."""


@dataclass(frozen=True)
class State:
    """What is known of a rank."""

    code: int | None
    """How it ended; None while it runs."""
    failure: Failure | None
    """What it has left about it."""
    step: int
    phase: str
    still: float
    """Seconds since its last sign of life."""


class Crew(Protocol):
    """Some ranks of a launch, here or on another machine."""

    def start(self, ranks: Sequence[int], restore: Path | None) -> None:
        """Start these, again if they have ended."""
        ...

    def states(self) -> dict[int, State]:
        """Of all that were started."""
        ...

    def ask_to_stop(self) -> None:
        """Ask for a checkpoint and a stop."""
        ...

    def end(self, ranks: Sequence[int]) -> None:
        """Kill these, and return when they are gone."""
        ...

    def stacks(self) -> dict[int, str]:
        """Where each one is now."""
        ...

    def close(self) -> None:
        """Kill all that is left."""
        ...


Make = Callable[[Sequence[int], Path | None], list[Process]]
"""The processes for some ranks, which go on from a checkpoint or begin."""
Tell = Callable[[int, int], Failure | None]
"""What a rank that ended with an exit code has left about it, in another way than ours do."""


class CrewHere:
    """Ranks on this machine. `hold` are descriptors that all of their processes keep open."""

    def __init__(
        self, make: Make, seats: int, scratch: Scratch, hold: Sequence[int] = (), tell: Tell | None = None
    ) -> None:
        self._make, self._scratch = make, scratch
        self._tell = tell or (lambda rank, _: read_failure(scratch, rank))
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        """The process that each rank is, or is forked from; the leader of its process group."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._alive, self._held = os.pipe()  # processes hold one end: when all are gone, the other end says so
        self._pass_on = [*hold, self._held]
        create_pulse(scratch.pulse, seats)

    def start(self, ranks: Sequence[int], restore: Path | None) -> None:
        for rank in ranks:
            self._scratch.forget(rank)
            Pulse(self._scratch.pulse, rank).beat("start")
        for process in self._make(ranks, restore):
            self._start(process)

    def _start(self, process: Process) -> None:
        with process.log.open("ab") as log:
            host = subprocess.Popen(
                process.command,
                stdin=subprocess.PIPE,  # its end tells the workers that the launcher is gone
                stdout=log,
                stderr=log,
                pass_fds=self._pass_on,
                start_new_session=True,  # so that Ctrl-C reaches the launcher alone, which asks for a checkpoint
                env=process.environment,
                cwd=process.folder,
            )
        self._started.append(host)
        self._hosts |= dict.fromkeys(process.ranks, host)

    def states(self) -> dict[int, State]:
        now, beats = time.monotonic(), read_pulse(self._scratch.pulse)
        states = {}
        for rank in self._hosts:
            code, beat = self._code(rank), beats[rank]
            failure = self._tell(rank, code) if code else None
            states[rank] = State(code, failure, beat.step, beat.phase, now - beat.time)
        return states

    def _code(self, rank: int) -> int | None:
        code = self._scratch.exit_code(rank)
        return self._hosts[rank].poll() if code is None else code

    def ask_to_stop(self) -> None:
        self._signal_all(signal.SIGTERM)

    def end(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            host = self._hosts[rank]
            alone = all(other in ranks for other in self._hosts if self._hosts[other] is host)
            with suppress(ProcessLookupError):  # it may have ended by itself just now
                if alone:
                    os.killpg(host.pid, signal.SIGKILL)
                elif process := self._scratch.process(rank):
                    os.kill(process, signal.SIGKILL)
        until = time.monotonic() + _GRACE
        while any(self._code(rank) is None for rank in ranks) and time.monotonic() < until:
            time.sleep(_TICK)

    def stacks(self) -> dict[int, str]:
        for rank in self._hosts:
            self._scratch.clear_stack(rank)
        self._signal_all(signal.SIGUSR1)
        time.sleep(0.5)
        return {rank: self._scratch.read_stack(rank) for rank in self._hosts if self._code(rank) is None}

    def close(self) -> None:
        os.close(self._held)
        self._signal_all(signal.SIGKILL)
        select.select([self._alive], [], [], _GRACE)
        os.close(self._alive)
        for host in self._started:
            host.wait()
            if host.stdin:
                host.stdin.close()

    def _signal_all(self, number: signal.Signals) -> None:
        for host in self._started:
            with suppress(ProcessLookupError):
                os.killpg(host.pid, number)
