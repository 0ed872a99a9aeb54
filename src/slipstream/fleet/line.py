"""A line between two machines of a launch: JSON, a message a line."""

import json
import secrets
import select
import socket
import threading
import time
from typing import Any

Address = tuple[str, int]
Message = dict[str, Any]
SILENCE = 30.0
"""Seconds without a word after which the other end is taken for gone. Each says something every second."""
_WORD = 1.0
_TURN = 0.2


class LineLost(OSError):
    """The other end is gone."""


class Line:
    """One end. Whoever holds it calls `hear` often, which also keeps the other end content."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE)
        self._connection, self._rest = connection, b""
        self._speaking = threading.Lock()
        self._waiting: list[Message] = []
        self._heard = self._spoke = time.monotonic()
        self.here: str = connection.getsockname()[0]
        """This machine's address, as the other end sees it."""

    @classmethod
    def to(cls, address: Address, patience: float) -> "Line":
        """Raises OSError."""
        return cls(socket.create_connection(address, patience))

    def say(self, message: Message) -> None:
        """Raises LineLost."""
        try:
            with self._speaking:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LineLost(f"the line is broken: {error}") from error
        self._spoke = time.monotonic()

    def hear(self, patience: float = 0.0) -> list[Message]:
        """What has come, waiting for so many seconds if nothing has. Raises LineLost."""
        if time.monotonic() - self._spoke > _WORD:
            self.say({})
        if select.select([self._connection], [], [], 0.0 if self._waiting else patience)[0]:
            self._rest += self._read()
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > SILENCE:
            raise LineLost(f"nothing was heard for {SILENCE:.0f} s")
        *lines, self._rest = self._rest.split(b"\n")
        try:
            heard = [*self._waiting, *(message for line in lines if (message := json.loads(line)))]
        except ValueError:
            raise LineLost("what came is no message") from None
        self._waiting = []
        return heard

    def hear_one(self, patience: float) -> Message | None:
        """The next message alone; None, if none comes. Raises LineLost."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if heard := self.hear(_TURN):
                self._waiting = heard[1:]
                return heard[0]
        return None

    def _read(self) -> bytes:
        try:
            data = self._connection.recv(2**16)
        except OSError as error:
            raise LineLost(f"the line is broken: {error}") from error
        if not data:
            raise LineLost("the other end has closed the line")
        return data

    def close(self) -> None:
        self._connection.close()


def same(one: str, other: object) -> bool:
    """Whether a secret is the right one, in a time that tells nothing about it."""
    return isinstance(other, str) and secrets.compare_digest(one.encode(), other.encode())


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens at just now."""
    held = [socket.create_server((host, 0), family=family(host)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def interface_of(address: str) -> str | None:
    """The network interface that has this address, which gloo must be told; None where that cannot be found out."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                try:
                    found = fcntl.ioctl(asking, 0x8915, name.encode()[:15].ljust(40, b"\0"))  # SIOCGIFADDR
                except OSError:  # it has none
                    continue
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    except (ImportError, OSError):  # not Linux
        pass
    return None
