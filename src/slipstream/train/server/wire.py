"""What workers and servers say to each other: a head of fixed size, then bytes as they lie in memory.

Who connects must know the run's token: it answers the server's random challenge (HMAC-SHA256). A link may be down for
a while: TCP sends again what was lost. A peer that has not answered for `SILENCE` seconds is taken for gone.
"""

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

SILENCE = 60
"""Seconds."""
_HEAD = struct.Struct("<16sqqddQ")
_CHALLENGE, _PROOF = 16, 32
_SECOND = struct.pack("ll", 1, 0)


@dataclass(frozen=True)
class Message:
    """The head. What a field means depends on the word."""

    word: str
    number: int = 0
    version: int = 0
    loss: float = 0.0
    weight: float = 0.0
    size: int = 0
    """Bytes that follow."""


class Line:
    """One connection between a worker and a server. `beat` is called now and then while it waits."""

    def __init__(self, connection: socket.socket, beat: Callable[[], None]) -> None:
        self._socket, self.beat = connection, beat
        self._socket.settimeout(None)
        for level, option, value in _options():
            self._socket.setsockopt(level, option, value)

    def send(self, message: Message, content: Any = b"") -> None:
        """Send a head and the bytes of any buffer after it."""
        body = memoryview(content).cast("B")
        head = _HEAD.pack(
            message.word.encode(), message.number, message.version, message.loss, message.weight, len(body)
        )
        rest = [memoryview(head), body]
        while rest:
            sent = self._wait_for(partial(self._socket.sendmsg, rest))
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][sent:]

    def receive(self) -> Message:
        """The next head; what follows must be received next."""
        head = bytearray(_HEAD.size)
        self.receive_into(head)
        word, *numbers = _HEAD.unpack(head)
        return Message(word.rstrip(b"\0").decode("ascii", "replace"), *numbers)

    def receive_into(self, buffer: Any) -> None:
        """Fill a buffer."""
        rest = memoryview(buffer).cast("B")
        while rest:
            count = self._wait_for(partial(self._socket.recv_into, rest, 0, socket.MSG_WAITALL))
            if not count:
                raise ConnectionResetError("the other end has closed the connection")
            rest = rest[count:]

    def _wait_for(self, some: Callable[[], int]) -> int:
        """How many bytes have passed, once some have."""
        while True:
            try:
                return some()
            except BlockingIOError:  # none have in a second
                self.beat()
            except OSError as error:
                raise ConnectionError(f"the connection is lost: {error}") from error

    def receive_bytes(self, size: int) -> bytes:
        """A few bytes."""
        buffer = bytearray(size)
        self.receive_into(buffer)
        return bytes(buffer)

    @property
    def is_within_machine(self) -> bool:
        """Whether both ends have one address."""
        mine, other = self._socket.getsockname(), self._socket.getpeername()
        return bool(mine[0] == other[0])

    def close(self) -> None:
        """Part, and wake up whoever waits on this line."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def admit(line: Line, token: str) -> int | None:
    """The server's side of an introduction: which worker it is; None, if it does not know the token."""
    challenge = os.urandom(_CHALLENGE)
    line.send(Message("challenge"), challenge)
    hello = line.receive()
    if hello.word != "hello" or hello.size != _PROOF:
        return None
    known = hmac.compare_digest(line.receive_bytes(_PROOF), _proof(token, challenge, hello.number))
    return hello.number if known else None


def introduce(line: Line, token: str, worker: int) -> Message:
    """The worker's side: what the server answers."""
    line.receive()
    challenge = line.receive_bytes(_CHALLENGE)
    line.send(Message("hello", worker), _proof(token, challenge, worker))
    return line.receive()


def _proof(token: str, challenge: bytes, worker: int) -> bytes:
    return hmac.new(token.encode(), challenge + worker.to_bytes(8, "little"), hashlib.sha256).digest()


def _options() -> list[tuple[int, int, Any]]:
    """No waiting for more to send; notice a peer that is gone; come back every second from a wait."""
    options: list[tuple[int, int, Any]] = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SECOND),
        (socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SECOND),
    ]
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE // 4), ("TCP_KEEPINTVL", SILENCE // 4), ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", SILENCE * 1000),
    ):  # fmt: skip
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options
