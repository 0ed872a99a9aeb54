"""A server's desk: workers come to it for tickets and weights, and leave their gradients. One thread for each of them.

The first server's desk hands out the tickets. What all threads share is changed under one lock, `_changed`; weights are
changed by the loop alone, which no other thread may then be copying (`writing`).
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from slipstream.job.servers import Server
from slipstream.train.server.addresses import Address
from slipstream.train.server.flat import Flat
from slipstream.train.server.shared import Shared
from slipstream.train.server.tickets import Push, Ticket, Tickets
from slipstream.train.server.wire import Line, Message, admit

Figures = dict[str, float]
_INTRODUCTION = 5
"""Seconds."""
_A_WHILE = 1.0
"""Seconds that the loop waits before it gives a sign of life."""


@dataclass
class Visit:
    """A worker at the desk."""

    line: Line
    worker: int
    shared: Shared | None = None
    """Where it is on the same machine."""


class Desk:
    """What one server has for workers."""

    def __init__(self, address: Address, token: str, weights: Sequence[Tensor], setting: Server) -> None:
        self.weights = Flat(weights)
        self.version = 0
        self.tickets: Tickets | None = None
        """On the first server."""
        self.writing = threading.Lock()
        self._token, self._setting = token, setting
        self._fetched: dict[int, Flat] = {}
        """For delay compensation: the weights that each worker has fetched last."""
        self._changed = threading.Condition()
        self._staged: dict[tuple[int, int], Flat] = {}
        """Gradients by ticket and worker."""
        self._said: dict[tuple[int, int], tuple[float, float]] = {}
        """Loss and weight of what is done, by the same."""
        self._free: list[Flat] = []
        self._lines: dict[int, Line] = {}
        self._judgement: Figures | None = None
        self._listener = socket.create_server(address, backlog=128, family=_family(address))

    def open(self, version: int, tickets: Tickets | None) -> None:
        """Let workers come. The weights have had so many updates."""
        self.version, self.tickets = version, tickets
        threading.Thread(target=self._accept, daemon=True, name="door").start()

    def has_worker(self) -> bool:
        """Whether one is here, or has come in a second."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._lines), _A_WHILE)

    # --- for the loop ------------------------------------------------------------------------------------------------

    def next_update(self) -> tuple[list[Push], list[tuple[float, float]]]:
        """The gradients of the next update with loss and weight of each; none, if they do not come in a second. On the
        first server."""
        assert self.tickets, "the first server has them"
        tickets = self.tickets
        with self._changed:
            self._changed.wait_for(tickets.ready, _A_WHILE)
            update = tickets.ready()
            return update, [self._said[push.number, push.worker] for push in update]

    def take(self, update: Sequence[Push]) -> list[Flat]:
        """The gradients of an update; others for the same tickets are void."""
        with self._changed:
            taken = [self._staged.pop((push.number, push.worker)) for push in update]
            numbers = {push.number for push in update}
            for key in [key for key in self._staged if key[0] in numbers]:
                self._give_back(self._staged.pop(key))
            for key in [key for key in self._said if key[0] in numbers]:
                del self._said[key]
            return taken

    def fetched(self, worker: int) -> Flat | None:
        """The weights that this worker's gradient was made with, where they are kept."""
        with self._changed:
            return self._fetched.get(worker)

    def publish(self, update: Sequence[Push], used: Sequence[Flat]) -> list[int]:
        """The update is in the weights: who waits for it may go on. Which batches are late now."""
        with self._changed:
            self.version += 1
            self._give_back(*used)
            if self.tickets:
                self.tickets.apply(update)
            self._changed.notify_all()
            return self.tickets.late() if self.tickets else []

    def ask_for_judgement(self, what: str) -> None:
        """Have some worker judge the weights as they are."""
        assert self.tickets, "the first server asks"
        with self._changed:
            self._judgement = None
            self.tickets.judge(what)
            self._changed.notify_all()

    def judgement(self) -> Figures | None:
        """What it says; None, if it does not come in a second."""
        with self._changed:
            self._changed.wait_for(lambda: self._judgement is not None, _A_WHILE)
            return self._judgement

    def close(self, patience: float, beat: Callable[[], None]) -> None:
        """Tell the workers that it is over, and wait for so many seconds at most until all have heard it: who has not
        looks for the servers for long."""
        until = time.monotonic() + patience
        with self._changed:
            if self.tickets:
                self.tickets.ended = True
            self._changed.notify_all()
            while self.tickets and self._lines and time.monotonic() < until:
                self._changed.wait(_A_WHILE)
                beat()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # --- for workers -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._receive, args=(connection,), daemon=True, name="desk").start()

    def _receive(self, connection: socket.socket) -> None:
        """One worker, from its coming to its going."""
        worker, line = None, Line(connection, _patience(_INTRODUCTION))
        with suppress(OSError, ValueError):
            worker = admit(line, self._token)
            if worker is not None:
                line.beat = lambda: None
                line.send(Message("welcome", self.weights.bytes.numel(), self.version))
                with self._changed:
                    self._lines[worker] = line
                    self._changed.notify_all()
                visit = Visit(line, worker)
                while self._serve(visit):
                    pass
        line.close()
        with self._changed:
            if worker is not None and self._lines.get(worker) is line:  # it has not come back by another
                del self._lines[worker]
                if self.tickets:
                    self.tickets.leave(worker)
                if not any(by == worker for _, by in self._said):  # its gradient may still be wanted
                    self._fetched.pop(worker, None)
            self._changed.notify_all()

    def _serve(self, visit: Visit) -> bool:
        """Answer one message; False: there will be no more."""
        message = visit.line.receive()
        if message.word == "ask" and message.size < 2**16:
            ticket = self._answer(visit.worker, message, visit.line.receive_bytes(message.size))
            visit.line.send(Message(ticket.kind, ticket.number, ticket.version))
            return ticket.kind != "end"
        if message.word == "share" and message.size < 2**8:
            name = visit.line.receive_bytes(message.size).decode("ascii", "replace")
            visit.shared = Shared.find(name, self.weights.views)
            visit.line.send(Message("shared" if visit.shared else "apart"))
        elif message.word == "fetch":
            self._send_weights(visit, message)
        elif message.word == "push" and message.size == (0 if visit.shared else self.weights.bytes.numel()):
            self._stage(visit, message.number)
        else:
            raise ValueError(f"not a message: {message}")
        return True

    def _answer(self, worker: int, message: Message, content: bytes) -> Ticket:
        """Note what a worker has done, and find it something to do."""
        assert self.tickets, "workers ask the first server"
        with self._changed:
            if message.number >= 0 and self.tickets.done(worker, message.number):
                self._said[message.number, worker] = message.loss, message.weight
            if content and self.tickets.judged(worker):
                self._judgement = json.loads(content)
                self.tickets.judge(None)
            self._changed.notify_all()
            while (ticket := self.tickets.ask(worker)) is None:
                self._changed.wait()
            return ticket

    def _send_weights(self, visit: Visit, message: Message) -> None:
        with self._changed:
            while self.version < message.version:
                self._changed.wait()
        answer = Message("weights", version=self.version)
        keep = self._setting.compensation is not None and message.number >= 0
        if self._setting.mode == "sync" and not visit.shared:
            # They stay as they are: a step does not change the weights before all its parts are there.
            visit.line.send(answer, self.weights.memory)
            return
        copy = visit.shared.weights if visit.shared and not keep else self._room()
        with self.writing:
            copy.bytes.copy_(self.weights.bytes)
        if visit.shared and keep:
            visit.shared.weights.bytes.copy_(copy.bytes)
        visit.line.send(answer, b"" if visit.shared else copy.memory)
        with self._changed:
            if keep and visit.worker in self._fetched:
                self._give_back(self._fetched[visit.worker])
            if keep:
                self._fetched[visit.worker] = copy
            else:
                self._give_back(copy)

    def _stage(self, visit: Visit, number: int) -> None:
        if visit.shared and self._setting.mode == "async":  # until it is applied the worker gets no other ticket
            gradient = visit.shared.gradients
        else:
            gradient = self._room()
            if visit.shared:
                gradient.bytes.copy_(visit.shared.gradients.bytes)
            else:
                visit.line.receive_into(gradient.memory)
        with self._changed:
            if (number, visit.worker) in self._staged:
                self._give_back(self._staged[number, visit.worker])
            self._staged[number, visit.worker] = gradient
        visit.line.send(Message("taken", number))

    def _give_back(self, *flats: Flat) -> None:
        self._free += [flat for flat in flats if flat.is_own]

    def _room(self) -> Flat:
        with self._changed:
            if self._free:
                return self._free.pop()
        return Flat(self.weights.views)


def _patience(seconds: int) -> Callable[[], None]:
    """Something to call every second of a wait, which ends it."""
    left = iter(range(seconds))

    def wait() -> None:
        if next(left, None) is None:
            raise TimeoutError("no answer")

    return wait


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET
