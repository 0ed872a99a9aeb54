"""A Ray cluster by its dashboard: where it is, and what it is asked and told there. Ray itself is not needed for it."""

import json
import os
import re
import socket
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.fleet.base import FleetError

PORT = 8265
"""Where a dashboard listens if nobody said otherwise."""
_PATIENCE = 5.0
_PROBE = 1.0


def find_dashboard(told: str) -> str | None:
    """The address of a cluster's dashboard; None if `auto` finds none. Raises FleetError."""
    address = os.environ.get("RAY_ADDRESS", "") if told == "auto" else told
    if address.startswith(("http://", "https://")):
        return address.rstrip("/")
    if address not in ("", "auto", "local"):
        return f"http://{_host(address)}:{PORT}"
    here = None if address == "local" else _running_here()
    if here is None:
        return None
    for host in (here, "127.0.0.1"):
        if _answers(host, PORT):
            return f"http://{host}:{PORT}"
    raise FleetError(
        f"a Ray cluster runs at {here}, but no dashboard answers at port {PORT}; start it with `ray start --head "
        "--include-dashboard=true` (it needs ray[default]), or set machines.ray.address to http://HOST:PORT"
    )


def _host(address: str) -> str:
    bare = address.removeprefix("ray://")
    host, _, port = bare.rpartition(":")
    if not host or not port.isdigit() or "/" in bare:
        raise FleetError(
            f"machines.ray.address: {address!r} is none; http://HOST:{PORT}, ray://HOST:PORT, HOST:PORT and auto are"
        )
    return host


def _running_here() -> str | None:
    """The host of the cluster that was last started on this machine, if it lives."""
    noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    try:
        host, _, port = noted.read_text().strip().rpartition(":")
    except OSError:
        return None
    return host if host and port.isdigit() and _answers(host, int(port)) else None


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), _PROBE).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Node:
    """A machine of a cluster."""

    address: str
    cores: int
    gpus: int
    memory: int
    """Bytes."""
    kind: str
    """Of its GPUs."""
    free_cores: int
    free_gpus: int


class Dashboard:
    """Asked over HTTP. Everything raises FleetError."""

    def __init__(self, address: str) -> None:
        self.address = address

    def nodes(self) -> list[Node]:
        """All that live, with what nobody has taken."""
        self._version  # noqa: B018  (says it best if there is no dashboard)
        known = self._ask("/api/v0/nodes?detail=true&limit=10000")["data"]["result"]["result"]
        used = self._ask("/nodes?view=summary")["data"].get("nodeLogicalResources") or {}
        return [_node(each, used.get(each["node_id"], "")) for each in known if each["state"] == "ALIVE"]

    def submit(self, body: dict[str, Any]) -> None:
        """Send a job."""
        self._version  # noqa: B018
        self._ask("/api/jobs/", body)

    def job(self, name: str) -> dict[str, Any] | None:
        """What is known of a job; None if nothing is."""
        found: dict[str, Any] | None = self._ask(f"/api/jobs/{name}", unless=404)
        return found

    def group(self, name: str) -> dict[str, Any] | None:
        """The newest placement group of this name."""
        asked = urllib.parse.urlencode(
            {"detail": "true", "filter_keys": "name", "filter_predicates": "=", "filter_values": name}
        )
        found = self._ask(f"/api/v0/placement_groups?{asked}")["data"]["result"]["result"]
        return found[-1] if found else None

    def logs(self, name: str) -> str:
        """What a job's driver has said."""
        found = self._ask(f"/api/jobs/{name}/logs", unless=404)
        return str(found["logs"]) if found else ""

    def stop(self, name: str) -> None:
        """Ask a job to stop."""
        self._ask(f"/api/jobs/{name}/stop", {})

    @cached_property
    def _version(self) -> str:
        try:
            return str(self._ask("/api/version", unless=404)["ray_version"])
        except (KeyError, TypeError):
            raise FleetError(f"what answers at {self.address} is no dashboard of Ray") from None

    def _ask(self, path: str, body: dict[str, Any] | None = None, unless: int = 0) -> Any:
        """What the dashboard answers; None if that is the code `unless`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, _headers())
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == unless:
                return None
            raise FleetError(self._refusal(error)) from error
        except (OSError, ValueError) as error:
            if isinstance(error, json.JSONDecodeError):
                raise FleetError(f"what answers at {self.address} is no dashboard of Ray") from error
            reason = getattr(error, "reason", error)
            raise FleetError(
                f"no dashboard of Ray answers at {self.address} ({reason}); machines.ray.address or RAY_ADDRESS says "
                f"where it is: http://HOST:{PORT}"
            ) from error

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        if error.code in (401, 403):
            return (
                f"the cluster at {self.address} wants another token, or has none from you; set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH for a file with it"
            )
        said = error.read().decode(errors="replace").strip().splitlines() or [str(error.reason)]
        return f"Ray refuses ({error.code}): {said[-1]}"


def _headers() -> dict[str, str]:
    """With a token only where Ray is told to use one, as its own programs do it."""
    headers = {"Content-Type": "application/json"}
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" and (token := _token()):
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _token() -> str:
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise FleetError(
            f"RAY_AUTH_MODE is token, and {path} has none ({error.strerror}); set RAY_AUTH_TOKEN"
        ) from error


def _node(known: dict[str, Any], used: str) -> Node:
    total: dict[str, float] = known["resources_total"]
    kinds = [name.partition(":")[2] for name in total if name.startswith("accelerator_type:")]
    taken = {name: float(number) for number, name in re.findall(r"^([\d.]+)/[\d.]+ (CPU|GPU)\b", used, re.MULTILINE)}
    cores, gpus = total.get("CPU", 0), total.get("GPU", 0)
    return Node(
        known["node_ip"], int(cores), int(gpus), int(total.get("memory", 0)), kinds[0] if kinds else "gpu",
        int(cores - taken.get("CPU", 0)), int(gpus - taken.get("GPU", 0)),
    )  # fmt: skip
