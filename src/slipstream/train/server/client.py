"""A worker's lines to all servers."""

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from slipstream.train.server.addresses import Address
from slipstream.train.server.desk import Figures
from slipstream.train.server.flat import Flat, share_out
from slipstream.train.server.shared import Shared
from slipstream.train.server.tickets import Ticket
from slipstream.train.server.wire import Line, Message, introduce

_PAUSE = 0.2
"""Seconds between attempts to reach a server."""
_ATTEMPT = 10.0


class Client:
    """What a worker says to the servers. When a line is lost, ConnectionError: then `connect`, and ask anew."""

    def __init__(
        self,
        servers: Sequence[Address],
        token: str,
        weights: Mapping[str, nn.Parameter],
        beat: Callable[[], None],
        rank: int = 0,
    ) -> None:
        self._addresses, self._token, self._beat, self._rank = servers, token, beat, rank
        self._name = secrets.randbits(62)
        names = share_out({name: weight.nbytes for name, weight in weights.items()}, len(servers))
        self._shards = [[weights[name] for name in shard if weights[name].requires_grad] for shard in names]
        self._lines: list[_Shard] = []

    def connect(self, patience: float) -> None:
        """Reach all servers. Raises ConnectionError when one cannot be reached for so many seconds."""
        self.close()
        until = time.monotonic() + patience
        while not self._reach_all():
            if time.monotonic() > until:
                where = ", ".join(f"{host}:{port}" for host, port in self._addresses)
                raise ConnectionError(f"the servers at {where} could not be reached for {patience:.0f} s")
            self._beat()
            time.sleep(_PAUSE)

    def ask(
        self, done: Ticket | None, loss: float = 0.0, weight: float = 0.0, figures: Figures | None = None
    ) -> Ticket:
        """Say what was done, and get the next ticket."""
        number = done.number if done and figures is None else -1
        content = json.dumps(figures).encode() if figures else b""
        first = self._lines[0].line
        first.send(Message("ask", number, loss=loss, weight=weight), content)
        answer = first.receive()
        if answer.word == "taken":  # the push before it, which the same server has had first
            answer = first.receive()
        return Ticket(answer.word, answer.number, answer.version)

    def fetch(self, ticket: Ticket) -> None:
        """Take over the servers' weights."""
        for shard in self._in_turn():
            shard.line.send(Message("fetch", ticket.number, ticket.version))
        for shard in self._in_turn():
            shard.take_weights()

    def push(self, ticket: Ticket) -> None:
        """Send the gradients, and forget them; return when all servers have them but the first, who is asked next."""
        for shard in self._in_turn():
            shard.send_gradients(ticket)
        for shard in self._lines[1:]:
            _expect(shard.line.receive(), "taken")

    def close(self) -> None:
        """Part from all."""
        for shard in self._lines:
            shard.line.close()
        self._lines = []

    def _in_turn(self) -> "list[_Shard]":
        """Each worker begins with another server, so that the links of all are in use."""
        first = self._rank % len(self._lines) if self._lines else 0
        return self._lines[first:] + self._lines[:first]

    def _reach_all(self) -> bool:
        with suppress(OSError):
            for address, weights in zip(self._addresses, self._shards, strict=True):
                line = Line(socket.create_connection(address, _ATTEMPT), self._beat)
                self._lines.append(_Shard(line, weights))
                self._lines[-1].greet(self._token, self._name)
            return True
        self.close()
        return False


class _Shard:
    """What one server has, and the way to it."""

    def __init__(self, line: Line, weights: list[nn.Parameter]) -> None:
        self.line, self._parameters = line, weights
        self._weights: list[Tensor] = [weight.detach() for weight in weights]
        self._gradients = self._fetched = Flat(())
        self._apart = True
        self._copies = any(weight.device.type != "cpu" for weight in weights)

    def greet(self, token: str, name: int) -> None:
        """Introduce oneself, and share memory with a server of this machine."""
        welcome = introduce(self.line, token, name)
        _expect(welcome, "welcome")
        if welcome.number != Flat.size(self._weights):
            raise ValueError("the server has another model than this worker: both must run the same job")
        shared = Shared.create(self._weights) if self.line.is_within_machine else None
        if shared:
            self.line.send(Message("share"), shared.file.name.encode())
            self._apart = self.line.receive().word != "shared"
            shared.file.unlink()
        if shared and not self._apart:
            self._gradients, self._fetched = shared.gradients, shared.weights
        else:
            self._gradients, self._fetched = Flat(self._weights), Flat(self._weights)
        if not self._copies:  # the model computes with what is fetched, where it is
            for weight, view in zip(self._parameters, self._fetched.views, strict=True):
                weight.data = view
            self._weights = self._fetched.views  # or the memory that they had before would stay

    def take_weights(self) -> None:
        """Into the model."""
        _expect(self.line.receive(), "weights")
        if self._apart:
            self.line.receive_into(self._fetched.memory)
        if self._copies:
            torch._foreach_copy_(self._weights, self._fetched.views)

    def send_gradients(self, ticket: Ticket) -> None:
        """Out of the model, which has none then."""
        for weight, view in zip(self._parameters, self._gradients.views, strict=True):
            view.zero_() if weight.grad is None else view.copy_(weight.grad)
            weight.grad = None
        self.line.send(Message("push", ticket.number), self._gradients.memory if self._apart else b"")


def _expect(message: Message, word: str) -> None:
    if message.word != word:
        raise ConnectionError(f"the server answered {message.word!r} where {word!r} was due")
