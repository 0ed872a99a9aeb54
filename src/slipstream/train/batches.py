"""From the order of samples to what one worker takes through its model in each step."""

import math
import random
import time
from collections.abc import Callable, Generator, Iterator
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
_AT_ONCE = 2**21
"""Bytes that are handed over at once, about."""
_WORD = 8
"""Bytes of a token, and more than of other inputs."""


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
    total: int
    """Samples in the run."""
    micro_batches: list[MicroBatch]
    waited: float = 0.0
    """Seconds that the loop had to wait for it."""


class Batches:
    """What this worker will see, from any point of the run."""

    def __init__(self, job: Job, plan: Plan, dataset: Dataset, rank: int) -> None:
        self._job, self._plan, self._dataset, self._rank = job, plan, dataset, rank
        self._order = order_of(dataset, job.data.validation, job.seed)
        self._own_data = isinstance(job.data, ImportData)
        self.timeline = Timeline.of(job, self._order.training)
        self._window = range(0)
        self._mask_id = mask_id(job) if isinstance(job.task, MaskedToken) else None
        self._known: MicroBatch | None = None
        self.lost: StorageGone | None = None
        """Why samples could not be had. From then on there are others in their place, so that this worker can take part
        in what is under way, in which all agree to stop."""

    def from_sample(self, seen: int, pulse: Pulse) -> Iterator[Share]:
        """Shares of the steps after `seen` samples, fetched ahead in the background."""
        first = self.timeline.starts.index(seen)
        # The user's own dataset may draw random numbers, which only the main thread can do reproducibly.
        ahead = self._fetch_one_by_one(first) if self._own_data else self._fetch_ahead(first)
        with closing(ahead):
            while True:
                began = time.perf_counter()
                try:
                    with pulse.during("data"):
                        share = next(ahead, None)
                except StorageGone as error:
                    others = self._others(error)
                    first = self.timeline.starts.index(seen)
                    for step in range(first, self.timeline.steps):
                        yield from self._shares(range(step, step + 1), others)
                    return
                if share is None:
                    return
                seen = share.start + share.size
                self._known = next(iter(share.micro_batches), self._known)
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
        try:
            if self.lost is not None:  # it was waited for long enough
                raise self.lost
            return self._prepare(self._dataset.fetch(indices), indices)
        except StorageGone as error:
            return self._others(error)(indices, indices)

    def _fetch_one_by_one(self, first: int) -> Generator[Share, None, None]:
        for step in range(first, self.timeline.steps):
            seed_everything(self._job.seed, self._mine(step).start)
            yield from self._shares(range(step, step + 1), self._fetch)

    def _fetch_ahead(self, first: int) -> Generator[Share, None, None]:
        """In the background, and small steps several at a time: to hand each over alone takes longer than to make it.
        The first comes alone, for it is waited for."""
        steps, facts = self.timeline.steps, self._dataset.facts
        if first == steps:  # a run that was done goes on
            return
        size = math.prod(facts.inputs) * _WORD * max(1, len(self._mine(first)))
        each = max(1, _AT_ONCE // size)

        def fetch(number: int) -> list[Share]:
            begin = first + (number and 1 + (number - 1) * each)
            return self._shares(range(begin, min(first + 1 + number * each, steps)), self._fetch)

        with closing(prefetch(fetch, 0, 1 + -(-(steps - first - 1) // each))) as ahead:
            for shares in ahead:
                yield from shares

    def _mine(self, step: int) -> range:
        """Positions of this worker's samples in a step."""
        starts = self.timeline.starts
        return self._plan.layout.share(self._rank, starts[step], starts[step + 1] - starts[step])

    def _shares(self, steps: range, fetch: Fetch) -> list[Share]:
        starts, each = self.timeline.starts, self._plan.layout.micro_batch
        mine = [self._mine(step) for step in steps]
        positions = np.concatenate([np.arange(some.start, some.stop) for some in mine])
        indices = np.concatenate([self._order.indices(some.start, len(some)) for some in mine])
        batch, places, done = fetch(positions, indices), torch.from_numpy(positions), 0
        made = []
        for step, some in zip(steps, mine, strict=True):
            cuts = [slice(done + at, done + min(at + each, len(some))) for at in range(0, len(some), each)]
            parts = [MicroBatch(batch.inputs[cut], batch.targets[cut], places[cut], indices[cut]) for cut in cuts]
            made.append(Share(starts[step], starts[step + 1] - starts[step], self.timeline.samples, parts))
            done += len(some)
        return made

    def _fetch(self, positions: np.ndarray, indices: np.ndarray) -> Batch:
        if len(positions):
            self._look_ahead(int(positions[0]), indices)
        return self._prepare(self._dataset.fetch(indices), positions)

    def _others(self, error: StorageGone) -> Fetch:
        """Instead of samples that cannot be had: one that is known, as often as samples are asked for."""
        known = self._known
        if known is None:  # nothing has been learned that could be lost
            raise error
        self.lost = error

        def fetch(_: np.ndarray, indices: np.ndarray) -> Batch:
            parts = (known.inputs, known.targets)
            return Batch(*(part[:1].repeat(len(indices), *[1] * (part.dim() - 1)) for part in parts))

        return fetch

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
