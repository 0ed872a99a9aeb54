"""Which samples make up which step: a pure function of the job, and so the same on any number of workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from slipstream.job import Job, total_samples
from slipstream.job.units import Span


@dataclass(frozen=True)
class Timeline:
    """The steps of a run. Every batch is whole, so the run ends with the first that reaches the length asked for."""

    job: Job
    asked: int
    """Length of the run in samples, as asked for."""

    @classmethod
    def of(cls, job: Job, training_samples: int) -> "Timeline":
        """The steps of a job whose data has this many samples to train on."""
        return cls(job, total_samples(job, training_samples))

    def batch(self, seen: int) -> int:
        """Samples in the step that begins after `seen` samples."""
        ramp, batch = self.job.train.ramp, self.job.train.batch
        over = max(1, ramp.over.samples(self.asked)) if ramp else 0
        if not ramp or seen >= over:
            return batch
        return ramp.start + (batch - ramp.start) * (seen * ramp.stairs // over) // ramp.stairs

    @cached_property
    def starts(self) -> Sequence[int]:
        """The samples seen before each step, and at the end of the last one."""
        if not self.job.train.ramp:
            batch = self.job.train.batch
            return range(0, self.asked + batch, batch)
        starts = [0]
        while starts[-1] < self.asked:
            starts.append(starts[-1] + self.batch(starts[-1]))
        return starts

    @cached_property
    def changes(self) -> Sequence[int]:
        """Steps that have not as many samples as the step before."""
        if not self.job.train.ramp:
            return ()
        sizes = [end - start for start, end in pairwise(self.starts)]
        return [step for step, (before, size) in enumerate(pairwise(sizes), 1) if size != before]

    @property
    def samples(self) -> int:
        """Samples in the whole run."""
        return self.starts[-1]

    @property
    def steps(self) -> int:
        """Steps in the whole run."""
        return len(self.starts) - 1

    def is_due(self, span: Span, step: int) -> bool:
        """Whether something that happens every `span` happens after this step. Time is the caller's to watch."""
        if span.unit == "seconds":
            return False
        every = round(span.amount * self.steps) if span.unit == "run" else int(span.amount)
        return step % max(1, every) == 0
