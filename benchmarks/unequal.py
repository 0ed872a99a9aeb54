"""One of four workers is four times slower: how soon each way to agree reaches the loss that all-reduce ends with.

A worker's speed is that of `peers/sleepy.py`, a model that sleeps for every sample, so that four machines fit on this
one. Seconds are those of steps: starting and judging are not in them.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from common import RESULTS, SLIPSTREAM, console, facts, save, show

SIDES: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "balance": {"balance": True},
    "async": {"kind": "server", "mode": "async"},
    "staleness: 8": {"kind": "server", "mode": "async", "staleness": 8},
}
JOB: dict[str, Any] = {
    "name": "unequal",
    "model": {"import": "sleepy:Sleepy"},
    "data": {"source": "digits", "validation": "20%"},
    "machines": {"device": "cpu"},
    "train": {
        "task": "classification",
        "batch": 32,
        "precision": "fp32",
        "optimizer": {"name": "sgd", "lr": 0.05},
    },
    "checkpoint": {"every": "100%"},
}
_SLOWER = 1.02
"""A loss this much above the last of all-reduce counts as reached: the others' curves are not the same."""


def train(side: str, steps: int, seconds: float, root: Path) -> list[dict[str, Any]]:
    """What a run has recorded, step by step."""
    folder = Path(tempfile.mkdtemp(dir=root))
    changes = {"steps": steps, "evaluate": {"every": max(1, steps // 40)}}
    model = {**JOB["model"], "args": {"seconds": seconds, "mark": str(folder / "slow")}}
    job = {**JOB, "model": model, "exchange": SIDES[side], "train": {**JOB["train"], **changes}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command = [SLIPSTREAM, "train", "job.yaml", "--workers", "4", "--run-dir", "run"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "peers")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def seconds_to(lines: list[dict[str, Any]], loss: float) -> float | None:
    """Seconds of steps until the loss on held-out samples is reached."""
    passed = 0.0
    for line in lines:
        passed += line["seconds"]
        if line.get("val_loss", float("inf")) <= loss:
            return passed
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few steps each, to see that it works")
    parser.add_argument("--sides", default=",".join(SIDES), help="which, beside all-reduce")
    parser.add_argument("--out", type=Path, default=RESULTS / "unequal.json")
    options = parser.parse_args()
    steps, seconds = (40, 0.002) if options.short else (240, 0.005)
    sides = ["allreduce", *(side for side in options.sides.split(",") if side != "allreduce")]
    record, results = facts(), []
    target = 0.0
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for side in sides:
            lines = train(side, steps, seconds, Path(folder))
            last = lines[-1]["val_loss"]
            target = target or last * _SLOWER
            found = seconds_to(lines, target)
            first = results[0]["seconds"] if results else found
            sooner = first / found if first and found else None
            results.append(
                {"side": side, "seconds": found, "sooner": sooner, "val_loss": last, "share": lines[-1].get("share")}
            )
            console.print(f"{side}: {found} s, last loss {last:.4f}", style="dim")
    rows = [
        (
            r["side"],
            f"{r['seconds']:.1f}" if r["seconds"] else "—",
            f"{r['sooner']:.2f}" if r["sooner"] else "—",
            f"{r['val_loss']:.4f}",
        )
        for r in results
    ]
    show(
        f"one of four workers four times slower, to a loss of {target:.4f}",
        ("side", "seconds", "times sooner", "last loss"),
        rows,
    )
    save(options.out, {**record, "settings": {"job": JOB, "steps": steps, "seconds": seconds}, "results": results})


if __name__ == "__main__":
    main()
