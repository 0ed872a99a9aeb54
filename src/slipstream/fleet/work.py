"""What a run is to a fleet: a job of ours, or somebody's program. Which ranks are on which machine, what they must be
told to find each other, and the processes that they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from slipstream.data import prepare
from slipstream.fleet.crew import CrewHere
from slipstream.fleet.launch import Company, Launch, Watcher, refuse_if_spent, rewind
from slipstream.fleet.line import interface_of
from slipstream.fleet.scratch import Scratch
from slipstream.fleet.worker import RENDEZVOUS
from slipstream.fleet.workers import Workers
from slipstream.job import Job, load_job
from slipstream.job.servers import servers_of
from slipstream.plan import Plan
from slipstream.runs import RunError, RunFolder
from slipstream.runs.result import Result, read_result
from slipstream.train.nodes import NODES
from slipstream.train.server.addresses import SERVERS, on_this_machine

Addresses = Sequence[tuple[str, Sequence[int]]]
"""Of each machine: where it is, and ports that are free there."""


class Work(Protocol):
    """A run, as the agents see it."""

    @property
    def machines(self) -> int:
        """How many."""
        ...

    @property
    def patience(self) -> float:
        """Seconds that they wait for each other."""
        ...

    def ranks_on(self, machine: int) -> tuple[int, ...]:
        """The ranks of a machine."""
        ...

    def ports_on(self, machine: int) -> int:
        """How many free ports its ranks need."""
        ...

    def prepare(self, watcher: Watcher) -> None:
        """What must be done on each machine before."""
        ...

    def meeting(self, addresses: Addresses) -> dict[str, str]:
        """What all ranks must know, as variables of the environment."""
        ...

    def crew(self, meeting: dict[str, str], here: str, scratch: Scratch) -> CrewHere:
        """This machine's ranks, where it is not the head."""
        ...

    def lead(self, company: Company | None, watcher: Watcher, lock: int) -> Result | None:
        """On the head: run it to its end. Without company, all ranks are here."""
        ...


@dataclass(frozen=True)
class JobWork:
    """A job of ours."""

    run: RunFolder
    job: Job
    plan: Plan
    home: str

    @classmethod
    def of(cls, run: RunFolder, home: str) -> "JobWork":
        """As its folder has it."""
        try:
            plan = Plan.model_validate(yaml.safe_load(run.plan.read_text()))
        except (OSError, ValueError) as error:
            raise RunError(f"{run.plan} cannot be read: {error}") from error
        return cls(run, load_job(run.job), plan, home)

    @property
    def machines(self) -> int:
        return self.plan.machines

    @property
    def patience(self) -> float:
        return self.job.limits.first_step

    def ranks_on(self, machine: int) -> tuple[int, ...]:
        """Neighbours are together, and servers are dealt out."""
        workers = self.plan.layout.workers
        each = workers // self.machines
        servers = range(workers + machine, workers + servers_of(self.job), self.machines)
        return (*range(machine * each, (machine + 1) * each), *servers)

    def ports_on(self, machine: int) -> int:
        """One for each server, and one on the head, where all meet."""
        return len(range(machine, servers_of(self.job), self.machines)) + (machine == 0)

    def prepare(self, watcher: Watcher) -> None:
        prepare(self.job, watcher.say)

    def meeting(self, addresses: Addresses) -> dict[str, str]:
        each = self.plan.layout.workers // self.machines
        (head, (door, *ports)), *others = addresses
        nodes = ",".join(str(rank // each) for rank in range(self.plan.layout.workers))
        found = {RENDEZVOUS: f"tcp://{written(head)}:{door}", NODES: nodes}
        if servers := servers_of(self.job):
            listening = [(head, ports), *others]
            turns = [(listening[number % self.machines], number // self.machines) for number in range(servers)]
            found |= on_this_machine(0)  # for its token
            found[SERVERS] = ",".join(f"{written(host)}:{free[turn]}" for (host, free), turn in turns)
        return found

    def crew(self, meeting: dict[str, str], here: str, scratch: Scratch) -> CrewHere:
        workers = Workers(self.run, self.job, self.plan, self.home, scratch, meeting | gloo_at(here))
        return CrewHere(workers.processes, self.plan.layout.workers + servers_of(self.job), scratch)

    def lead(self, company: Company | None, watcher: Watcher, lock: int) -> Result:
        run, done = self.run, read_result(self.run)
        if done and done.status == "finished":
            return done
        run.mend()
        spent = run.seconds_spent()
        refuse_if_spent(run, self.job, spent)
        restore = rewind(run, watcher) if spent else None
        return Launch(run, self.job, self.plan, self.home, restore, spent).to_end(watcher, lock, company)


def written(host: str) -> str:
    """As it stands in an address."""
    return f"[{host}]" if ":" in host else host


def gloo_at(address: str) -> dict[str, str]:
    """Which interface gloo is to use: where names mean nothing, it picks one by itself."""
    name = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def home_of(run: RunFolder) -> str:
    """Where the user's own modules are: they travel with the run."""
    return str(run.code if run.code.exists() else Path.cwd())
