"""Predicted against measured step times on this machine, for small jobs that the probe has not seen.

`slipstream probe` comes first; then each job is predicted, and all are trained in turn, to and fro. What counts is the
better of both times, of each the median of its steady steps, as in the probe.
"""

import argparse
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import RESULTS, alternate, console, facts, save, show
from slipstream.plan import make_plan, this_machine
from slipstream.plan.profile import Profile, load_profile
from slipstream.probe import Shape, measure_step, predict_step, probe, probe_job

JOBS: tuple[Shape, ...] = (
    (3, 96, 96, 384, 6, ""),
    (6, 128, 64, 1024, 8, ""),
    (2, 320, 128, 1024, 4, ""),
    (4, 256, 64, 3072, 8, ""),
    (8, 128, 128, 512, 4, ""),
    (3, 192, 192, 2048, 8, ""),
    (6, 128, 64, 1024, 8, "replicate=2"),
    (3, 192, 192, 2048, 8, "replicate=2"),
    (4, 256, 64, 3072, 8, "shard=2"),
    (3, 192, 128, 1024, 8, "shard=2,sharded=optimizer"),
    (4, 256, 128, 1024, 8, "tensor=2"),
    (6, 192, 128, 2048, 16, "pipeline=2,micro_batch=4"),
)


def compare(profile: Profile, jobs: tuple[Shape, ...], rounds: int) -> list[dict[str, Any]]:
    runs: list[list[float]] = [[] for _ in jobs]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        made = [probe_job(shape, Path(folder)) for shape in jobs]
        for turn, index in enumerate(alternate(list(range(len(jobs))), rounds)):
            console.print(f"{turn + 1}/{rounds * len(jobs)}  {jobs[index]}", style="dim")
            workers = make_plan(made[index], this_machine()).layout.workers
            runs[index].append(measure_step(made[index], workers, Path(folder) / str(turn)))
        predictions = [predict_step(job, profile, this_machine()) for job in made]
    return [
        {"job": shape, "measured": min(taken), "runs": taken, "predicted": given, "error": given / min(taken) - 1}
        for shape, taken, given in zip(jobs, runs, predictions, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="two jobs, and the profile that is there, if there is one")
    parser.add_argument("--out", type=Path, default=RESULTS / "prediction.json")
    options = parser.parse_args()
    record = facts()
    known = load_profile(this_machine()) if options.short else None
    profile = known or probe(lambda text: console.print(text, style="dim"))
    rows = compare(profile, JOBS[:2] if options.short else JOBS, 1 if options.short else 2)
    middle = statistics.median(abs(row["error"]) for row in rows)
    show(
        f"steps on {record['machine']}; median error {middle:.1%}",
        ("layers, width, tokens, vocabulary, batch, layout", "measured", "predicted", "error"),
        [
            (
                str(row["job"]),
                f"{row['measured'] * 1e3:.1f} ms",
                f"{row['predicted'] * 1e3:.1f} ms",
                f"{row['error']:+.1%}",
            )
            for row in rows
        ],
    )
    save(options.out, {**record, "median_error": middle, "results": rows, "profile": asdict(profile)})


if __name__ == "__main__":
    main()
