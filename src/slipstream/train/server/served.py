"""What the loop runs on a server: gradients come from workers, not from a forward and backward of its own.

To the loop a server is a worker among the other servers: their process group sums norms, agrees on when to stop and
writes checkpoints. The first one decides which gradients make the next update and tells the others.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.data import Dataset
from slipstream.job import Job
from slipstream.job.servers import Server
from slipstream.plan import Plan
from slipstream.runs import Pulse
from slipstream.train import tasks
from slipstream.train.batches import Batches, Share
from slipstream.train.exchange.base import Kept, Traffic
from slipstream.train.server.addresses import addresses, token
from slipstream.train.server.desk import Desk, Figures
from slipstream.train.server.flat import Flat, share_out
from slipstream.train.server.tickets import Async, Push, Sync, Tickets
from slipstream.train.worker import Worker
from slipstream.train.world import World


def alone(plan: Plan) -> Plan:
    """The plan of one who holds the whole model."""
    return plan.model_copy(update={"layout": plan.layout.model_copy(update={"replicate": 1})})


class Calls(Batches):
    """The steps of a run for one who has no samples of them."""

    def from_sample(self, seen: int, pulse: Pulse) -> Iterator[Share]:  # noqa: ARG002
        """The steps after `seen` samples."""
        starts = self.timeline.starts
        for step in range(starts.index(seen), self.timeline.steps):
            yield Share(starts[step], starts[step + 1] - starts[step], self.timeline.samples, [])


class Served:
    """A server, in the place of a worker and of its exchange."""

    behind = 0

    def __init__(self, job: Job, plan: Plan, world: World, pulse: Pulse, plain: nn.Module, dataset: Dataset) -> None:
        assert isinstance(job.exchange, Server)
        self._job, self._setting, self._world, self._pulse = job, job.exchange, world, pulse
        self._shares = plan.layout.replicate
        self.batches = Calls(job, alone(plan), dataset, 0)
        whole = alone(plan).model_copy(update={"compile": False})
        self.model = Worker(job, whole, World.of_one(world.device), pulse, plain, dataset.facts.white).model
        self.model.exchange = self
        self._sent = sum(part.weight.nbytes for part in self.model.parts if part.weight.requires_grad)
        mine = share_out({part.name: part.weight.nbytes for part in self.model.parts}, world.size)[world.rank]
        self.model.keep_only(mine, dist.group.WORLD if world.size > 1 else None)
        self._weights = [part.weight for part in self.model.parts if part.weight.requires_grad]
        address = addresses(world.size)[world.rank]
        self._desk = Desk(address, token(), [weight.detach() for weight in self._weights], job.exchange)
        for weight, view in zip(self._weights, self._desk.weights.views, strict=True):
            weight.data = view.copy_(weight.detach())
        self._update: list[Push] = []
        self._used: list[Flat] = []
        self._clock = time.monotonic()

    def open(self, step: int) -> None:
        """Begin after so many steps, when there is somebody to work for."""
        first = self._world.rank == 0
        self._desk.open(step, self._tickets(step) if first else None)
        while (
            first and not self._desk.has_worker()
        ):  # so that the first step does not count how long they take to start
            self._pulse.beat()
        self._clock = time.monotonic()

    def _tickets(self, step: int) -> Tickets:
        steps = self.batches.timeline.steps
        if self._setting.mode == "sync":
            return Sync(step, steps, self._shares)
        return Async(step, steps, self._setting.staleness, self.model.late)

    def forward_backward(self, share: Share, scale: float) -> Tensor:  # noqa: ARG002
        """Leave the gradients of the next update; return its loss, on the first server."""
        with self._pulse.during("exchange"):
            self._update = []
            said: list[tuple[float, float]] = []
            while not self._update:
                mine = self._desk.next_update() if self._world.rank == 0 else ([], [])
                self._update, said = self._world.tell(mine)
                self._pulse.beat()
            self._used = self._desk.take(self._update)
        parts = self._parts(share, [weight for _, weight in said])
        if self._setting.mode == "async":
            self._desk.writing.acquire()
            self._allow_for_delay(self._update[0])
        for weight, gradient in zip(self._weights, self._sum(parts), strict=True):
            weight.grad = gradient
        loss = sum(part * loss for part, (loss, _) in zip(parts, said, strict=True))
        return torch.tensor([loss if self._world.rank == 0 else 0.0], dtype=torch.float64)

    def _parts(self, share: Share, weights: list[float]) -> list[float]:
        """What each gradient is multiplied by: workers divide by the weight of what they know, their own part."""
        if tasks.weight_of_batch(self._job, share.size):
            return [1.0] * len(weights)
        return [weight / max(1.0, sum(weights)) for weight in weights]

    def _sum(self, parts: list[float]) -> list[Tensor]:
        total = self._used[0].views
        for flat, part in zip(self._used, parts, strict=True):
            if part != 1.0:
                torch._foreach_mul_(flat.views, part)
            if flat is not self._used[0]:
                torch._foreach_add_(total, flat.views)
        return total

    def _allow_for_delay(self, push: Push) -> None:
        if self._setting.lr == "staleness":
            self.model.slowing = 1 / max(1, push.staleness)
        fetched = self._desk.fetched(push.worker)
        if fetched is None or self._setting.compensation is None:
            return
        for weight, then, gradient in zip(self._weights, fetched.views, self._used[0].views, strict=True):
            gradient.addcmul_(gradient * gradient, weight.detach() - then, value=self._setting.compensation)

    def evaluate(self, everything: bool) -> Figures:
        """Have a worker judge the weights as they are."""
        if self._world.rank == 0:
            self._desk.ask_for_judgement("judge all" if everything else "judge")
        figures: Figures | None = None
        while figures is None:
            figures = self._world.tell(self._desk.judgement() if self._world.rank == 0 else None)
            self._pulse.beat()
        return figures

    def close(self) -> None:
        """It is over."""
        self._desk.close(self._job.limits.step, self._pulse.beat)

    # --- as an exchange ----------------------------------------------------------------------------------------------

    def begin(self, position: int, total: int) -> None:
        """Gradients have come already."""

    def finish(self) -> None:
        """They are summed already."""

    def settle(self, skipped: Tensor, step: int, last: bool) -> None:  # noqa: ARG002
        """The next weights are there."""
        if self._desk.writing.locked():
            self._desk.writing.release()
        self.model.late = self._desk.publish(self._update, self._used)

    def kept(self) -> list[Kept]:
        """Nothing: what has not been applied is computed again."""
        return []

    def held_bytes(self) -> dict[str, int]:
        """Nothing beside what the desk has, which grows with the workers (`plan.exchange.served`)."""
        return {}

    def traffic(self) -> Traffic:
        """What workers have sent for this update, and how late it came."""
        before, self._clock = self._clock, time.monotonic()
        figures: dict[str, Any] = {"pushes_per_s": round(len(self._update) / (self._clock - before), 3)}
        if self._setting.mode == "async":
            figures["staleness"] = self._update[0].staleness
        return Traffic(self._sent, self._sent, figures)

    def agreed(self) -> AbstractContextManager[None]:
        """The servers' weights are what all agree on."""
        return nullcontext()
