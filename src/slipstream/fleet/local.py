"""The local fleet: the workers on this machine, watched until the last has ended."""

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slipstream.fleet.failure import Failure, first_cause, killed, read_failure
from slipstream.fleet.scratch import Scratch
from slipstream.job import Job
from slipstream.job.servers import servers_of
from slipstream.plan import Plan
from slipstream.runs import Pulse, RunFolder, create_pulse, read_pulse, truncate_metrics
from slipstream.runs.cache import bytecode_environment, compiler_environment
from slipstream.runs.checkpoints import find_checkpoint, read_progress
from slipstream.train.server.addresses import on_this_machine

_TICK = 0.05
_MOST_RESTARTS = 10
"""Of one rank, where those that were killed are started again."""
_GRACE = 2.0
"""Seconds the other workers have to end by themselves after one has failed."""
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""For glibc: keep what is freed instead of giving it back to the system. Every step frees and takes large tensors
anew, and a page that comes fresh from the system must first be cleared, which in a virtual machine can take longer
than the arithmetic (docs/benchmarks.md)."""

WHOLE_MEMORY = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""For torch on a GPU: memory that was freed in pieces can be used as a whole."""


_NCCL = {"ring": "allreduce:ring", "tree": "allreduce:tree"}
"""NCCL's own algorithms by our names; what it does beside sums of gradients is left to it."""


class WorkersFailed(RuntimeError):
    """The run ended before its time."""

    def __init__(self, failure: Failure, run: RunFolder, stacks: dict[int, str]) -> None:
        super().__init__(f"rank {failure.rank} failed at step {failure.step} in {failure.phase}: {failure.message}")
        self.failure = failure
        self.run = run
        self.stacks = stacks


class LocalFleet:
    """The workers of one run on this machine."""

    def __init__(self, run: RunFolder, job: Job, plan: Plan, home: str, scratch: Scratch) -> None:
        self._home, self._scratch = home, scratch
        self._run, self._job, self._plan, self._workers = run, job, plan, plan.layout.workers
        self._servers = range(self._workers, self._workers + servers_of(job))
        """The ranks that are servers."""
        self._meeting = on_this_machine(len(self._servers)) if self._servers else {}
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        """The process that each rank is, or is forked from; the leader of its process group."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._pass_on: list[int] = []
        self._again: Counter[int] = Counter()
        """How often each rank was started again."""
        self._asked = False

    def run_to_end(self, lock: int, restore: Path | None, tick: Callable[[], None]) -> None:
        """Start the workers and watch them; `tick` is called many times a second. Raises WorkersFailed."""
        create_pulse(self._scratch.pulse, self._workers + len(self._servers))
        alive, held = os.pipe()  # the workers hold one end: when all of them are gone, the other end says so
        self._pass_on = [lock, held]
        try:
            for ranks in _hosted_together(self._workers, self._servers):
                self._start(ranks, restore)
            self._watch(tick)
        finally:
            os.close(held)
            self._end_all(alive)

    def interrupt(self) -> None:
        """Ask the workers for a checkpoint and a stop."""
        self._asked = True
        self._signal_all(signal.SIGTERM)

    def _start(self, ranks: range, restore: Path | None) -> None:
        where = [str(self._run.path), ",".join(map(str, ranks)), str(self._workers), str(self._scratch.path)]
        words = [*where, str(restore)] if restore else where
        with (self._run.logs / f"rank-{ranks[0]}.log").open("ab") as log:
            host = subprocess.Popen(
                [sys.executable, "-m", "slipstream.fleet.worker", *words],
                stdin=subprocess.PIPE,  # its end tells the workers that the launcher is gone
                stdout=log,
                stderr=log,
                pass_fds=self._pass_on,
                start_new_session=True,  # so that Ctrl-C reaches the launcher alone, which asks for a checkpoint
                env=self._environment(),
            )
        self._started.append(host)
        self._hosts |= dict.fromkeys(ranks, host)

    def _codes(self) -> list[int | None]:
        """How each worker ended; None while it runs."""
        left = [self._scratch.exit_code(rank) for rank in self._hosts]
        return [host.poll() if code is None else code for code, host in zip(left, self._hosts.values(), strict=True)]

    def _signal_all(self, number: signal.Signals) -> None:
        for host in self._started:
            with suppress(ProcessLookupError):
                os.killpg(host.pid, number)

    def _environment(self) -> dict[str, str]:
        return {
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "OMP_NUM_THREADS": str(self._plan.threads),
            "TOKENIZERS_PARALLELISM": "false",
            **compiler_environment(),
            **(KEEP_MEMORY if self._plan.device == "cpu" else WHOLE_MEMORY),
            **self._meeting,
            **os.environ,
            **bytecode_environment(),
            **self._algorithm(),
            "PYTHONPATH": os.pathsep.join(path for path in [self._home, *sys.path] if path),
        }

    def _algorithm(self) -> dict[str, str]:
        name = _NCCL.get(self._job.exchange.algorithm) if self._plan.device == "cuda" else None
        return {"NCCL_ALGO": name} if name else {}

    def _watch(self, tick: Callable[[], None]) -> None:
        while True:
            codes = self._codes()
            if self._asked and -signal.SIGTERM in codes:
                raise KeyboardInterrupt  # asked so early that a worker could not listen yet
            if all(code == 0 for code in (codes[self._workers :] or codes)):  # servers end when the run does
                return
            if any(codes) and not self._start_again(codes):
                raise WorkersFailed(self._gather_failures(), self._run, {})
            hanging = self._find_hanging(codes)
            if hanging and not self._ends(hanging):
                raise WorkersFailed(hanging, self._run, self._collect_stacks())
            tick()
            time.sleep(_TICK)

    def _start_again(self, codes: list[int | None]) -> bool:
        """With servers those that were killed come back: a worker as it is, servers all together from the last
        checkpoint. What failed by itself would do so again."""
        gone = [rank for rank, code in enumerate(codes) if code]
        killed_ones = [rank for rank in gone if not read_failure(self._scratch, rank)]
        self._again.update(killed_ones)
        if not self._servers or not killed_ones or max(self._again[rank] for rank in gone) > _MOST_RESTARTS:
            return False
        for rank in killed_ones:
            if rank not in self._servers:
                self._run.event("restart", rank=rank)
                self._replace(range(rank, rank + 1), None)
        if any(rank in self._servers for rank in killed_ones):
            checkpoint = find_checkpoint(self._run.checkpoints, lambda text: self._run.event("warning", text=text))
            step = read_progress(checkpoint).step if checkpoint else 0
            self._end_hosts(self._servers)
            truncate_metrics(self._run.metrics, step)
            self._run.event("restart", rank=self._servers[0], servers=len(self._servers), step=step)
            self._replace(self._servers, checkpoint)
        return True

    def _ends(self, hanging: Failure) -> bool:
        """With servers a worker that hangs is ended, to be started again like one that was killed."""
        rank = hanging.rank
        if not self._servers or rank in self._servers or self._again[rank] >= _MOST_RESTARTS:
            return False
        self._run.event("warning", text=f"worker {rank}: {hanging.message}; it is ended")
        with suppress(ProcessLookupError):  # it may have ended by itself just now
            os.kill(self._scratch.process(rank) or self._hosts[rank].pid, signal.SIGKILL)
        until = time.monotonic() + _GRACE
        while self._codes()[rank] is None and time.monotonic() < until:
            time.sleep(_TICK)
        return self._codes()[rank] is not None

    def _replace(self, ranks: range, restore: Path | None) -> None:
        for rank in ranks:
            self._scratch.forget(rank)
            Pulse(self._scratch.pulse, rank).beat("start")
        for together in _hosted_together(0, ranks):
            self._start(together, restore)

    def _end_hosts(self, ranks: range) -> None:
        """End the processes of these ranks, which no other ranks have."""
        for host in {self._hosts[rank] for rank in ranks}:
            with suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
            host.wait()
        self._scratch.forget_meeting()

    def _gather_failures(self) -> Failure:
        """Give every worker a moment to say what it knows, then name the first cause."""
        until = time.monotonic() + _GRACE
        while time.monotonic() < until and None in self._codes():
            time.sleep(_TICK)
        return first_cause(
            [
                read_failure(self._scratch, rank) or killed(rank, beat.step, beat.phase, code)
                for rank, (code, beat) in enumerate(zip(self._codes(), read_pulse(self._scratch.pulse), strict=True))
                if code
            ]
        )

    def _find_hanging(self, codes: list[int | None]) -> Failure | None:
        """The worker that the others wait for, when one has shown no sign of life for too long."""
        now, beats = time.monotonic(), read_pulse(self._scratch.pulse)
        waited = [now - beat.time for beat in beats]
        limits = [self._job.limits.step if beat.step > 1 else self._job.limits.first_step for beat in beats]
        running = [rank for rank, code in enumerate(codes) if code is None]
        late = [rank for rank in running if waited[rank] > limits[rank]]
        if not late:
            return None
        # Those that wait in an exchange are waiting for someone; the one that is elsewhere is whom they wait for.
        rank = min(late, key=lambda rank: (beats[rank].phase == "exchange", beats[rank].time))
        beat = beats[rank]
        elsewhere = any(beats[other].phase != "exchange" for other in running)
        if beat.phase == "exchange" and elsewhere and waited[rank] < 2 * limits[rank]:
            return None  # who came there a little later will soon be late too, and is the one to name
        message = f"the worker has shown no sign of life for {waited[rank]:.0f} s"
        return Failure(rank, beat.step, beat.phase, "hanging", message)

    def _collect_stacks(self) -> dict[int, str]:
        self._signal_all(signal.SIGUSR1)
        time.sleep(0.5)
        return {rank: self._scratch.read_stack(rank) for rank, code in enumerate(self._codes()) if code is None}

    def _end_all(self, alive: int) -> None:
        self._signal_all(signal.SIGKILL)
        select.select([alive], [], [], _GRACE)
        os.close(alive)
        for host in self._started:
            host.wait()
            if host.stdin:
                host.stdin.close()


def _hosted_together(workers: int, servers: range) -> list[range]:
    """The ranks of each process to start. On Linux one process forks into all workers, another into all servers;
    elsewhere forking is not safe."""
    together = [ranks for ranks in (range(workers), servers) if ranks]
    return together if sys.platform == "linux" else [range(rank, rank + 1) for ranks in together for rank in ranks]
