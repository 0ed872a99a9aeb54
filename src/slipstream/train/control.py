"""When to save and when to stop: limits, and the wish of whoever runs the job. All workers decide the same."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.job import Job
from slipstream.train.world import Underway, World

INTERRUPTED, DEADLINE, BUDGET, NO_DATA = "interrupted", "deadline", "budget", "no data"
_REASONS = (INTERRUPTED, DEADLINE, BUDGET, NO_DATA)
VOID = 1 + _REASONS.index(NO_DATA)
"""The place in an answer that is not 0 where a step must not count."""


@dataclass(frozen=True)
class Agreed:
    """What all workers know after a step."""

    loss: float
    stop: str | None
    """Why to stop now, if so."""
    save: bool
    """Whether the time for a checkpoint has come."""
    void: bool
    """Whether the step does not count: a worker had no samples for it."""


@dataclass(frozen=True)
class Asked:
    """What workers say to each other in a step."""

    answer: Tensor | Underway
    """The sum of what all have said; on its way still, where it was not waited for."""
    loss: Tensor
    """What the update goes by: that of all workers, or this one's where it does not wait for the others."""
    void: Tensor
    """Not 0 where the step must not count, as far as that is known now."""


class Control:
    """This worker's view of the limits."""

    def __init__(self, job: Job, spent: float, saves: bool = True) -> None:
        self._job = job
        self.saves = saves
        """Whether there are to be checkpoints: of a rehearsal nothing stays."""
        self._began = time.monotonic() - spent
        self._saved = time.monotonic()
        self.interrupted = False
        """Whether somebody wishes to stop."""

    def interrupt(self) -> None:
        """Ask for a checkpoint and a stop after the step under way. Safe in a signal handler."""
        self.interrupted = True

    def saved(self) -> None:
        """A checkpoint was just taken."""
        self._saved = time.monotonic()

    def ask(
        self, losses: Tensor, world: World, has_data: bool, meanwhile: Callable[[], None], wait: bool = True
    ) -> Asked:
        """Sum the loss over all workers, and with it every wish to stop or save, so that none acts alone.

        Gradients are exchanged `meanwhile`: over a slow link the way there and back is as long for a number. What comes
        back is where the losses are.
        """
        wishes = [self.interrupted, False, False, not has_data, False]
        if world.rank == 0:  # clocks differ; one decides
            wishes[1:3] = [self._past_deadline(), self._past_budget()]
            wishes[-1] = self._save_due()
        on_gpu = losses.is_cuda
        asked = torch.tensor(wishes, dtype=torch.float64, pin_memory=on_gpu).to(losses.device, non_blocking=True)
        said = torch.cat((losses.double().sum().view(1), asked))
        if not wait:
            meanwhile()
            return Asked(world.start_sum(said.clone()), said[0], said[VOID])
        if on_gpu or world.size == 1:  # two exchanges at once would be in each other's way on a GPU
            meanwhile()
            answer = world.sum(said)
        else:
            underway = world.start_sum(said)
            meanwhile()
            answer = said.new_tensor(underway.wait())
        return Asked(answer, answer[0], answer[VOID])

    @staticmethod
    def agreed(answer: list[float]) -> Agreed:
        """What all workers know by it, once it is here."""
        loss, *counts = answer
        reason = next((why for why, count in zip(_REASONS, counts, strict=False) if count), None)
        return Agreed(loss, reason, bool(counts[-1]), bool(answer[VOID]))

    def _past_deadline(self) -> bool:
        deadline = self._job.limits.deadline
        return deadline is not None and time.monotonic() - self._began > deadline

    def _past_budget(self) -> bool:
        budget, price = self._job.limits.budget, self._job.machines.price_per_hour
        return bool(budget and price and (time.monotonic() - self._began) / 3600 * price > budget)

    def _save_due(self) -> bool:
        every = self._job.checkpoint.every
        return every.unit == "seconds" and time.monotonic() - self._saved > every.amount
