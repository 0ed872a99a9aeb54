"""What the loop runs on a worker that learns from samples of its own. A server (train/server/served.py) has the same
methods."""

from torch import nn

from slipstream.data import Dataset
from slipstream.job import Job
from slipstream.job.base import refuse
from slipstream.job.codecs import never_coding
from slipstream.plan import Plan
from slipstream.runs import Pulse
from slipstream.train.batches import Batches
from slipstream.train.validation import judge
from slipstream.train.worker import Worker
from slipstream.train.world import World


class Learner(Worker):
    """A worker and its samples."""

    def __init__(self, job: Job, plan: Plan, world: World, pulse: Pulse, plain: nn.Module, dataset: Dataset) -> None:
        super().__init__(job, plan, world, pulse, plain, dataset.facts.white)
        self.batches = Batches(job, plan, dataset, world.rank)
        timeline = self.batches.timeline
        refuse(never_coding(job.exchange.codec, timeline.samples, timeline.starts[-2]))

    def open(self, step: int) -> None:
        """Nobody waits for it."""

    def evaluate(self, everything: bool) -> dict[str, float] | None:
        """Judge the weights as they are, with the other workers."""
        return judge(self, self.batches, self.batches.held_out_samples(everything), self._pulse.beat)

    def close(self) -> None:
        """Nobody waits for it."""
