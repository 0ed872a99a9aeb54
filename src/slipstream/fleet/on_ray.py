"""The driver of a run on Ray: `python -m slipstream.fleet.on_ray RUN …`, which a Ray job or a process of its own runs.

It holds a placement group, one bundle for each machine, and has an actor in every bundle keep that machine's agent.
When the driver goes, however it goes, Ray takes away the group and the actors, and the agents end with them.
"""

import argparse
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slipstream.data.storage import StorageGone, is_remote
from slipstream.fleet.failure import EARLY, INTERRUPTED, WORKER_FAILED
from slipstream.fleet.keeper import Keeper
from slipstream.fleet.mirror import changed
from slipstream.fleet.place import ADDRESS, HEAD, MACHINE, TOKEN
from slipstream.runs import RunFolder, read_lines
from slipstream.runs.folder import LAUNCHER_LOG

_TICK = 0.2
_GRACE = 10.0
"""Seconds that the other agents have to end after one has."""
_NO_FLEET = 8
"""The exit code, as everywhere."""
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable by which Ray tells a job's driver what all of the job's actors inherit."""
_STORE = 80 * 2**20
"""Bytes of the embedded cluster's object store, which nobody uses: about the least that Ray takes."""


class Trouble(RuntimeError):
    """The run cannot begin, or has lost a machine; with the exit code for it."""

    def __init__(self, text: str, code: int = _NO_FLEET) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class Wishes:
    """What was asked of this process."""

    stop: bool = False

    def listen(self) -> None:
        """From now on a SIGTERM is a wish to stop."""

        def ask(_number: int, _frame: object) -> None:
            self.stop = True

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask)


def main() -> None:
    """See a run through on a Ray cluster. The exit code is that of the first machine's agent."""
    options = _options()
    try:
        sys.exit(_drive(options, Wishes()))
    except Trouble as trouble:
        _say(str(trouble))
        with suppress(StorageGone), changed(options.run) as run:  # that may be the trouble
            _leave_word(run, trouble)
        sys.exit(trouble.code)


def _leave_word(run: RunFolder, trouble: Trouble) -> None:
    """For whoever watches the run, unless its first machine has said better what happened."""
    ends = ("failure", "refused", "stopped", "finished")
    said = [event["event"] for event in read_lines(run.events)]
    if run.logs.is_dir() and not (said and said[-1] in ends):
        kind = {WORKER_FAILED: "failure", INTERRUPTED: "stopped"}.get(trouble.code, "refused")
        run.event(kind, text=str(trouble), code=trouble.code)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slipstream.fleet.on_ray")
    parser.add_argument("run")
    parser.add_argument("--machines", type=int, required=True)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--kind", default="", help="of the GPUs")
    parser.add_argument("--name", default="slipstream", help="of the placement group")
    parser.add_argument("--environment", action="append", default=[], help="a variable that all agents get")
    parser.add_argument("--embedded", action="store_true", help="start a cluster for this run, on this machine")
    return parser.parse_args()


def _drive(options: argparse.Namespace, wishes: Wishes) -> int:
    with _own_cluster(options) if options.embedded else _cluster(options):
        wishes.listen()
        group = _ask_for(options)
        agents = _Agents(options, group)  # Ray starts them when it has all nodes
        _await(group, wishes)
        agents.start()
        return _see_through(agents, wishes)


def _say(text: str) -> None:
    """For the job's log."""
    print(f"{datetime.now():%H:%M:%S.%f}"[:-3], text, flush=True)


@contextmanager
def _cluster(options: argparse.Namespace) -> Iterator[None]:
    """The one that this job is on. Actors take the processes that Ray keeps ready, as they need no environment of the
    job's own. What the agents of a run in object storage say is heard here: they have no common log."""
    import ray

    _say("joining the cluster")
    told = json.loads(os.environ.pop(_JOB_CONFIG, "{}"))
    known = ray.job_config.JobConfig(metadata=told.get("metadata"))
    ray.init(address="auto", log_to_driver=is_remote(options.run), job_config=known)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_cluster(options: argparse.Namespace) -> Iterator[None]:
    """It is reached from this machine alone, by who knows its token, and goes with this process."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    import ray  # reads them

    _say("starting a cluster")
    with tempfile.TemporaryDirectory(prefix="slipstream-ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=options.cores,
            include_dashboard=False,
            log_to_driver=is_remote(options.run),
            object_store_memory=_STORE,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def _ask_for(options: argparse.Namespace) -> Any:
    """The placement group: a bundle for each machine, all or none."""
    from ray.util.placement_group import placement_group

    bundle: dict[str, float] = {"CPU": options.cores}
    if options.gpus:
        bundle["GPU"] = options.gpus
        if options.kind and not options.embedded:
            bundle[f"accelerator_type:{options.kind}"] = 0.001
    _say(f"waiting for {options.machines} × {bundle}")
    strategy = "STRICT_SPREAD" if options.machines > 1 else "STRICT_PACK"
    return placement_group([bundle] * options.machines, strategy=strategy, name=options.name)


def _await(group: Any, wishes: Wishes) -> None:
    import ray

    ready = group.ready()
    while not ray.wait([ready], timeout=_TICK)[0]:
        if wishes.stop:
            raise Trouble(EARLY, INTERRUPTED)


class _Agents:
    """The actors of all machines, in order."""

    def __init__(self, options: argparse.Namespace, group: Any) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor: Any = ray.remote(Keeper)
        self._options, self._group = options, group
        self.addresses: list[str] = []
        self.running: list[Any] = []
        self.keepers = [
            actor.options(
                num_cpus=options.cores,
                num_gpus=options.gpus,
                max_concurrency=2,  # a wish to stop is heard while the agent runs
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            ).remote()
            for number in range(options.machines)
        ]

    def start(self) -> None:
        """On the nodes that Ray has given. Raises Trouble."""
        options = self._options
        self.addresses = _addresses(self._group, options.machines)
        _say(f"on {', '.join(self.addresses)}")
        common = {name: os.environ[name] for name in options.environment}
        common |= {HEAD: f"{self.addresses[0]}:{self._look()}", TOKEN: secrets.token_hex(16)}
        _say("starting the agents")
        self.running = [
            keeper.keep.remote(
                options.run,
                {**common, MACHINE: str(number), ADDRESS: address},
                f"machine-{number}.log" if number else LAUNCHER_LOG,
            )
            for number, (keeper, address) in enumerate(zip(self.keepers, self.addresses, strict=True))
        ]

    def _look(self) -> int:
        """Whether all machines can begin; a port that is free on the first."""
        places = zip(self.keepers, self.addresses, strict=True)
        looks = [keeper.look.remote(self._options.run, address) for keeper, address in places]
        ports: list[int] = []
        for address, look in zip(self.addresses, looks, strict=True):
            try:
                port, problem = self.answer(look)
            except Trouble as trouble:
                port, problem = 0, str(trouble)
            if problem:
                raise Trouble(f"node {address}: {problem}")
            ports.append(port)
        return ports[0]

    def answer(self, asked: Any) -> Any:
        """What a machine answers. Raises Trouble if it cannot."""
        import ray

        try:
            return ray.get(asked)
        except ray.exceptions.RayError as error:
            raise Trouble(_in_short(error)) from error


def _addresses(group: Any, machines: int) -> list[str]:
    """Of the nodes of the bundles."""
    import ray
    from ray.util.placement_group import placement_group_table

    known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    where = placement_group_table(group)["bundles_to_node_id"]
    return [known[where[number]] for number in range(machines)]


def _in_short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if "No module named 'slipstream" in str(error):
        return "slipstream is not installed there, in the Python that Ray runs with; install it on every node"
    return lines[-1].strip() if lines else type(error).__name__


def _see_through(agents: _Agents, wishes: Wishes) -> int:
    """Until the first machine's agent has ended; its exit code."""
    import ray

    left, asked = dict(enumerate(agents.running)), False
    while 0 in left:
        done = ray.wait(list(left.values()), timeout=_TICK)[0]
        if wishes.stop and not asked:
            agents.keepers[0].stop.remote()
            asked = True
        ended = [number for number, task in left.items() if task in done]
        for number in sorted(ended, reverse=True):  # the first machine says best what happened
            code = _code_of(agents, number, left)
    _ends(list(left.values()))
    if code < 0 and asked:
        raise Trouble(EARLY, INTERRUPTED)
    if code < 0:
        raise Trouble(f"the first machine's agent was ended by signal {-code}", WORKER_FAILED)
    return code


def _code_of(agents: _Agents, number: int, left: dict[int, Any]) -> int:
    """With which a machine's agent has ended. Raises Trouble if it failed and the first one does not see to that."""
    try:
        code: int = agents.answer(left.pop(number))
        problem = f"its agent ended with code {code}; machine-{number}.log says why" if number and code else ""
    except Trouble as trouble:
        code, problem = WORKER_FAILED, str(trouble)
    if problem and (number == 0 or not _ends([left[0]] if 0 in left else [])):
        raise Trouble(f"node {agents.addresses[number]}: {problem}", WORKER_FAILED)
    return code


def _ends(tasks: list[Any]) -> bool:
    """Whether these end in a moment."""
    import ray

    return not tasks or len(ray.wait(tasks, num_returns=len(tasks), timeout=_GRACE)[0]) == len(tasks)


if __name__ == "__main__":
    main()
