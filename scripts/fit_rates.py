"""Fit the planner's constants to published step times: `fit_rates.py TABLE… [--write]`. Needs scipy.

Every constant is fitted to all rows together, never to one; rows are weighted so that a source with many of them does
not decide alone. What the fit is worth for a source that it has not seen is told by leaving each out in turn.
"""

import argparse
import csv
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from slipstream.plan.published import Table, read_published
from slipstream.plan.rates import Rates, fitted_rates
from slipstream.plan.time import step_time

EXPECTED: dict[str, tuple[float, float, float]] = {  # what is physically likely; least and most
    "matrix_16": (0.78, 0.5, 0.95),
    "matrix_8": (0.65, 0.3, 0.95),
    "matrix_4": (0.5, 0.15, 0.95),
    "matrix_traffic": (0.7, 0.05, 4),
    "matrix_start": (2e-5, 1e-6, 4e-4),
    "attention": (0.5, 0.15, 0.9),
    "attention_length": (300, 1, 4000),
    "scores_traffic": (6, 1, 20),
    "stream_traffic": (12, 4, 40),
    "inner_traffic": (4, 1, 12),
    "unfused_traffic": (1.7, 1, 4),
    "eager_traffic": (1.9, 1.9, 1.9),  # no published row has it
    "bandwidth": (0.8, 0.6, 0.95),
    "launch": (1.5e-4, 2e-5, 1e-3),
    "unfused_launch": (5e-4, 2e-5, 1.2e-3),
    "link": (0.7, 0.3, 0.95),
    "link_latency": (3e-5, 1e-6, 1e-4),
    "tensor_hidden": (0.3, 0.01, 0.8),
    "network": (0.7, 0.2, 0.95),
    "network_latency": (3e-5, 1e-6, 1e-4),
    "gradients_hidden": (0.6, 0.01, 1),
    "optimizer_bytes": (24, 12, 60),
    "loss_traffic": (6, 1, 20),
    "step": (0.01, 1e-4, 0.1),
    "spread": (0.005, 1e-4, 0.03),
}
PRIOR = 0.5
"""How much a constant that is twice what is likely costs, beside rows that are off by as much."""
TABLE = Path(__file__).parent.parent / "src/slipstream/plan/tables/rates.csv"
LARGE_SOURCE = 100
"""A source of more rows than this counts as so many."""


def predict(table: Table, rates: Rates) -> Any:
    return step_time(table.work, table.grid, table.column("batch"), table.hardware, rates, table.style).total


def fit(table: Table, start: Rates) -> Rates:
    likely, low, high = (np.log([EXPECTED[field.name][place] for field in fields(Rates)]) for place in range(3))
    seconds = np.array([row.seconds for row in table.rows])
    sources = [row.source for row in table.rows]
    weights = np.array([min(1, LARGE_SOURCE / sources.count(source)) for source in sources]) ** 0.5
    work, grid, batch, on, style = table.work, table.grid, table.column("batch"), table.hardware, table.style

    def unpack(x: Any) -> Rates:
        return Rates(*np.exp(low + (high - low) * x))

    def residual(x: Any) -> Any:
        off = weights * np.log(step_time(work, grid, batch, on, unpack(x), style).total / seconds)
        return np.concatenate((off, PRIOR * (low + (high - low) * x - likely)))

    first = (np.log(list(asdict(start).values())) - low) / (high - low)
    found = least_squares(residual, np.clip(first, 0.01, 0.99), bounds=(0, 1), loss="soft_l1", f_scale=0.08)
    return unpack(found.x)


def report(errors: Any, title: str) -> None:
    print(f"{title}: median {np.median(errors):.3f}, mean {errors.mean():.3f}, 90% {np.quantile(errors, 0.9):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="write the result into the package")
    options = parser.parse_args()
    rows = [row for path in options.tables for row in read_published(path).rows if row.seconds]
    table = Table(rows, {})
    seconds = np.array([row.seconds for row in rows])
    sources = np.array([row.source for row in rows])
    rates = fit(table, fitted_rates())
    ratio = predict(table, rates) / seconds
    report(abs(ratio - 1), f"{len(rows)} rows, fitted to all")
    unseen, scaled = np.empty(len(rows)), np.empty(len(rows))
    for source in sorted(set(sources)):
        which = sources == source
        others = fit(table.take(~which), rates)
        part = table.take(which)
        unseen[which] = predict(part, others) / seconds[which]
        scaled[which] = unseen[which] / np.median(unseen[which])
        all_seen, bias = np.median(abs(ratio[which] - 1)), np.median(unseen[which])
        print(
            f"  {source:50} {which.sum():5} rows, fitted {all_seen:.3f}, "
            f"left out {np.median(abs(unseen[which] - 1)):.3f} (all by {bias:.2f}), "
            f"then scaled {np.median(abs(scaled[which] - 1)):.3f}"
        )
    report(abs(unseen - 1), "each source left out in turn")
    report(abs(scaled - 1), "the same with one scale for each source")
    for name, value in asdict(rates).items():
        likely, low, high = EXPECTED[name]
        at = ", at its bound" if value < 1.01 * low or value > 0.99 * high else ""
        print(f"  {name:18} {value:<10.4g} {value / likely:5.2f} of what is likely{at}")
    if options.write:
        with TABLE.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("name", "value"))
            writer.writerows((name, f"{value:.4g}") for name, value in asdict(rates).items())


if __name__ == "__main__":
    main()
