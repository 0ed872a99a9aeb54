"""Scoring the planner against published results: time, memory, verdicts, and the layouts it would have chosen."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.plan.memory import memory
from slipstream.plan.published import Row, Table, read_published
from slipstream.plan.rates import Rates, fitted_rates
from slipstream.plan.time import step_time

ADAM = 2
"""Numbers that the optimiser of all these runs keeps for each weight."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of a prediction."""

    rows: int
    median: float
    mean: float
    most: float
    """Nine in ten are not larger."""

    @classmethod
    def of(cls, errors: Any) -> "Errors | None":
        """None of none."""
        if not len(errors):
            return None
        return cls(len(errors), float(np.median(errors)), float(np.mean(errors)), float(np.quantile(errors, 0.9)))


@dataclass(frozen=True)
class Score:
    """How good the planner is on a table."""

    rows: int
    left_out: dict[str, int]
    time: Errors | None
    time_scaled: Errors | None
    """With one factor for each source, the median of its ratios."""
    by_source: dict[str, Errors]
    memory: Errors | None
    ran: int
    """Rows that were run, so that their layouts fit."""
    wrong_verdicts: int
    """Of those, how many the planner would have refused for memory; where it is not known what was computed again, only
    if nothing that could be would have helped."""
    regret: Errors | None
    """Over jobs with several measured layouts: how much slower the one that the planner prefers is than the best."""


def check(paths: Sequence[Path], rates: Rates | None = None) -> Score:
    """Score the planner on tables of published results."""
    tables = [read_published(path) for path in paths]
    left_out: dict[str, int] = defaultdict(int)
    for table in tables:
        for why, count in table.left_out.items():
            left_out[why] += count
    rows = [row for table in tables for row in table.rows]
    if not rows:
        return Score(0, dict(left_out), None, None, {}, None, 0, 0, None)
    return _score(rows, dict(left_out), rates or fitted_rates())


def _score(rows: list[Row], left_out: dict[str, int], rates: Rates) -> Score:
    everything = Table(rows, {})
    work, grid, batch = everything.work, everything.grid, everything.column("batch")
    predicted = step_time(work, grid, batch, everything.hardware, rates, everything.style).total
    held = memory(work, grid, batch, ADAM, everything.style).total
    least = memory(work, replace(grid, recompute=2.0), batch, ADAM, everything.style).total
    says = np.array([row.says_recompute for row in rows])
    needed = np.where(says, held, np.minimum(held, least))
    sources = np.array([row.source for row in rows])
    timed = np.array([row.seconds is not None for row in rows])
    weighed = np.array([row.memory is not None for row in rows])
    seconds = np.array([row.seconds or np.nan for row in rows])
    ratio = predicted / seconds
    middle = {source: np.median(ratio[timed & (sources == source)]) for source in set(sources[timed])}
    scaled = np.array([value / middle.get(source, 1.0) for value, source in zip(ratio, sources, strict=True)])
    bytes_held = np.array([row.memory or np.nan for row in rows])
    capacity = np.array([row.capacity for row in rows])
    by_source = {
        str(source): errors
        for source in sorted(set(sources))
        if (errors := Errors.of(abs(ratio[timed & (sources == source)] - 1)))
    }
    return Score(
        rows=len(rows),
        left_out=left_out,
        time=Errors.of(abs(ratio[timed] - 1)),
        time_scaled=Errors.of(abs(scaled[timed] - 1)),
        by_source=by_source,
        memory=Errors.of(abs(held[weighed] / bytes_held[weighed] - 1)),
        ran=int(timed.sum()),
        wrong_verdicts=int((needed[timed] > capacity[timed]).sum()),
        regret=Errors.of(_regrets([row for row in rows if row.seconds], predicted[timed])),
    )


def _regrets(rows: Sequence[Row], predicted: Any) -> Any:
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for row, time in zip(rows, predicted, strict=True):
        assert row.seconds is not None, "only those are given"
        groups[row.group].append((time, row.seconds))
    several = [group for group in groups.values() if len(group) > 1]
    return np.array([min(group)[1] / min(measured for _, measured in group) - 1 for group in several])
