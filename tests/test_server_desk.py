"""A server's desk and its workers over real sockets: nothing is lost or applied twice, whatever lines do."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import nn

from slipstream.job.servers import Server
from slipstream.train.server.client import Client
from slipstream.train.server.desk import Desk
from slipstream.train.server.flat import share_out
from slipstream.train.server.tickets import Async

STEPS, TOKEN = 30, "known"


class OverError(Exception):
    """The servers have ended: the launcher now ends the workers that look for them."""


def model() -> dict[str, nn.Parameter]:
    return {"frozen": nn.Parameter(torch.ones(2), requires_grad=False), "bias": nn.Parameter(torch.zeros(3)),
            "matrix": nn.Parameter(torch.zeros(70, 50))}  # fmt: skip


class Loop(threading.Thread):
    """What the loop does with a desk: every gradient is taken off the weights."""

    def __init__(self, host: str) -> None:
        super().__init__(daemon=True)
        with socket.create_server((host, 0)) as free:
            self.address: tuple[str, int] = free.getsockname()
        weights = [weight.detach() for weight in model().values() if weight.requires_grad]
        self.desk = Desk(self.address, TOKEN, weights, Server(kind="server", mode="async"))
        self.desk.open(0, Async(0, STEPS, None))

    def run(self) -> None:
        while self.desk.version < STEPS:
            update, _ = self.desk.next_update()
            for gradients in self.desk.take(update):
                with self.desk.writing:
                    for weight, gradient in zip(self.desk.weights.views, gradients.views, strict=True):
                        weight -= gradient
                self.desk.publish(update, [gradients])
        self.desk.close(5.0, lambda: None)

    def lose_line(self, client: Client) -> None:
        with self.desk._changed:
            self.desk._lines[client._name].close()


@pytest.fixture(params=["127.0.0.1", "127.0.0.2"], ids=["shared memory", "network"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    """At one's own address memory is shared; at another everything travels."""
    loop = Loop(request.param)
    loop.start()
    yield loop
    loop.join(20)


def work(loop: Loop, number: int, lost: int) -> None:
    """Every gradient is one more than what was fetched is less; now and then the server loses the line."""
    with suppress(OverError):
        work_until_the_end(loop, number, lost)


def work_until_the_end(loop: Loop, number: int, lost: int) -> None:
    def beat() -> None:
        if not loop.is_alive():
            raise OverError

    weights = model()
    client = Client([loop.address], TOKEN, weights, beat)
    client.connect(20)
    assert client._lines[0]._apart == (loop.address[0] != "127.0.0.1")
    while True:
        try:
            ticket = client.ask(None)
            while ticket.kind == "train":
                client.fetch(ticket)
                assert all(torch.equal(weight, weight.flatten()[0].expand_as(weight)) for weight in weights.values())
                for weight in weights.values():
                    weight.grad = torch.ones_like(weight)
                if (ticket.number + number) % 5 == 0 and lost:
                    lost -= 1
                    loop.lose_line(client)
                client.push(ticket)
                ticket = client.ask(ticket)
            client.close()
            return
        except ConnectionError:
            client.connect(20)


def test_each_gradient_counts_once_though_lines_are_lost(loop: Loop) -> None:
    workers = [threading.Thread(target=work, args=(loop, number, 3)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert all(bool((weight == -STEPS).all()) for weight in loop.desk.weights.views)


def test_who_does_not_know_the_token_is_not_let_in() -> None:
    loop = Loop("127.0.0.1")
    with pytest.raises(ConnectionError, match="could not be reached"):
        Client([loop.address], "guessed", model(), lambda: None).connect(0.5)
    loop.desk.close(5.0, lambda: None)


def test_tensors_are_shared_out_evenly() -> None:
    sizes = {"a": 70, "b": 40, "c": 30, "d": 20, "e": 10, "f": 10}
    shards = share_out(sizes, 3)
    assert sorted(name for shard in shards for name in shard) == sorted(sizes)
    assert [sum(sizes[name] for name in shard) for shard in shards] == [70, 60, 50]
    with pytest.raises(ValueError, match=r"exchange.servers \(7\) must be at most 6"):
        share_out(sizes, 7)
