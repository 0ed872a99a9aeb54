"""Each axis of a layout on two workers: Slipstream beside the shortest hand-written torch program that does the same.

The programs use DDP, FSDP2, `parallelize_module` and `torch.distributed.pipelining` on the same decoder and data, with
the same recipe and threads. Sides take turns; a round's figure is the median over its steady steps, a side's its best.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from common import RESULTS, SLIPSTREAM, alternate, console, facts, run_all, save, show
from cpu_train import PEERS, UNSTEADY, Shape, environments, write_job
from slipstream.runs import read_lines

AXES = ("replicate", "shard", "tensor", "pipeline")
SHORT = Shape(layers=2, hidden=32, heads=2, sequence=32, vocabulary=256, batch=4, steps=6)


def time_slipstream(job: Path, axis: str, folder: Path) -> list[float]:
    layout = f"{axis}=2" + (",micro_batch=" + str(_half(job)) if axis == "pipeline" else "")
    command = [SLIPSTREAM, "train", str(job), "--layout", layout, "--run-dir", str(folder / "run")]
    run_all([command], [{}], folder / "log")
    return [line["seconds"] for line in read_lines(folder / "run" / "metrics.jsonl")]


def _half(job: Path) -> int:
    from slipstream.job import load_job

    return load_job(job).train.batch // 2


def time_by_hand(job: Path, axis: str, folder: Path) -> list[float]:
    command = [sys.executable, str(PEERS / "hand_written.py"), str(job), str(folder / "times.json"), axis]
    run_all([command] * 2, environments(2), folder / "log")
    seconds: list[float] = json.loads((folder / "times.json").read_text())["seconds"]
    return seconds


SIDES = {"slipstream": time_slipstream, "by hand": time_by_hand}


def measure(axes: list[str], rounds: int, shape: Shape) -> dict[tuple[str, str], list[float]]:
    """Steps a second of each round."""
    found: dict[tuple[str, str], list[float]] = {(axis, side): [] for axis in axes for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = write_job(shape, Path(folder))
        for number, (axis, side) in enumerate(alternate(list(found), rounds), 1):
            console.print(f"{number}/{rounds * len(found)}  {axis} 2, {side}", style="dim")
            here = Path(folder) / str(number)
            here.mkdir()
            seconds = SIDES[side](job, axis, here)
            found[axis, side].append(1 / statistics.median(seconds[round(UNSTEADY * len(seconds)) :]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a tiny shape and one round, to see that it works")
    parser.add_argument("--rounds", type=int, help="default: 3")
    parser.add_argument("--axes", type=lambda text: text.split(","), default=list(AXES), help=", ".join(AXES))
    parser.add_argument("--out", type=Path, default=RESULTS / "layout_overhead.json")
    options = parser.parse_args()
    shape, rounds = SHORT if options.short else Shape(steps=16), options.rounds or (1 if options.short else 3)
    record = facts()
    found = measure(options.axes, rounds, shape)
    results = [
        {
            "axis": axis,
            **{side: round(max(found[axis, side]), 3) for side in SIDES},
            "rounds": {side: [round(rate, 3) for rate in found[axis, side]] for side in SIDES},
            "ratio": round(max(found[axis, "slipstream"]) / max(found[axis, "by hand"]), 3),
        }
        for axis in options.axes
    ]
    show(
        f"steps/s on {record['machine']}, torch {record['versions']['torch']}, fp32",
        ("layout", "slipstream", "by hand", "ratio"),
        [(f"{r['axis']} 2", f"{r['slipstream']:.2f}", f"{r['by hand']:.2f}", f"{r['ratio']:.3f}") for r in results],
    )
    save(options.out, {**record, "settings": {**asdict(shape), "rounds": rounds}, "results": results})


if __name__ == "__main__":
    main()
