"""A crew on another machine: here the head's end of the line, and the other machine's, which does as it is told."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.fleet.crew import CrewHere, State
from slipstream.fleet.failure import Failure
from slipstream.fleet.line import Line, LineLost
from slipstream.fleet.mirror import Mirror
from slipstream.fleet.place import STORE
from slipstream.runs import RunFolder

_TICK = 0.1
_ANSWER = 5.0
"""Seconds that another machine has for what is done in a moment."""


class CrewThere:
    """Ranks of another machine. A thread listens to what it says of them."""

    def __init__(self, line: Line, name: str) -> None:
        self._line, self._name = line, name
        self._states: dict[int, State] = {}
        self._stacks: dict[int, str] = {}
        self._told = time.monotonic()
        self._asked = self._done = 0
        """How many wishes were sent, and how many of them were done when the machine last spoke."""
        self._lost: str | None = None
        self._closed = self._passed_on = False
        self._changed = threading.Condition()
        self._listener = threading.Thread(target=self._listen, name=f"line to {name}", daemon=True)
        self._listener.start()

    def start(self, ranks: Sequence[int], restore: Path | None) -> None:
        with self._changed:
            self._states |= {rank: State(None, None, 0, "start", 0.0) for rank in ranks}
        self._ask("start", ranks=list(ranks), restore=restore and restore.name)

    def states(self) -> dict[int, State]:
        with self._changed:
            since = time.monotonic() - self._told
            if self._lost:
                return {rank: self._gone(rank, state) for rank, state in self._states.items()}
            return {rank: _later(state, since) for rank, state in self._states.items()}

    def _gone(self, rank: int, state: State) -> State:
        if state.code is not None:
            return state
        message = f"machine {self._name} is out of reach: {self._lost}"
        failure = Failure(rank, state.step, state.phase, "MachineLost", message, time=time.time())
        return State(1, failure, state.step, state.phase, state.still)

    def ask_to_stop(self) -> None:
        self._ask("stop")

    def end(self, ranks: Sequence[int]) -> None:
        self._await(self._ask("end", ranks=list(ranks)))

    def stacks(self) -> dict[int, str]:
        self._await(self._ask("stacks"))
        with self._changed:
            return dict(self._stacks)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._await(self._ask("close"))
        self._listener.join(_ANSWER)
        self._line.close()

    def _ask(self, wish: str, **what: Any) -> int:
        with self._changed:
            self._asked += 1
            with suppress(LineLost):  # the listener finds out as well, and says so
                self._line.say({"do": wish, "number": self._asked, **what})
            return self._asked

    def _await(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._done >= number or self._lost is not None, _ANSWER)

    def _listen(self) -> None:
        try:
            while not (self._closed and self._done == self._asked):
                for message in self._line.hear(_TICK):
                    self._take(message)
        except LineLost as error:
            with self._changed:
                self._lost = str(error)
                self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            self._done = message["done"]
            if message.get("asked") and not self._passed_on:
                self._passed_on = True
                os.kill(os.getpid(), signal.SIGTERM)  # as if this machine had been asked
            self._stacks = {int(rank): stack for rank, stack in message["stacks"].items()}
            if self._done == self._asked:  # else it speaks of what was before the last wish
                self._told = time.monotonic()
                self._states |= {int(rank): _state(*values) for rank, values in message["states"].items()}
            self._changed.notify_all()


def _later(state: State, seconds: float) -> State:
    return State(state.code, state.failure, state.step, state.phase, state.still + seconds)


def _state(code: int | None, failure: dict[str, Any] | None, step: int, phase: str, still: float) -> State:
    return State(code, Failure(**failure) if failure else None, step, phase, still)


def follow(line: Line, crew: CrewHere, checkpoints: Path, asked: threading.Event) -> None:
    """Do what the head says, and tell it how the ranks here are, until it closes. Raises LineLost.

    `asked`: somebody wants this machine to end, so that all must save.
    """
    done, said, stacks = 0, 0.0, dict[int, str]()
    told: dict[int, State] = {}
    try:
        while True:
            wishes = line.hear(_TICK)
            for wish in wishes:
                done = wish["number"]
                stacks = _obey(wish, crew, checkpoints) or stacks
            if any(wish["do"] == "close" for wish in wishes):
                break
            states = crew.states()
            if wishes or _news(states, told) or time.monotonic() - said > 1:
                line.say({**_report(done, stacks, states), "asked": asked.is_set()})
                told, said = states, time.monotonic()
    finally:
        crew.close()
    line.say(_report(done, {}, {}))


def _obey(wish: dict[str, Any], crew: CrewHere, checkpoints: Path) -> dict[int, str] | None:
    match wish["do"]:
        case "stacks":
            return crew.stacks()
        case "start":
            crew.start(wish["ranks"], _whole(checkpoints / wish["restore"]) if wish["restore"] else None)
        case "stop":
            crew.ask_to_stop()
        case "end":
            crew.end(wish["ranks"])
    return None


def _whole(checkpoint: Path) -> Path:
    """The head has all of it; where machines share no disk, so must this one."""
    if address := os.environ.get(STORE):
        Mirror(RunFolder(checkpoint.parents[1]), address).complete(checkpoint)
    return checkpoint


def _report(done: int, stacks: dict[int, str], states: dict[int, State]) -> dict[str, Any]:
    return {"done": done, "stacks": stacks, "states": {rank: _plain(state) for rank, state in states.items()}}


def _plain(state: State) -> list[Any]:
    failure = asdict(state.failure) if state.failure else None
    return [state.code, failure, state.step, state.phase, state.still]


def _news(states: dict[int, State], told: dict[int, State]) -> bool:
    """Whether the head should know at once."""
    return any(rank not in told or state.code != told[rank].code for rank, state in states.items())
