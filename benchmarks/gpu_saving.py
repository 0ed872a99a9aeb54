"""What a run on one GPU costs beside its steps: starting, with empty and with warm compile caches, and checkpoints.

The job of `gpu_train.py` named by `--row` starts twice through `slipstream train`. The second run saves every 50 steps:
what its steps take from the first checkpoint on, beside the steps before it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from common import RESULTS, console, facts, save, show
from gpu_train import ROWS, Row, write_job
from watched import Timed, environment, steady, train

STEPS, EVERY = 150, 50
"""Of the second run, and between its checkpoints."""


def measure(row: Row, steps: int, every: int, limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = write_job(row, Path(folder))
        plan = yaml.safe_load(job.read_text())
        job.write_text(yaml.safe_dump({**plan, "checkpoint": {"every": every, "keep": 1}}))
        caches = environment(Path(folder) / "cache", row.device == "cuda")
        starts, timed = [], None
        for name, enough in (("cold", 1), ("warm", steps)):
            console.print(f"starting {name}", style="dim")
            here, began = Path(folder) / name, time.time()
            here.mkdir()
            timed = train(job, here, enough, caches, limit)
            starts.append(round(timed.first - began, 2))
    assert timed, "there were two runs"
    return {"cold_s": starts[0], "warm_s": starts[1], **cost_of_saving(timed, every)}


def cost_of_saving(timed: Timed, every: int) -> dict[str, Any]:
    """By how much the mean of the steps after the first checkpoint, as many before each as after, is longer than the
    median of those before it."""
    before, after = statistics.median(steady(timed.seconds[:every])), timed.seconds[every:]
    mean = statistics.fmean(after)
    return {
        "step_s": round(before, 6),
        "saving_step_s": round(mean, 6),
        "longest_s": round(max(after), 6),
        "cost": round(mean / before - 1, 5),
        "memory_gb": round(timed.memory / 1e9, 2) if timed.memory else None,
        "seconds": timed.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="tiny shapes on the CPU, to see that it works")
    parser.add_argument("--row", choices=list(ROWS), default="llama-1b")
    parser.add_argument("--steps", type=int, help="of the second run")
    parser.add_argument("--limit", type=float, default=240, help="seconds that a run may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_saving.json")
    options = parser.parse_args()
    row = ROWS[options.row].shortened() if options.short else ROWS[options.row]
    steps, every = (options.steps or 30, 10) if options.short else (options.steps or STEPS, EVERY)
    if steps <= every:
        parser.error(f"--steps: the first checkpoint is after {every} steps, and more are timed after it")
    record = facts("triton")
    found = measure(row, steps, every, options.limit)
    show(
        f"{options.row}, a checkpoint every {every} steps",
        ("cold start s", "warm start s", "step s", "with checkpoints s", "longest s", "cost"),
        [
            (
                *(f"{found[name]:.1f}" for name in ("cold_s", "warm_s")),
                *(f"{found[name]:.4f}" for name in ("step_s", "saving_step_s", "longest_s")),
                f"{found['cost']:+.2%}",
            )
        ],
    )
    save(options.out, {**record, "row": options.row, "results": [found]})


if __name__ == "__main__":
    main()
