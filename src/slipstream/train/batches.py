"""From the order of samples to what one worker takes through its model in each step."""

import math
import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

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
from slipstream.train.balance import Balance
from slipstream.train.timeline import Timeline

Fetch = Callable[[np.ndarray, np.ndarray], Batch]
"""Given the positions of samples in the run, and their numbers in the data."""
_AT_ONCE = 2**21
"""Bytes that are handed over at once, about."""
_MOST_STEPS = 64
"""That are handed over at once: a storage that is gone should be noticed."""
_WORD = 2
"""Bytes of a token, of most vocabularies."""


class MicroBatch(NamedTuple):
    """Samples that go through the model at once."""

    inputs: Tensor
    targets: Tensor
    numbers: Tensor
    """Of each sample, its position and its index [samples, 2]."""
    begins: Tensor | None = None
    """Of sequences: the place at which each token's document begins, where something is reset there."""

    @property
    def positions(self) -> Tensor:
        """Where each sample stands in the run: what its dropout masks are made from."""
        return self.numbers[:, 0]

    @property
    def indices(self) -> Tensor:
        """Which sample of the data each one is: what an error names."""
        return self.numbers[:, 1]


class Share(NamedTuple):
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

    @property
    def own(self) -> int:
        """Samples in it that are this worker's."""
        return sum(len(micro.numbers) for micro in self.micro_batches)


class _Fetched(NamedTuple):
    """This worker's samples of some steps of one size, not cut into them yet."""

    steps: range
    each: int
    """Samples in a step."""
    positions: np.ndarray
    indices: np.ndarray
    batch: Batch


def timeline_of(job: Job, dataset: Dataset) -> Timeline:
    """The steps of a job on its data."""
    return Timeline.of(job, order_of(dataset, job.data.validation, job.seed).training)


class Batches:
    """What this worker will see, from any point of the run."""

    def __init__(self, job: Job, plan: Plan, dataset: Dataset, rank: int) -> None:
        self._job, self._plan, self._dataset, self._rank = job, plan, dataset, rank
        self._order = order_of(dataset, job.data.validation, job.seed)
        self._own_data = isinstance(job.data, ImportData)
        self.timeline = Timeline.of(job, self._order.training)
        self.balance = Balance(job, plan, rank)
        self._window = range(0)
        self._mask_id = mask_id(job) if isinstance(job.task, MaskedToken) else None
        self._known: MicroBatch | None = None
        self.lost: StorageGone | None = None
        """Why samples could not be had. From then on there are others in their place, so that this worker can take part
        in what is under way, in which all agree to stop."""

    def from_sample(self, seen: int, pulse: Pulse) -> Iterator[Share]:
        """Shares of the steps after `seen` samples, fetched ahead in the background."""
        first = self.timeline.starts.index(seen)
        if first == self.timeline.steps:  # a run that was done goes on
            return
        ahead = self._fetch_ahead(first)
        with closing(ahead):
            while True:
                began = time.perf_counter()
                try:
                    with pulse.during("data"):
                        fetched = next(ahead, None)
                except StorageGone as error:
                    others = self._others(error)
                    for step in range(self.timeline.starts.index(seen), self.timeline.steps):
                        yield from self._cut(self._samples(range(step, step + 1), others))
                    return
                if fetched is None:
                    return
                waited, shares = time.perf_counter() - began, self._cut(fetched)
                self._known = next((micro for share in shares for micro in share.micro_batches), self._known)
                seen = self.timeline.starts[fetched.steps.stop]
                yield shares[0]._replace(waited=waited)
                yield from shares[1:]

    def of_step(self, step: int) -> Share:
        """This worker's part of one step, fetched now."""
        if self._own_data:
            seed_everything(self._job.seed, self._mine(step).start)
        (share,) = self._cut(self._samples(range(step, step + 1), self._fetch))
        return share

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

    def _fetch_ahead(self, first: int) -> Generator[_Fetched, None, None]:
        """In the background, unless that would be of no use."""
        if self._own_data:  # it may draw random numbers, which only the main thread can do reproducibly
            return self._fetch_own(first)
        blocks = self._blocks(first)
        near = isinstance(self._dataset, Prepared) and self._dataset.near
        if near and self._mask_id is None:  # to hand samples over takes longer than to copy them
            return (self._samples(steps, self._fetch) for steps in blocks)
        return prefetch(lambda number: _pinned(self._samples(blocks[number], self._fetch)), 0, len(blocks))

    def _fetch_own(self, first: int) -> Generator[_Fetched, None, None]:
        for step in range(first, self.timeline.steps):
            seed_everything(self._job.seed, self._mine(step).start)
            yield self._samples(range(step, step + 1), self._fetch)

    def _blocks(self, first: int) -> list[range]:
        """Small steps several at a time, those of one size: each alone takes longer. The first comes alone, for it is
        waited for."""
        steps, samples = self.timeline.steps, len(self._mine(first))
        size = math.prod(self._dataset.facts.inputs) * _WORD * max(1, samples)
        each = 1 if self.balance.works else min(_MOST_STEPS, max(1, _AT_ONCE // size))
        begins = {first, *range(first + 1, steps, each), *self.timeline.changes, steps}
        return [range(begin, end) for begin, end in pairwise(sorted(begins)) if begin >= first]

    def _mine(self, step: int) -> range:
        """Positions of this worker's samples in a step."""
        start, end = self.timeline.starts[step : step + 2]
        part = self.balance.part(step, end - start)
        return range(start + part.start, start + part.stop)

    def _samples(self, steps: range, fetch: Fetch) -> _Fetched:
        """Of these steps, fetched at once."""
        starts, mine = self.timeline.starts, self._mine(steps.start)
        begin, end = starts[steps.start], starts[steps.stop]
        places = np.arange(end - begin).reshape(len(steps), -1)[:, mine.start - begin : mine.stop - begin].reshape(-1)
        indices = self._order.indices(begin, end - begin)[places]
        positions = places + begin
        return _Fetched(steps, len(mine), positions, indices, fetch(positions, indices))

    def _cut(self, fetched: _Fetched) -> list[Share]:
        """Where they are used: while the thread that fetches computes in Python, torch waits for it at every call."""
        starts, steps, batch = self.timeline.starts, fetched.steps, fetched.batch
        begins = () if batch.begins is None else (batch.begins,)
        numbers = torch.from_numpy(np.stack((fetched.positions, fetched.indices), 1))
        tensors = [
            part.unflatten(0, (len(steps), fetched.each)) for part in (batch.inputs, batch.targets, numbers, *begins)
        ]
        size, total = starts[steps.start + 1] - starts[steps.start], self.timeline.samples
        made = [Share(start, size, total, []) for start in starts[steps.start : steps.stop]]
        each = self._plan.layout.micro_batch
        for at in range(0, fetched.each, each):
            # All steps in one call: one for each would take longer than to fetch it.
            cut = map(MicroBatch, *(tensor[:, at : at + each].unbind() for tensor in tensors))
            for share, micro in zip(made, cut, strict=True):
                share.micro_batches.append(micro)
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
            parts = (known.inputs, known.targets, *([] if known.begins is None else [known.begins]))
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


def _pinned(fetched: _Fetched) -> _Fetched:
    """Where a GPU copies from without the processor: a batch of images takes milliseconds to be brought there."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return fetched
    batch = fetched.batch
    begins = None if batch.begins is None else batch.begins.pin_memory()
    return fetched._replace(batch=Batch(batch.inputs.pin_memory(), batch.targets.pin_memory(), begins))


def as_model_takes(inputs: Tensor, job: Job, white: int, dtype: torch.dtype) -> Tensor:
    """Numbers as `dtype`, and tokens as torch's losses want them. Bytes of our sources are numbers
    too; a user's dataset may mean else."""
    if inputs.dtype in (torch.uint16, torch.uint32) and not isinstance(job.data, ImportData):
        return inputs.long()
    if inputs.dtype == torch.uint8 and white != 1:
        inputs = inputs / white
    numbers = inputs.is_floating_point() or (inputs.dtype == torch.uint8 and not isinstance(job.data, ImportData))
    return inputs.to(dtype) if numbers else inputs


def seed_everything(seed: int, position: int) -> None:
    """Put every global source of random numbers into a state that follows from the place in the run alone."""
    mixed = int(np.random.SeedSequence([seed, position]).generate_state(1, np.uint64)[0])
    # Not torch.manual_seed: where there is no GPU it takes milliseconds, to remember the seed for one that may come.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)
