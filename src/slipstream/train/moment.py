"""Time on a device."""

import time

import torch


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
