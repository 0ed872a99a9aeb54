"""Cutting a row of layers into the stages of a pipeline, balanced by their cost."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from slipstream.plan.work import Work


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Cut a row of pieces into stages so that the dearest stage is as cheap as can be; none is empty."""
    assert len(costs) >= stages, "a layout with more stages than pieces is refused before"
    sums = [0.0, *accumulate(costs)]
    best = {0: (0.0, [0])}  # number of pieces in the stages so far: the dearest of them, and where they end
    for stage in range(1, stages + 1):
        left = stages - stage
        best = {
            end: min(
                (max(dearest, sums[end] - sums[start]), [*ends, end])
                for start, (dearest, ends) in best.items()
                if start < end
            )
            for end in range(stage, len(costs) - left + 1)
            if any(start < end for start in best)
        }
    return [range(first, last) for first, last in pairwise(best[len(costs)][1])]


def most_parameters(work: Work, pipeline: int, stages: int) -> float:
    """Parameters of the worker with most of them, with so many stages each; a tied table is at both ends."""
    if pipeline == 1:
        return float(work.parameters)
    head = float(work.outputs * work.stream)
    pieces = (
        (float(work.stream), float(work.table_parameters)),
        *[(float(sum(part.n * part.k for part in work.block)), float(work.block_parameters))] * int(work.layers),
        (float(work.stream), float(work.stream)),
        (head, head),
    )
    held = _held(tuple(cost for cost, _ in pieces), tuple(size for _, size in pieces), pipeline * stages)
    return max(sum(held[worker::pipeline]) for worker in range(pipeline))


@lru_cache(maxsize=256)
def _held(costs: tuple[float, ...], sizes: tuple[float, ...], stages: int) -> list[float]:
    return [sum(sizes[piece] for piece in cut) for cut in balance(costs, stages)]
