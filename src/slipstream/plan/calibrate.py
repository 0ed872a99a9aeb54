"""Fitting the planner's constants to measured steps: a small least-squares fit, held back by what is likely."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from slipstream.plan.rates import Rates

_HELD_BACK = 0.1
"""How much a constant that is e times what it was costs, beside steps that are off by as much."""


_MOST_HIDDEN = 0.95
"""Not all of an exchange can hide behind computation."""


def fit_rates(start: Rates, names: Sequence[str], predict: Callable[[Rates], Any], measured: Any) -> Rates:
    """Change these constants so that predictions come near what was measured, in proportion.

    Levenberg and Marquardt's method in the logarithms of the constants (Marquardt 1963, doi 10.1137/0111030).
    """
    fixed = asdict(start)
    first = np.log([fixed[name] for name in names])

    def unpack(x: Any) -> Rates:
        most = (_MOST_HIDDEN if name.endswith("_hidden") else np.inf for name in names)
        found = {name: float(min(np.exp(value), top)) for name, value, top in zip(names, x, most, strict=True)}
        return Rates(**{**fixed, **found})

    def residuals(x: Any) -> Any:
        rates = unpack(x)
        return np.concatenate((np.log(predict(rates) / measured), _HELD_BACK * (x - first)))

    x, damping = first.copy(), 1e-2
    best = residuals(x)
    for _ in range(60):
        slopes = np.stack([(residuals(x + 1e-4 * unit) - best) / 1e-4 for unit in np.eye(len(x))], axis=1)
        normal = slopes.T @ slopes
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -slopes.T @ best)
        tried = residuals(x + np.clip(move, -1, 1))
        if tried @ tried < best @ best:
            x, best, damping = x + np.clip(move, -1, 1), tried, damping / 3
        else:
            damping *= 4
        if damping > 1e6:
            break
    return unpack(x)
