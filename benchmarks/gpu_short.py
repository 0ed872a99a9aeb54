"""Short steps on one GPU: how long they are, and how much of that the GPU computes; in the rest it waits for the
processor, which launches what it computes.

Each job goes through `slipstream train` on random tokens, and then through `slipstream profile`, which says what its
kernels take.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import yaml

from common import RESULTS, console, facts, save, show
from gpu_prediction import SHAPE, job_of, shortened, write_tokens
from watched import environment, finish, steady, train


def row(**given: int | str) -> dict[str, str]:
    """A decoder as in `tests/data/h200_steps.csv`, of which two are."""
    empty = dict.fromkeys((*SHAPE, "sequence", "batch", "micro_batch", "recompute", "state"), "")
    return {**empty, "precision": "bf16", **{name: str(value) for name, value in given.items()}}


JOBS = {
    "24 layers of 256, 8 × 256": row(layers=24, hidden=256, heads=4, vocabulary=32000, sequence=256, batch=8),
    "4 layers of 512, 16 × 512": row(layers=4, hidden=512, heads=8, vocabulary=32000, sequence=512, batch=16),
    "8 layers of 1,024, 16 × 1,024": row(layers=8, hidden=1024, heads=16, vocabulary=32000, sequence=1024, batch=16),
    "gpt2-124m, 32 × 512 by 8": row(preset="gpt2-124m", vocabulary=50304, sequence=512, batch=32, micro_batch=8),
    "gpt2-1.5b, 16 × 1,024 by 8": row(preset="gpt2-1.5b", vocabulary=50304, sequence=1024, batch=16, micro_batch=8),
}


def measure(job: Path, steps: int, device: str, limit: float) -> dict[str, float]:
    """Seconds of a step, and of its kernels."""
    around = environment(job.parent / "cache", device == "cuda")
    timed = train(job, job.parent, steps, around, limit)
    kinds = profile(job, job.parent / "profile", around, limit)
    return {
        "step_s": round(statistics.median(steady(timed.seconds)), 6),
        "computing_s": round(sum(seconds for kind, seconds in kinds.items() if kind != "idle"), 6),
    }


def profile(job: Path, folder: Path, around: dict[str, str], limit: float) -> dict[str, float]:
    """Seconds of a step by what they are for, by `slipstream profile`."""
    folder.mkdir()
    words = ["profile", str(job), "--json", "--trace", str(folder / "trace.json")]
    finish([sys.executable, "-m", "slipstream", *words], folder, around, limit)
    said = (folder / "log").read_text()
    kinds: dict[str, float] = json.JSONDecoder().raw_decode(said, said.index("{"))[0]["kinds"]  # after warnings
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="one tiny job on the CPU, to see that it works")
    parser.add_argument("--steps", type=int, default=60, help="of each run; memory is pinned beside the first")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a run may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_short.json")
    options = parser.parse_args()
    device, jobs = "cuda", JOBS
    if options.short:
        device, jobs = "cpu", {name: shortened(each) for name, each in list(JOBS.items())[:1]}
    record, results = facts("triton"), []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tokens = write_tokens(Path(folder), list(jobs.values()))
        for number, (name, each) in enumerate(jobs.items()):
            console.print(f"{number + 1}/{len(jobs)}  {name}", style="dim")
            here = Path(folder) / str(number)
            here.mkdir()
            (here / "job.yaml").write_text(yaml.safe_dump(job_of(each, str(tokens), device)))
            results.append({"job": name, **measure(here / "job.yaml", options.steps, device, options.limit)})
            save(options.out, {**record, "results": results})  # at once: the next may not end
    show(
        "",
        ("job", "ms a step", "computing", "waiting"),
        [
            (
                each["job"],
                f"{each['step_s'] * 1e3:.1f}",
                f"{each['computing_s'] * 1e3:.1f}",
                f"{max(0.0, 1 - each['computing_s'] / each['step_s']):.0%}",
            )
            for each in results
        ],
    )


if __name__ == "__main__":
    main()
