"""A worker's life with servers: take a ticket, fetch weights, compute, send the gradient; until it is over."""

import math

import torch

from slipstream.data import open_dataset
from slipstream.job import Job
from slipstream.job.servers import Server
from slipstream.plan import Plan
from slipstream.runs import Pulse
from slipstream.train import tasks
from slipstream.train.batches import Batches, Share
from slipstream.train.compiled import await_compiler
from slipstream.train.models import build_to_split
from slipstream.train.precision import set_arithmetic, weight_dtype
from slipstream.train.server.addresses import addresses, token
from slipstream.train.server.client import Client
from slipstream.train.server.served import alone
from slipstream.train.server.tickets import Ticket
from slipstream.train.tally import refuse_nonfinite
from slipstream.train.validation import judge
from slipstream.train.worker import Worker
from slipstream.train.world import World, device_of


def work(job: Job, plan: Plan, rank: int, pulse: Pulse) -> None:
    """Until the servers say that it is over. A lost line is made anew, and then what was under way begins again."""
    with pulse.during("build"):
        hand = Hand(job, plan, rank, pulse)
        client = Client(addresses(hand.setting.servers), token(), hand.weights(), pulse.beat, rank)
    with pulse.during("exchange"):
        client.connect(job.limits.first_step)
    while True:
        try:
            hand.work_through(client)
            return
        except ConnectionError:
            with pulse.during("exchange"):
                client.connect(job.limits.first_step)


class Hand:
    """One worker: the whole model, and any part of any batch."""

    def __init__(self, job: Job, plan: Plan, rank: int, pulse: Pulse) -> None:
        assert isinstance(job.exchange, Server)
        set_arithmetic(job, plan)
        self.setting, self._job, self._pulse = job.exchange, job, pulse
        dataset, world = open_dataset(job), World.of_one(device_of(rank, plan.device))
        cut = plan if job.exchange.mode == "sync" else alone(plan)
        self._batches = [Batches(job, cut, dataset, share) for share in range(cut.layout.replicate)]
        torch.manual_seed(job.seed)
        plain = build_to_split(job, dataset.facts, world.device, weight_dtype(plan))
        self._worker = Worker(job, alone(plan), world, pulse, plain, dataset.facts.white)
        await_compiler()

    def weights(self) -> dict[str, torch.nn.Parameter]:
        """By name."""
        return {part.name: part.weight for part in self._worker.model.parts}

    def work_through(self, client: Client) -> None:
        """Ticket after ticket."""
        with self._pulse.during("exchange"):
            ticket = client.ask(None)
        while ticket.kind != "end":
            with self._pulse.during("exchange"):
                client.fetch(ticket)
            ticket = self._train(client, ticket) if ticket.kind == "train" else self._judge(client, ticket)
        client.close()

    def _train(self, client: Client, ticket: Ticket) -> Ticket:
        step, part = divmod(ticket.number, len(self._batches))
        self._pulse.step = step + 1
        with self._pulse.during("data"):
            share = self._batches[part].of_step(step)
        losses = self._worker.forward_backward(share, 1.0)
        found = losses.tolist()
        if self._job.train.on_nonfinite == "stop":
            refuse_nonfinite(found, share, step + 1)
        with self._pulse.during("exchange"):
            client.push(ticket)
            return client.ask(ticket, math.fsum(found), self._weight(share))

    def _weight(self, share: Share) -> float:
        return float(sum(tasks.weight(self._job.task, micro.targets) for micro in share.micro_batches))

    def _judge(self, client: Client, ticket: Ticket) -> Ticket:
        batches = self._batches[0]
        with self._pulse.during("evaluate"):
            samples = batches.held_out_samples(everything=ticket.kind == "judge all")
            figures = judge(self._worker, batches, samples, self._pulse.beat)
        if figures is None:
            raise batches.lost or AssertionError("it says why")
        with self._pulse.during("exchange"):
            return client.ask(ticket, figures=figures)
