"""What a fleet starts on every machine: one agent each, which runs its part of a run to the end.

The first machine's agent is the head: it takes the run, waits for the other machines, says what they all must know,
and then watches over every rank as if it were its own. The others do what it says and end when it is gone.
"""

import signal
import sys
from pathlib import Path

import yaml

from slipstream.data import prepare
from slipstream.fleet.crew import Crew, CrewHere
from slipstream.fleet.far import CrewThere, follow
from slipstream.fleet.launch import Company, Launch, Watcher, locked, refuse_if_spent, rewind
from slipstream.fleet.line import Line, LineLost, Message, free_ports, interface_of
from slipstream.fleet.place import Place, own_address
from slipstream.fleet.scratch import Scratch
from slipstream.fleet.worker import RENDEZVOUS
from slipstream.fleet.workers import Workers
from slipstream.job import Job, load_job
from slipstream.job.servers import servers_of
from slipstream.plan import Plan
from slipstream.runs import RunError, RunFolder
from slipstream.runs.result import Result, read_result
from slipstream.train.network import NODES
from slipstream.train.server.addresses import SERVERS, on_this_machine
from slipstream.version import VERSION


def run_agent(run: RunFolder, watcher: Watcher) -> Result | None:
    """This machine's part of a run, from its newest checkpoint or the start. Its result on the head, None elsewhere."""
    job, plan = load_job(run.job), _read_plan(run)
    place = Place.of(plan.machines, run.path)
    home = str(run.code if run.code.exists() else Path.cwd())
    sys.path.insert(0, home)
    if place.machine:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # the head is told the same, and says what is to be done
        _follow(run, job, plan, home, place)
        return None
    try:
        return _lead(run, job, plan, home, place, watcher)
    except ValueError as error:
        run.event("refused", text=str(error), code=2)  # for whoever is not at this machine
        raise


def _read_plan(run: RunFolder) -> Plan:
    try:
        return Plan.model_validate(yaml.safe_load(run.plan.read_text()))
    except (OSError, ValueError) as error:
        raise RunError(f"{run.plan} cannot be read: {error}") from error


def ranks_on(machine: int, job: Job, plan: Plan) -> tuple[int, ...]:
    """The ranks of a machine: neighbours are together, and servers are dealt out."""
    workers, machines = plan.layout.workers, plan.machines
    each = workers // machines
    servers = range(workers + machine, workers + servers_of(job), machines)
    return (*range(machine * each, (machine + 1) * each), *servers)


def _lead(run: RunFolder, job: Job, plan: Plan, home: str, place: Place, watcher: Watcher) -> Result:
    lines = place.gather(job.limits.first_step, watcher.say)
    try:
        with locked(run) as lock:
            done = read_result(run)
            if done and done.status == "finished":
                return done
            run.mend()
            spent = run.seconds_spent()
            refuse_if_spent(run, job, spent)
            prepare(job, watcher.say)
            restore = rewind(run, watcher) if spent else None
            company = _company(job, plan, lines)
            return Launch(run, job, plan, home, restore, spent).to_end(watcher, lock, company)
    finally:
        for line, _ in lines:
            line.close()


def _company(job: Job, plan: Plan, lines: list[tuple[Line, Message]]) -> Company:
    """All ranks, and what they must know of each other."""
    if not lines:
        return Company.of_one(job, plan)
    for number, (_, hello) in enumerate(lines, 1):
        if hello["version"] != VERSION:
            raise RunError(f"machine {number} has slipstream {hello['version']}, and the first one {VERSION}")
    here = own_address()
    ports = free_ports(here, 1 + len(range(0, servers_of(job), plan.machines)))
    addresses = [(here, ports[1:]), *((hello["address"], hello["ports"]) for _, hello in lines)]
    meeting = {RENDEZVOUS: f"tcp://{_written(here)}:{ports[0]}", NODES: _nodes(plan)}
    if servers := servers_of(job):
        turns = [divmod(number, plan.machines) for number in range(servers)]
        meeting |= on_this_machine(0)
        meeting[SERVERS] = ",".join(f"{_written(addresses[at][0])}:{addresses[at][1][turn]}" for turn, at in turns)
    far: dict[int, Crew] = {}
    for number, (line, _) in enumerate(lines, 1):
        line.say({"begin": meeting})
        far |= dict.fromkeys(ranks_on(number, job, plan), CrewThere(line, str(number)))
    return Company(ranks_on(0, job, plan), far, meeting | _gloo(here))


def _nodes(plan: Plan) -> str:
    each = plan.layout.workers // plan.machines
    return ",".join(str(rank // each) for rank in range(plan.layout.workers))


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _gloo(address: str) -> dict[str, str]:
    """Which interface gloo is to use: where names mean nothing, it picks one by itself."""
    name = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _hear_beginning(line: Line, patience: float) -> dict[str, str]:
    """What the head says when all machines are there."""
    try:
        said = line.hear_one(patience)
    except LineLost as error:
        raise RunError(f"the first machine has given up: {error}") from error
    if said is None:
        raise RunError(f"the first machine has not begun in {patience:.0f} s")
    meeting: dict[str, str] = said["begin"]
    return meeting


def _follow(run: RunFolder, job: Job, plan: Plan, home: str, place: Place) -> None:
    prepare(job, lambda _: None)
    ranks = ranks_on(place.machine, job, plan)
    ports = free_ports("0.0.0.0", sum(rank >= plan.layout.workers for rank in ranks))
    line = place.join(job.limits.first_step, version=VERSION, ports=ports)
    meeting = _hear_beginning(line, job.limits.first_step)
    scratch = Scratch.create()
    try:
        workers = Workers(run, job, plan, home, scratch, meeting | _gloo(line.here))
        seats = plan.layout.workers + servers_of(job)
        follow(line, CrewHere(workers.processes, seats, scratch), run.checkpoints)
    except LineLost as error:
        raise RunError(f"the first machine is gone: {error}") from error
    finally:
        scratch.remove()
