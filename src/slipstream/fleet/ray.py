"""The fleet `ray`: a Ray job that holds one bundle on each of some nodes, all or none, and runs an agent in each."""

import json
import os
import re
import secrets
import shlex
import sys
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from slipstream.fleet.base import FleetError, Order, Room, Status
from slipstream.fleet.dashboard import Dashboard, Node, find_dashboard
from slipstream.fleet.local import LocalFleet, launch_here
from slipstream.job.machines import Machines
from slipstream.plan import Machine, this_machine

_DRIVER = ["-m", "slipstream.fleet.on_ray"]
_SAVING = 900
"""Seconds that Ray leaves to a job that was asked to stop; without this it would be three."""


class RayFleet:
    """A Ray cluster, by its dashboard. The run's folder must be on a disk that all nodes share, or in object storage.

    A submission is `JOB@DASHBOARD`; where there is no cluster, one is started for the run on this machine, and the
    submission is that of the fleet `local`.
    """

    def __init__(self, settings: Machines) -> None:
        self._settings, self._local = settings.ray, LocalFleet(settings)
        self._mark = secrets.token_hex(3)

    @cached_property
    def _cluster(self) -> Dashboard | None:
        address = find_dashboard(self._settings.address)
        if address is None and find_spec("ray") is None:
            raise FleetError(
                "there is no Ray cluster here, nor is ray installed to start one: set machines.ray.address or "
                "RAY_ADDRESS to a cluster's http://HOST:8265, or pip install 'slipstream[ray]'"
            )
        return Dashboard(address) if address else None

    def validate(self, order: Order) -> None:
        if self._cluster is None and order.machines > 1:
            raise FleetError(
                f"{order.machines} machines are asked for, but no Ray cluster was found, and one that is started for "
                "the run is this machine alone; set machines.ray.address or RAY_ADDRESS to http://HOST:8265"
            )
        missing = [name for name in self._settings.environment if name not in os.environ]
        if missing:
            raise FleetError(f"machines.ray.environment: {', '.join(missing)} is not set here")
        fitting = [node for node in self._nodes() if _fits(node, order, node.cores, node.gpus)]
        if len(fitting) < order.machines:
            raise FleetError(
                f"the cluster could never give {_wanted(order.machines, order.cores, order.gpus)}: {len(fitting)} of "
                "its nodes are so large; `slipstream capacity --on ray` shows what is free"
            )

    def capacity(self, whole: bool = False) -> list[Room]:
        """Nodes with free CPUs, by how many and which GPUs; the `whole` cluster also has what is busy."""
        kinds: dict[tuple[int, tuple[str, ...]], list[Node]] = {}
        for node in self._nodes():
            cores, gpus = (node.cores, node.gpus) if whole else (node.free_cores, node.free_gpus)
            if cores:
                kinds.setdefault((cores, (node.kind,) * gpus), []).append(node)
        return [
            Room(len(nodes), Machine("", cores, min(node.memory for node in nodes), gpus, bf16=True))
            for (cores, gpus), nodes in sorted(kinds.items(), reverse=True)
        ]

    def _nodes(self) -> list[Node]:
        if self._cluster:
            return self._cluster.nodes()
        here = this_machine()
        kind = here.gpus[0] if here.gpus else ""
        return [Node("127.0.0.1", here.cores, len(here.gpus), here.memory, kind, here.cores, len(here.gpus))]

    def render(self, order: Order) -> str:
        if self._cluster is None:
            return f"{shlex.join(self._embedded(order))}\n"
        body = self._body(order)
        hidden = {**body["runtime_env"]["env_vars"], **dict.fromkeys(self._settings.environment, "…")}
        return f"POST {self._cluster.address}/api/jobs/\n" + json.dumps(
            {**body, "runtime_env": {"env_vars": hidden}}, indent=2, ensure_ascii=False
        ) + "\n"  # fmt: skip

    def launch(self, order: Order) -> str:
        if self._cluster is None:
            return launch_here(order.run, self._embedded(order))
        try:
            self._cluster.submit(self._body(order))
        except FleetError:
            with suppress(FleetError):  # it may have come too late to be heard, and be there
                self._cluster.stop(self._name(order))
            raise
        return f"{self._name(order)}@{self._cluster.address}"

    def _name(self, order: Order) -> str:
        return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', order.name)}-{self._mark}"

    def _body(self, order: Order) -> dict[str, Any]:
        sent = {name: os.environ[name] for name in self._settings.environment}
        return {
            "submission_id": self._name(order),
            "entrypoint": self._entrypoint(order),
            "metadata": {"run": order.target},
            "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_SAVING), **sent}},
        }

    def _entrypoint(self, order: Order) -> str:
        words = shlex.join([*_DRIVER, *_words(order), "--name", self._name(order), *self._sent()])
        if self._settings.python:
            return f"exec {shlex.quote(self._settings.python)} {words}"
        here = shlex.quote(sys.executable)
        return f"python={here}; [ -x $python ] || python=python; exec $python {words}"

    def _sent(self) -> list[str]:
        return [word for name in self._settings.environment for word in ("--environment", name)]

    def _embedded(self, order: Order) -> list[str]:
        return [sys.executable, *_DRIVER, *_words(order), "--embedded"]

    def status(self, submission: str) -> Status:
        name, _, address = submission.partition("@")
        if not address.startswith("http"):
            return self._local.status(submission)
        cluster = Dashboard(address)
        job = cluster.job(name)
        if job is None:
            return Status("ended", "the cluster does not know it any more")
        state, message = job["status"], (job.get("message") or "").strip()
        if state == "PENDING":
            return Status("queued", message.splitlines()[0] if message else "pending")
        if state != "RUNNING":
            said = [line for line in message.splitlines() if not line.startswith("Running entrypoint for job")]
            return Status("ended", f"failed: {said[-1]}" if said and state == "FAILED" else state.lower())
        group = cluster.group(name)
        if group and group["state"] == "PENDING":
            return Status("queued", _why_not(group))
        return Status("running")

    def logs(self, submission: str) -> str:
        name, _, address = submission.partition("@")
        return Dashboard(address).logs(name) if address.startswith("http") else ""

    def stop(self, submission: str) -> None:
        name, _, address = submission.partition("@")
        if address.startswith("http"):
            Dashboard(address).stop(name)
        else:
            self._local.stop(submission)


def _fits(node: Node, order: Order, cores: int, gpus: int) -> bool:
    return cores >= order.cores and gpus >= order.gpus and order.kind in ("", node.kind)


def _wanted(machines: int, cores: int, gpus: int) -> str:
    nodes = f"{machines} node{'s' if machines > 1 else ''}"
    return f"{nodes} with {cores} CPUs" + (f" and {gpus} GPUs" if gpus else "") + (" each" if machines > 1 else "")


def _words(order: Order) -> list[str]:
    words = [order.target, "--machines", str(order.machines), "--cores", str(order.cores)]
    if order.gpus:
        words += ["--gpus", str(order.gpus)]
    return [*words, "--kind", order.kind] if order.kind else words


def _why_not(group: dict[str, Any]) -> str:
    bundles = [bundle["unit_resources"] for bundle in group["bundles"]]
    wanted = _wanted(len(bundles), int(bundles[0].get("CPU", 0)), int(bundles[0].get("GPU", 0)))
    found = (group.get("stats") or {}).get("scheduling_state", "pending")
    return f"{wanted} are not free now (Ray says {found})"
