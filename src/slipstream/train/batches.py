"""From the order of samples to what one worker takes through its model in each step."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.data import Dataset, mask_id
from slipstream.data.base import Batch
from slipstream.data.mixing import Mixed, order_of
from slipstream.data.prepared import Prepared
from slipstream.data.samples import PreparedSamples
from slipstream.data.storage import StorageGone
from slipstream.data.stream import prefetch
from slipstream.job import Job
from slipstream.job.data import ImportData
from slipstream.job.train import MaskedToken
from slipstream.plan import Plan
from slipstream.runs import Pulse
from slipstream.train import tasks
from slipstream.train.precision import weight_dtype
from slipstream.train.timeline import Timeline

Fetch = Callable[[np.ndarray, np.ndarray], Batch]
"""Given the positions of samples in the run, and their numbers in the data."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model at once."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    """Where each sample stands in the run: what its dropout masks are made from."""
    indices: np.ndarray
    """Which sample of the data each one is: what an error names."""


@dataclass(frozen=True)
class Share:
    """One worker's part of one step."""

    start: int
    """Samples seen before this step."""
    size: int
    """Samples in this step, over all workers."""
    micro_batches: list[MicroBatch]
    waited: float = 0.0
    """Seconds that the loop had to wait for it."""
    lost: StorageGone | None = None
    """Why its samples could not be had: these are others in their place, only to reach the end of the step with."""


class Batches:
    """What this worker will see, from any point of the run."""

    def __init__(self, job: Job, plan: Plan, dataset: Dataset, rank: int) -> None:
        self._job, self._plan, self._dataset, self._rank = job, plan, dataset, rank
        self._order = order_of(dataset, job.data.validation, job.seed)
        self._own_data = isinstance(job.data, ImportData)
        self.timeline = Timeline.of(job, self._order.training)
        self._window = range(0)
        self._mask_id = mask_id(job) if isinstance(job.task, MaskedToken) else None

    def from_sample(self, seen: int, pulse: Pulse) -> Iterator[Share]:
        """Shares of the steps after `seen` samples, fetched ahead in the background."""
        first = self.timeline.starts.index(seen)
        # The user's own dataset may draw random numbers, which only the main thread can do reproducibly.
        ahead: Iterator[Share] = (
            (self._share(step) for step in range(first, self.timeline.steps))
            if self._own_data
            else prefetch(self._share, first, self.timeline.steps)
        )
        latest: Share | None = None
        with closing(ahead):  # type: ignore[type-var]
            while True:
                began = time.perf_counter()
                try:
                    with pulse.during("data"):
                        share = next(ahead, None)
                except StorageGone as error:
                    if latest is None or not latest.micro_batches:
                        raise
                    yield from self._stand_ins(latest, error)
                    return
                if share is None:
                    return
                latest = share
                yield replace(share, waited=time.perf_counter() - began)

    @property
    def held_out(self) -> int:
        """How many samples are held out."""
        return self._order.held_out

    def held_out_samples(self, everything: bool) -> np.ndarray:
        """The samples to judge on."""
        samples = self._order.validation_indices()
        return samples if everything else samples[: self._job.train.evaluate.samples]

    def fetch_held_out(self, indices: np.ndarray) -> Batch:
        """Held-out samples, as the model takes them. What is hidden of one is the same each time."""
        return self._prepare(self._dataset.fetch(indices), indices)

    def _share(self, step: int) -> Share:
        start, size = self.timeline.starts[step], self.timeline.starts[step + 1] - self.timeline.starts[step]
        return Share(start, size, self._micro_batches(start, size, self._fetch))

    def _micro_batches(self, start: int, size: int, fetch: Fetch) -> list[MicroBatch]:
        mine = self._plan.layout.share(self._rank, start, size)
        positions = np.arange(mine.start, mine.stop)
        indices = self._order.indices(mine.start, len(mine))
        batch = fetch(positions, indices)
        each = self._plan.layout.micro_batch
        return [
            MicroBatch(
                batch.inputs[first : first + each],
                batch.targets[first : first + each],
                torch.from_numpy(positions[first : first + each]),
                indices[first : first + each],
            )
            for first in range(0, len(mine), each)
        ]

    def _fetch(self, positions: np.ndarray, indices: np.ndarray) -> Batch:
        first = int(positions[0]) if len(positions) else 0
        if self._own_data:
            seed_everything(self._job.seed, first)
        self._look_ahead(first, indices)
        return self._prepare(self._dataset.fetch(indices), positions)

    def _stand_ins(self, latest: Share, error: StorageGone) -> Iterator[Share]:
        """For the steps after this one, of which the samples cannot be had: with the right number of others, so that
        this worker can take part in a step, in which all agree to stop."""
        for step in range(self.timeline.starts.index(latest.start) + 1, self.timeline.steps):
            start, size = self.timeline.starts[step], self.timeline.starts[step + 1] - self.timeline.starts[step]
            yield Share(start, size, self._micro_batches(start, size, _repeated(latest.micro_batches[0])), lost=error)

    def _look_ahead(self, position: int, indices: np.ndarray) -> None:
        """Tell a dataset that fetches from afar what is needed first, and what comes after it."""
        if not isinstance(self._dataset, Prepared | PreparedSamples | Mixed):
            return
        window = self._order.window(position)
        if window != self._window:
            self._window = window
            self._dataset.expect(indices)
            following = self._order.window(window.stop)
            self._dataset.expect(self._order.indices(window.start, len(window)))
            self._dataset.expect(self._order.indices(following.start, len(following)))

    def _prepare(self, batch: Batch, positions: np.ndarray) -> Batch:
        if self._mask_id is not None:
            batch = tasks.hide_tokens(batch, positions, self._job, self._dataset.facts.outputs, self._mask_id)
        return batch


def _repeated(micro: MicroBatch) -> Fetch:
    """Its first sample, as often as samples are asked for."""

    def fetch(_: np.ndarray, indices: np.ndarray) -> Batch:
        return Batch(
            *(part[:1].repeat(len(indices), *[1] * (part.dim() - 1)) for part in (micro.inputs, micro.targets))
        )

    return fetch


def as_model_takes(inputs: Tensor, job: Job, plan: Plan, white: int) -> Tensor:
    """Numbers in the precision of the weights. Bytes of our sources are numbers too; a user's dataset may mean else."""
    if inputs.dtype == torch.uint8 and white != 1:
        inputs = inputs.float() / white
    numbers = inputs.is_floating_point() or (inputs.dtype == torch.uint8 and not isinstance(job.data, ImportData))
    return inputs.to(weight_dtype(plan)) if numbers else inputs


def seed_everything(seed: int, position: int) -> None:
    """Put every global source of random numbers into a state that follows from the place in the run alone."""
    mixed = int(np.random.SeedSequence([seed, position]).generate_state(1, np.uint64)[0])
    # Not torch.manual_seed: where there is no GPU it takes milliseconds, to remember the seed for one that may come.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)
