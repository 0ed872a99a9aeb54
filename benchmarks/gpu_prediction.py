"""Jobs on one GPU, predicted and measured: what `tests/data/h200_steps.csv` holds.

Each job is predicted with the profile of this machine, or else the one that comes with the package, and trained through
`slipstream train` on random tokens. `--rows` measures some of them; the file that is written has all, with new figures
for those that were measured.
"""

import argparse
import csv
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from common import RESULTS, console, facts, installed, save, show
from slipstream.job import Job
from slipstream.plan import make_plan, this_machine
from slipstream.plan.here import Here
from slipstream.plan.wanted import wanted_of
from slipstream.planning import work_of
from watched import Failed, environment, steady, train

KNOWN = Path(__file__).parent.parent / "tests" / "data" / "h200_steps.csv"
SECONDS = 8
"""Of steps of each job, if they take as long as they once did; nine steps at least and 40 at most."""
TOKENS = 4 * 2**20
SHAPE = ("preset", "layers", "hidden", "heads", "kv_heads", "feed_forward", "activation", "vocabulary")


def job_of(row: dict[str, str], tokens: str, device: str = "cuda") -> dict[str, Any]:
    """The job of a row, on a file of tokens."""

    def given(*names: str) -> dict[str, Any]:
        return {name: int(row[name]) if row[name].isdigit() else row[name] for name in names if row[name]}

    return {
        "name": "h200",
        "model": {"kind": "decoder", **given(*SHAPE)},
        "data": {"source": tokens, "tokens": True, **given("sequence", "vocabulary")},
        "train": {
            **given("batch", "precision"),
            "steps": 100_000,  # it is stopped before it would save
            "optimizer": {"name": "adamw", "lr": 1e-4, **given("state")},
            "clip": {"norm": 1.0},
        },
        "layout": {"replicate": 1, **given("micro_batch", "recompute")},
        "machines": {"device": device},
        "checkpoint": {"every": 100_000},
    }


def write_tokens(folder: Path, rows: list[dict[str, str]]) -> Path:
    """Random tokens that all of these have."""
    tokens, fewest = folder / "tokens.npy", min(int(row["vocabulary"]) for row in rows)
    np.save(tokens, (np.random.default_rng(0).zipf(1.3, TOKENS) % fewest).astype(np.uint32))
    return tokens


def predict(row: dict[str, str], device: str = "cuda") -> dict[str, float | None]:
    """Seconds of a step and bytes of tensors; none where nothing is known of the machine."""
    job, machine = Job.model_validate(job_of(row, "tokens.npy", device)), this_machine()
    chosen = make_plan(job, machine)
    expected = Here(machine).predict(wanted_of(job, work_of(job), 1), chosen.layout, chosen.precision)
    if expected is None:
        return {"seconds": None, "memory": None}
    held = expected.memory.total - expected.memory.reserve
    return {"seconds": float(expected.step), "memory": float(held)}


def measure(rows: list[dict[str, str]], device: str, limit: float) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Every row with what was measured."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tokens = write_tokens(Path(folder), rows)
        for number, row in enumerate(rows):
            console.print(f"{number + 1}/{len(rows)}  {row['name']}", style="dim")
            here = Path(folder) / str(number)
            here.mkdir()
            (here / "job.yaml").write_text(yaml.safe_dump(job_of(row, str(tokens), device)))
            steps = min(max(round(SECONDS / float(row["seconds"])), 9), 40)
            try:
                timed = train(here / "job.yaml", here, steps, environment(Path(folder), device == "cuda"), limit)
            except Failed as error:
                console.print(f"{row['name']} failed: {error}", markup=False)
                continue
            yield row, {"seconds": round(statistics.median(steady(timed.seconds)), 6), "memory": timed.memory}


def compare(
    rows: list[dict[str, str]], fresh: set[str], device: str
) -> tuple[list[tuple[str, ...]], list[dict[str, Any]]]:
    """For the table and for the record: what was measured, now or before, beside what is predicted now."""
    shown, found = [], []
    for row in rows:
        expected = predict(row, device)
        errors = {
            what: value / float(row[what]) - 1 if value and row[what] else None for what, value in expected.items()
        }
        found.append({"row": row, "fresh": row["name"] in fresh, "expected": expected, "errors": errors})
        cells = [row["name"] + ("" if row["name"] in fresh else f" ({row['date']})"), f"{float(row['seconds']):.4f}"]
        cells.append("" if expected["seconds"] is None else f"{expected['seconds']:.4f}")
        cells.append("" if errors["seconds"] is None else f"{errors['seconds']:+.1%}")
        cells.append(f"{float(row['memory']) / 1e9:.1f}" if row["memory"] else "")
        cells.append("" if expected["memory"] is None else f"{expected['memory'] / 1e9:.1f}")
        cells.append("" if errors["memory"] is None else f"{errors['memory']:+.1%}")
        shown.append(tuple(cells))
    return shown, found


def driver() -> str:
    """Its version; empty where there is none."""
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def shortened(row: dict[str, str]) -> dict[str, str]:
    """The same in tiny, for a CPU."""
    small = {"layers": "2", "hidden": "64", "heads": "2", "kv_heads": "2", "feed_forward": "128", "vocabulary": "256"}
    return {**row, **small, "preset": "", "sequence": "32", "batch": "4", "micro_batch": "", "seconds": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="one tiny job on the CPU, to see that it works")
    parser.add_argument("--rows", type=lambda text: text.split(","), help="names; default: all of the file")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a run may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_prediction.json")
    options = parser.parse_args()
    with KNOWN.open() as file:
        rows = list(csv.DictReader(file))
    if unknown := set(options.rows or ()) - {row["name"] for row in rows}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(row['name'] for row in rows)}")
    device = "cpu" if options.short else "cuda"
    if options.short:
        rows = [shortened(rows[0])]
    wanted = [row for row in rows if options.rows is None or row["name"] in options.rows]
    now = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "driver": driver(), "torch": installed("torch") or ""}
    record, fresh = facts("triton"), set()
    for row, figures in measure(wanted, device, options.limit):
        fresh.add(row["name"])
        row.update({what: "" if value is None else str(value) for what, value in figures.items()} | now)
        save(options.out, {**record, "measured": [each for each in rows if each["name"] in fresh]})
    shown, found = compare(rows, fresh, device)
    show("", ("job", "step s", "predicted", "off", "GB", "predicted", "off"), shown)
    for what in ("seconds", "memory"):
        errors = [abs(each["errors"][what]) for each in found if each["errors"][what] is not None]
        if errors:
            console.print(f"{what}: median {statistics.median(errors):.1%}, at most {max(errors):.1%}")
    with options.out.with_suffix(".csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    save(options.out, {**record, "results": found})


if __name__ == "__main__":
    main()
