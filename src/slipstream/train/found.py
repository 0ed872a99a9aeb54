"""What a step has found: the device knows it first, and nobody waits there while the next step could already run."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.batches import Share
from slipstream.train.control import Agreed, Control
from slipstream.train.exchange.base import Traffic
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
    seconds: float
    """From when the last step and what came after it were done."""
    traffic: Traffic | None
    """What it has sent."""


class Moment:
    """A point in time on a device: when its queue comes to it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._event:
            self._event.record()
        self._clock = time.perf_counter()

    def wait(self) -> None:
        """Return when it has come."""
        if self._event:
            self._event.synchronize()

    def since(self, earlier: "Moment") -> float:
        """Seconds between two that have come."""
        if self._event:
            return float(earlier._event.elapsed_time(self._event)) / 1e3  # type: ignore[union-attr]
        return self._clock - earlier._clock


class Launched:
    """A step that the device has been told to do, and may be doing still."""

    def __init__(
        self,
        number: int,
        share: Share,
        began: Moment,
        answer: Tensor,
        updated: Updated,
        losses: Tensor,
        traffic: Traffic | None,
    ) -> None:
        self._traffic = traffic
        self.number, self.share, self._began, self._lr = number, share, began, updated.lr
        norm = losses.new_empty(0) if updated.norm is None else updated.norm
        parts = [part.detach().double().flatten() for part in (answer, updated.skipped, norm, losses)]
        self._sizes, numbers = [len(part) for part in parts], torch.cat(parts)
        on_gpu = numbers.is_cuda
        self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True) if on_gpu else numbers
        if on_gpu:
            self._numbers.copy_(numbers, non_blocking=True)
        self._ended = Moment(numbers.device)

    def found(self) -> Found:
        """Wait until it is done, and read."""
        self._ended.wait()
        answer, skipped, norm, losses = (part.tolist() for part in torch.split(self._numbers, self._sizes))
        seconds = self._ended.since(self._began)
        return Found(
            Control.agreed(answer),
            self._lr,
            norm[0] if norm else None,
            bool(skipped[0]),
            losses,
            seconds,
            self._traffic,
        )
