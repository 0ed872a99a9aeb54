"""What a step has found: the device knows it first, and nobody waits there while the next step could already run."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.batches import Share
from slipstream.train.control import Agreed, Control
from slipstream.train.update import Updated


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


class Launched:
    """A step that the device has been told to do, and may be doing still."""

    def __init__(self, number: int, share: Share, answer: Tensor, updated: Updated, losses: Tensor) -> None:
        self.number, self.share, self._lr = number, share, updated.lr
        norm = losses.new_empty(0) if updated.norm is None else updated.norm
        parts = [part.detach().double().flatten() for part in (answer, updated.skipped, norm, losses)]
        self._sizes, numbers = [len(part) for part in parts], torch.cat(parts)
        self._event = torch.cuda.Event() if numbers.is_cuda else None  # type: ignore[no-untyped-call]
        self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True) if self._event else numbers
        if self._event:
            self._numbers.copy_(numbers, non_blocking=True)
            self._event.record()

    def found(self) -> Found:
        """Wait until it is done, and read."""
        if self._event:
            self._event.synchronize()
        answer, skipped, norm, losses = (part.tolist() for part in torch.split(self._numbers, self._sizes))
        return Found(Control.agreed(answer), self._lr, norm[0] if norm else None, bool(skipped[0]), losses)
