"""One launch of a run, from its first event to its result: what `train`, `resume` and the agent of a fleet all do."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slipstream.fleet.crew import Crew, CrewHere
from slipstream.fleet.failure import summarise
from slipstream.fleet.scratch import Scratch
from slipstream.fleet.watch import Watch, WorkersFailed
from slipstream.fleet.workers import Workers
from slipstream.job import Job
from slipstream.job.servers import servers_of
from slipstream.plan import Plan, this_machine
from slipstream.plan.here import Here
from slipstream.runs import RunError, RunFolder, draw_curve, read_lines, truncate_metrics, write_yaml
from slipstream.runs.checkpoints import find_checkpoint, read_progress
from slipstream.runs.result import Result, read_result
from slipstream.train.server.addresses import on_this_machine

_TEACHES = 20
"""Steps of a run from which the planner learns."""


class Watcher(Protocol):
    """Someone who looks on while a job runs."""

    def say(self, text: str) -> None:
        """A line about what is being done."""
        ...

    def started(self, run: RunFolder, job: Job, plan: Plan) -> None:
        """The workers are being started."""
        ...

    def tick(self) -> None:
        """Called many times a second while the workers run."""
        ...


class Silence:
    """Nobody looks on."""

    run: RunFolder | None = None

    def say(self, text: str) -> None:
        """Not heard."""

    def started(self, run: RunFolder, job: Job, plan: Plan) -> None:  # noqa: ARG002
        self.run = run

    def tick(self) -> None:
        """Not seen."""

    def close(self) -> None:
        """Nothing to leave."""


@dataclass(frozen=True)
class Company:
    """Who takes part in a launch beside the ranks of this machine."""

    own: tuple[int, ...]
    """The ranks here."""
    far: Mapping[int, Crew] = field(default_factory=dict)
    """Those on other machines."""
    meeting: Mapping[str, str] = field(default_factory=dict)
    """What all must know to find each other, as variables of the environment."""

    @classmethod
    def of_one(cls, job: Job, plan: Plan) -> "Company":
        """All on this machine."""
        servers = servers_of(job)
        return cls(tuple(range(plan.layout.workers + servers)), {}, on_this_machine(servers) if servers else {})


@dataclass(frozen=True)
class Launch:
    """What is to be started, and where it stands."""

    run: RunFolder
    job: Job
    plan: Plan
    home: str
    """Where the user's own modules are found."""
    restore: Path | None = None
    """The checkpoint to go on from."""
    spent: float = 0.0
    """Seconds of the launches before."""

    def to_end(self, watcher: Watcher, lock: int, company: Company | None = None) -> Result:
        """Run it. Raises WorkersFailed."""
        run, plan, company = self.run, self.plan, company or Company.of_one(self.job, self.plan)
        scratch = Scratch.create()
        try:
            _remove_old_scratch(run)
            write_yaml(run.plan, plan.model_dump(mode="json"))
            run.result.unlink(missing_ok=True)
            restore = self.restore.name if self.restore else None
            facts = {"workers": plan.layout.workers, "folder": self.home, "restore": restore}
            run.event("launch", spent=round(self.spent, 3), scratch=str(scratch.path), **facts)
            watcher.started(run, self.job, plan)
            watch = self._watch(company, scratch, lock)
            with interruptible(
                watch, watcher, "stopping after this step, with a checkpoint; once more to stop at once"
            ):
                watch.run_to_end(self.job.limits, self.restore, watcher.tick)
        except WorkersFailed as error:
            failure = error.failure
            with suppress(OSError):  # the disk may be what failed
                where = {"rank": failure.rank, "step": failure.step, "phase": failure.phase, "error": failure.error}
                run.event("failure", **where, text=summarise(failure), code=failure.exit_code)
            raise
        finally:
            scratch.remove()
        return self._finish()

    def _watch(self, company: Company, scratch: Scratch, lock: int) -> Watch:
        size, servers = self.plan.layout.workers, servers_of(self.job)
        workers = Workers(self.run, self.job, self.plan, self.home, scratch, dict(company.meeting))
        here = CrewHere(workers.processes, size + servers, scratch, [lock])
        return Watch(
            self.run, scratch, {**dict.fromkeys(company.own, here), **company.far}, range(size, size + servers)
        )

    def _finish(self) -> Result:
        run, plan, result = self.run, self.plan, read_result(self.run)
        assert result is not None, "the first worker leaves one before it ends well"
        run.event(result.status, reason=result.reason, step=result.step, loss=result.loss)
        draw_curve(run)
        # Otherwise the median step is not the mean, which was predicted; or it was not predicted for this machine.
        alike = self.job.exchange.kind == "allreduce" and plan.machines == 1
        if result.status == "finished" and result.step >= _TEACHES and result.step_seconds and plan.predicted and alike:
            Here(this_machine()).learn(plan.predicted.step_seconds, result.step_seconds)
        return result


def rewind(run: RunFolder, watcher: Watcher) -> Path | None:
    """The newest whole checkpoint, with nothing in the record that comes after it."""
    checkpoint = find_checkpoint(run.checkpoints, lambda text: _warn(run, watcher, text))
    progress = read_progress(checkpoint) if checkpoint else None
    truncate_metrics(run.metrics, progress.step if progress else 0)
    where = f"from step {progress.step}" if progress else "from the start: there is no whole checkpoint yet"
    watcher.say(f"resuming {run.name} {where}")
    return checkpoint


def refuse_if_spent(run: RunFolder, job: Job, spent: float) -> None:
    """Raise RunError if nothing is left of a limit."""
    deadline, budget, price = job.limits.deadline, job.limits.budget, job.machines.price_per_hour
    if deadline is not None and spent >= deadline:
        raise RunError(f"the deadline is spent: {spent:.0f} s of {deadline:.0f} s; raise limits.deadline in {run.job}")
    if budget and price and spent / 3600 * price >= budget:
        cost = spent / 3600 * price
        raise RunError(f"the budget is spent: ${cost:.2f} of ${budget:.2f}; raise limits.budget in {run.job}")


@contextmanager
def locked(run: RunFolder) -> Iterator[int]:
    """The run is this process's and its children's."""
    lock = run.lock()
    try:
        yield lock
    finally:
        os.close(lock)


def _remove_old_scratch(run: RunFolder) -> None:
    """What a launcher that was killed could not take away."""
    for event in read_lines(run.events):
        if event["event"] == "launch":
            Scratch(Path(event["scratch"])).remove()


def _warn(run: RunFolder, watcher: Watcher, text: str) -> None:
    run.event("warning", text=text)
    watcher.say(f"warning: {text}")


@contextmanager
def interruptible(watch: Watch, watcher: Watcher, words: str, firm: bool = False) -> Iterator[None]:
    """The first Ctrl-C asks for a checkpoint and a stop, in these words; the second ends everything at once. `firm`: so
    does a second SIGTERM, which some engines send twice."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(_number: int, _frame: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM) if firm else (signal.SIGINT,):
            signal.signal(number, signal.default_int_handler)
        watcher.say(words)
        watch.interrupt()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
