"""How long kernels take, by the GPU's own clock."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

_HEAD_START = 2 * 10**7
"""Cycles, about 10 ms, in which the GPU does nothing: the processor may be busy with other things, and what it launches
late would count as slow."""


def quickest(launch: Callable[[], None], tries: int) -> float:
    """Milliseconds that the GPU takes at best, after one try that does not count."""
    launch()
    torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
    marks = [_mark()]
    for _ in range(tries):
        launch()
        marks.append(_mark())
    marks[-1].synchronize()
    return float(min(start.elapsed_time(end) for start, end in pairwise(marks)))


def _mark() -> Any:
    """A moment in the device's queue."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
