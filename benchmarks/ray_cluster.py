"""A Ray cluster on hosts of its own (network.py): Ray takes the outside interface by itself, so it runs nowhere else.

with cluster(nodes=2, cores=2) as ray:
    ray.start(["slipstream", "submit", …])      # on the head's host, in an environment that knows the cluster
"""

import json
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import network
from network import Network, hosts

_PATIENCE = 60.0
_RAY = str(Path(sys.executable).parent / "ray")
_STORE = 80 * 2**20


class Cluster:
    """A head, which computes nothing, on host 0, and nodes on the hosts after it; one host more is in no cluster."""

    def __init__(self, net: Network, nodes: int) -> None:
        self.network, self.apart = net, nodes + 1
        self.address = f"http://{net.addresses[0]}:8265"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        self.environment = {**token, "RAY_ADDRESS": self.address, "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, command: list[str], environment: dict[str, str] | None = None, host: int = 0, **more: Any) -> Any:
        """Start a process on a host; it is ended with the cluster, if it has not ended before."""
        return self.network.start(host, command, {**self.environment, **(environment or {})}, **more)

    def ask(self, path: str) -> Any:
        """What the dashboard answers to a GET; None if it does not."""
        with ThreadPoolExecutor(1) as visitor:  # a thread alone can go to another network
            return visitor.submit(self._ask, path).result()

    def nodes(self) -> list[dict[str, Any]]:
        """Those that have joined."""
        answer = self.ask("/api/v0/nodes")
        return answer["data"]["result"]["result"] if answer else []

    def _ask(self, path: str) -> Any:
        self.network.visit(0)
        token = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.address + path, headers=token), timeout=10
            ) as answer:
                return json.load(answer)
        except OSError:
            return None


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if find_spec("ray") is None or find_spec("aiohttp_cors") is None:
        return "ray[default] is not installed"
    return network.missing()


@contextmanager
def cluster(nodes: int, cores: int, environment: dict[str, str] | None = None) -> Iterator[Cluster]:
    """Up when all nodes are; gone with the block. `environment` is that of its processes."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder, hosts(nodes + 2) as net:
        made = Cluster(net, nodes)
        common = ["--block", "--disable-usage-stats", f"--object-store-memory={_STORE}"]
        head = ["--head", "--port=6379", "--dashboard-host=0.0.0.0", "--num-cpus=0"]
        node = [f"--address={net.addresses[0]}:6379", f"--num-cpus={cores}"]
        processes: list[Any] = []
        try:
            for host in range(nodes + 1):
                home = Path(folder, str(host))  # a folder for each: they share a disk, which nodes do not expect
                home.mkdir()
                words = [_RAY, "start", *common, *(node if host else head), f"--temp-dir={home}"]
                log = (home / "start.log").open("wb")
                told = {"RAY_TMPDIR": str(home), "RAY_ADDRESS": "", **(environment or {})}
                more = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                processes.append(made.start([*words, f"--node-ip-address={net.addresses[host]}"], told, host, **more))
                if host == 0:
                    _await(lambda: made.ask("/api/version"), processes, folder)
            _await(lambda: len(made.nodes()) == nodes + 1, processes, folder)
            yield made
        finally:
            _end(processes)


def _await(there: Any, processes: list[Any], folder: str) -> None:
    until = time.monotonic() + _PATIENCE
    while not there():
        if time.monotonic() > until or any(process.poll() is not None for process in processes):
            said = "\n".join(log.read_text()[-2000:] for log in sorted(Path(folder).glob("*/start.log")))
            raise RuntimeError(f"Ray did not start:\n{said}")
        time.sleep(0.2)


def _end(processes: list[Any]) -> None:
    """As Ray does it, which takes its own processes along; who does not come to an end is killed with the hosts."""
    for process in reversed(processes):
        process.terminate()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
