"""Tickets of parameter servers, over a thousand random schedules: whoever asks, sends, dies and comes back when."""

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.train.server.tickets import Async, Push, Sync, Tickets

schedules = settings(max_examples=1000, deadline=None)
draws = st.builds(random.Random, st.integers(0, 2**32))


class World:
    """Workers and servers that do the next thing in any order."""

    def __init__(self, draw: random.Random, workers: int, tickets: Tickets) -> None:
        self.draw, self.tickets = draw, tickets
        self.workers = list(range(workers))
        self.holds: dict[int, int] = {}
        self.updates: list[list[Push]] = []

    def run(self, steps: int, restored: Callable[[Tickets], Tickets]) -> None:
        while self.tickets.version < steps:
            before = self.state()
            action = self.draw.choice(["ask", "ask", "send", "send", "apply", "apply", "die", "restore"])
            if action == "restore" and self.draw.random() < 0.1:
                self.tickets = restored(self.tickets)
                self.holds.clear()
            elif action != "restore":
                getattr(self, action)(self.draw.choice(self.workers))
            if before == self.state():
                self.assert_not_stuck()

    def state(self) -> tuple[int, int]:
        return len(self.holds), len(self.updates)

    def ask(self, worker: int) -> None:
        ticket = self.tickets.ask(worker)
        if ticket is None:
            assert worker not in self.holds
            return
        assert worker not in self.holds or self.holds[worker] == ticket.number, "the same again"
        self.holds[worker] = ticket.number

    def send(self, worker: int) -> None:
        if worker in self.holds:
            number = self.holds.pop(worker)
            assert self.tickets.done(worker, number)
            assert not self.tickets.done(worker, number), "only once"

    def apply(self, _worker: int) -> None:
        if update := self.tickets.ready():
            self.tickets.apply(update)
            self.updates.append(update)

    def die(self, worker: int) -> None:
        """Another comes in its place; what it was about to send is void."""
        self.tickets.leave(worker)
        if worker in self.holds:
            assert not self.tickets.done(worker, self.holds.pop(worker))
        self.workers[self.workers.index(worker)] = max(self.workers) + 1

    def assert_not_stuck(self) -> None:
        """Some worker has something to do, or an update is ready, or those who compute will send."""
        if not self.holds and not self.tickets.ready():
            assert any(self.tickets.ask(worker) for worker in self.workers)
            for worker in self.workers:
                self.ask(worker)


@schedules
@given(draws, st.integers(1, 5), st.one_of(st.none(), st.integers(0, 4)), st.integers(1, 12))
def test_asynchronous_updates(draw: random.Random, workers: int, bound: int | None, steps: int) -> None:
    world = World(draw, workers, Async(0, steps, bound))
    world.run(steps, lambda old: Async(old.version, steps, bound, old.late()))
    assert sorted(push.number for (push,) in world.updates) == list(range(steps)), "each batch once"
    assert all(push.staleness <= (steps if bound is None else bound) for (push,) in world.updates)
    assert not world.tickets.late()


@schedules
@given(draws, st.integers(1, 5), st.integers(1, 4), st.integers(1, 8))
def test_synchronous_updates(draw: random.Random, workers: int, shares: int, steps: int) -> None:
    world = World(draw, workers, Sync(0, steps, shares))
    world.run(steps, lambda old: Sync(old.version, steps, shares))
    numbers = [[push.number for push in update] for update in world.updates]
    assert numbers == [list(range(step * shares, (step + 1) * shares)) for step in range(steps)], "always in this order"


def test_a_bound_makes_the_quick_wait_for_the_slow() -> None:
    tickets = Async(0, 100, 2)
    assert tickets.ask(0)
    for _ in range(2):
        ticket = tickets.ask(1)
        assert ticket and tickets.done(1, ticket.number)
        tickets.apply(tickets.ready())
    ticket = tickets.ask(1)
    assert ticket and tickets.done(1, ticket.number)
    assert tickets.ready() == [] and tickets.ask(1) is None
    assert tickets.done(0, 0)
    (push,) = tickets.ready()
    assert (push.worker, push.staleness) == (0, 2)


def test_a_judgement_goes_to_whoever_asks_and_once() -> None:
    tickets = Sync(0, 4, 2)
    tickets.judge("judge")
    first = tickets.ask(7)
    assert first and first.kind == "judge" and tickets.ask(7) == first, "the same again"
    other = tickets.ask(8)
    assert other and other.kind == "train"
    assert tickets.judged(7) and not tickets.judged(8)
    tickets.leave(7)
    again = tickets.ask(9)
    assert again and again.kind == "judge" and not tickets.judged(7)
