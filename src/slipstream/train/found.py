"""What a step has found: the device knows it first, and nobody waits there while the next step could already run."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.batches import Share
from slipstream.train.control import Agreed, Asked, Control
from slipstream.train.exchange.base import Traffic
from slipstream.train.moment import Moment
from slipstream.train.update import Updated
from slipstream.train.world import Underway


@dataclass(frozen=True)
class Found:
    """One step, done."""

    agreed: Agreed
    lr: float
    norm: float | None
    """Of all gradients before clipping, where it was needed."""
    skipped: bool
    """Whether the weights stayed as they were."""
    losses: list[float]
    """This worker's, for each micro-batch."""
    seconds: float
    """From when the last step and what came after it were done."""
    traffic: Traffic | None
    """What it has sent."""

    @property
    def counts(self) -> bool:
        """Whether all workers had samples for it."""
        return not self.agreed.void


class Launched:
    """A step that the device has been told to do, and may be doing still."""

    def __init__(
        self,
        number: int,
        share: Share,
        began: Moment,
        asked: Asked,
        updated: Updated,
        losses: Tensor,
        traffic: Traffic | None,
    ) -> None:
        self._traffic = traffic
        self.number, self.share, self._began, self._lr = number, share, began, updated.lr
        self._late = asked.answer if isinstance(asked.answer, Underway) else None
        answer = losses.new_empty(0) if isinstance(asked.answer, Underway) else asked.answer
        norm = losses.new_empty(0) if updated.norm is None else updated.norm
        parts = [part.detach().double().flatten() for part in (answer, updated.skipped, norm, losses)]
        self._sizes, numbers = [len(part) for part in parts], torch.cat(parts)
        on_gpu = numbers.is_cuda
        self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True) if on_gpu else numbers
        if on_gpu:
            self._numbers.copy_(numbers, non_blocking=True)
        self.ended = Moment(numbers.device)

    def found(self) -> Found:
        """Wait until it is done, and read."""
        self.ended.wait()
        answer, skipped, norm, losses = (part.tolist() for part in torch.split(self._numbers, self._sizes))
        seconds = self.ended.since(self._began)
        return Found(
            Control.agreed(self._late.wait() if self._late else answer),
            self._lr,
            norm[0] if norm else None,
            bool(skipped[0]),
            losses,
            seconds,
            self._traffic,
        )
