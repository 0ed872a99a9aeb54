"""Which machine of a launch this is, where the others find it, and how it finds the first of them, the head."""

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.data.storage import Storage
from slipstream.fleet.line import Address, Line, LineLost, Message, family, same
from slipstream.runs import RunError, write_text

MACHINE, HEAD, ADDRESS, TOKEN = "SLIPSTREAM_MACHINE", "SLIPSTREAM_HEAD", "SLIPSTREAM_ADDRESS", "SLIPSTREAM_TOKEN"
"""What a fleet may tell in the environment: the machine's number from 0 on, `host:port` of the first, the machine's own
address, and a secret that all of them know."""
STORE = "SLIPSTREAM_STORE"
"""The variable that holds where the run's folder is, if not on a disk that all machines share."""
NOTICE = "meeting.json"
_NUMBERED_BY = (MACHINE, "SLURM_NODEID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK")
_AGAIN = 0.2
_HELLO = 10.0
"""Seconds in which who connects must say who he is."""


class Apart(RunError):
    """The machines of a launch are not together, or not any more. To start them again may help."""


@dataclass(frozen=True)
class Place:
    """One machine's place in a launch."""

    machine: int
    machines: int
    notice: "Notice"
    """By which machines find the head where their fleet does not name it."""

    @classmethod
    def of(cls, machines: int, folder: Path) -> "Place":
        """As the fleet has said. Raises RunError."""
        told = machine_number() or ("0" if machines == 1 else "")
        if not told.isdigit() or int(told) >= machines:
            raise RunError(f"{MACHINE} must say which of {machines} machines this is, from 0 on, and is {told!r}")
        return cls(int(told), machines, Notice(folder, os.environ.get(STORE)))

    def gather(self, patience: float, say: Callable[[str], None]) -> list[tuple[Line, Message]]:
        """On the head: the lines to the other machines, in their order, with what each said of itself."""
        if self.machines == 1:
            return []
        found: dict[int, tuple[Line, Message]] = {}
        until = time.monotonic() + patience
        say(f"waiting for {self.machines - 1} more machines")
        with self._listen() as listener:
            token = self._announce(listener.getsockname())
            while len(found) < self.machines - 1:
                listener.settimeout(max(0.01, until - time.monotonic()))
                try:
                    line = Line(listener.accept()[0])
                except TimeoutError:
                    missing = sorted(set(range(1, self.machines)) - set(found))
                    raise Apart(f"machines {missing} of {self.machines} have not come in {patience:.0f} s") from None
                hello = _greeting(line)
                if hello and same(token, hello.get("token")) and hello.get("machine") in range(1, self.machines):
                    found[hello["machine"]] = line, hello
                else:
                    line.close()
        if HEAD not in os.environ:
            self.notice.take_down()
        return [found[number] for number in sorted(found)]

    def _listen(self) -> socket.socket:
        host, port = own_address(), 0
        if told := os.environ.get(HEAD):
            port = _split(told)[1]
        try:
            return socket.create_server((host, port), family=family(host), backlog=128)
        except OSError as error:
            raise RunError(f"the machines cannot meet at {host}:{port}: {error.strerror}") from error

    def _announce(self, address: Sequence[object]) -> str:
        if HEAD in os.environ:
            return os.environ.get(TOKEN, "")
        token = secrets.token_hex(16)
        self.notice.put_up(json.dumps({"address": list(address[:2]), "token": token}))
        return token

    def join(self, patience: float, **facts: object) -> Line:
        """On another machine: the line to the head, who has been told these facts."""
        until = time.monotonic() + patience
        trouble = "it has not said where it is"
        while time.monotonic() < until:
            if told := self._head():
                address, token = told
                try:
                    line = Line.to(address, _HELLO)
                    line.say({"token": token, "machine": self.machine, "address": line.here, **facts})
                except OSError as error:
                    trouble = f"{address[0]}:{address[1]}: {error}"
                else:
                    return line
            time.sleep(_AGAIN)
        raise Apart(f"machine {self.machine} has not found the first one in {patience:.0f} s: {trouble}")

    def _head(self) -> tuple[Address, str] | None:
        if told := os.environ.get(HEAD):
            return _split(told), os.environ.get(TOKEN, "")
        try:
            said = json.loads(self.notice.read())
            return (said["address"][0], int(said["address"][1])), said["token"]
        except (OSError, ValueError):  # not there yet
            return None


@dataclass(frozen=True)
class Notice:
    """A file in the run's folder, on the disk or in the storage that all machines share."""

    folder: Path
    store: str | None

    def put_up(self, text: str) -> None:
        if self.store:
            Storage(self.store).write(NOTICE, text.encode())
        else:
            write_text(self.folder / NOTICE, text, secret=True)

    def read(self) -> str:
        """Raises OSError if it is not there."""
        return str(Storage(self.store).read(NOTICE), "utf-8") if self.store else (self.folder / NOTICE).read_text()

    def take_down(self) -> None:
        if self.store:
            Storage(self.store).delete(NOTICE)
        else:
            (self.folder / NOTICE).unlink(missing_ok=True)


def machine_number() -> str:
    """As the fleet has it; empty, if it has said nothing."""
    return next((os.environ[name] for name in _NUMBERED_BY if os.environ.get(name)), "")


def _split(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise RunError(f"{HEAD} must be host:port, and is {text!r}")
    return host.strip("[]"), int(port)


def _greeting(line: Line) -> Message | None:
    try:
        return line.hear_one(_HELLO)
    except LineLost:
        return None


def own_address() -> str:
    """Where other machines reach this one."""
    if told := os.environ.get(ADDRESS):
        return told
    if node := os.environ.get("SLURMD_NODENAME"):
        return _address_by_slurm(node)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise RunError(f"this machine's own name has no address ({error}); set {ADDRESS}") from error


def _address_by_slurm(node: str) -> str:
    """By which Slurm itself reaches a node."""
    asked = subprocess.run(["scontrol", "show", "node", node, "-o"], capture_output=True, text=True, check=False)
    named = next((word.partition("=")[2] for word in asked.stdout.split() if word.startswith("NodeAddr=")), node)
    try:
        return socket.gethostbyname(named)
    except OSError as error:
        raise RunError(f"Slurm's node {node} is at {named}, which has no address ({error})") from error
