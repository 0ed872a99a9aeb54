"""How long kernels take, by the GPU's own clock."""

from collections.abc import Callable

import torch

_HEAD_START = 2 * 10**7
"""Cycles, about 10 ms, in which the GPU does nothing: the processor may be busy with other things, and what it launches
late would count as slow."""


def quickest(launch: Callable[[], None], tries: int) -> float:
    """Milliseconds of the quickest of so many, after one that does not count."""
    return min([_milliseconds(launch) for _ in range(1 + tries)][1:])


def _milliseconds(launch: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
