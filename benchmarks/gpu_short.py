"""Short steps on one GPU: how long they are, and how much of that the GPU computes; in the rest it waits for the
processor, which launches what it computes.

Each job goes through `slipstream train` on random tokens, and then through `slipstream profile`, which says what its
kernels take.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from common import RESULTS, console, facts, save, show
from watched import Failed, environment, started, steady, train, why

VOCABULARY, TOKENS = 32_000, 2**20
JOBS: dict[str, tuple[dict[str, Any], int, int, dict[str, Any]]] = {
    "24 layers of 256, 8 × 256": ({"layers": 24, "hidden": 256, "heads": 4}, 256, 8, {}),
    "4 layers of 512, 16 × 512": ({"layers": 4, "hidden": 512, "heads": 8}, 512, 16, {}),
    "8 layers of 1,024, 16 × 1,024": ({"layers": 8, "hidden": 1024, "heads": 16}, 1024, 16, {}),
    "gpt2-124m, 32 × 512 by 8": ({"preset": "gpt2-124m", "vocabulary": 50304}, 512, 32, {"micro_batch": 8}),
    "gpt2-1.5b, 16 × 1,024 by 8": ({"preset": "gpt2-1.5b", "vocabulary": 50304}, 1024, 16, {"micro_batch": 8}),
}
"""Model, tokens in a sample, batch, layout."""


def job_of(name: str, tokens: Path, device: str, short: bool) -> dict[str, Any]:
    model, sequence, batch, layout = JOBS[name]
    if short:
        model, sequence = {"layers": 2, "hidden": 64, "heads": 2}, 32
    vocabulary = model.get("vocabulary", VOCABULARY)
    return {
        "name": "gpu-short",
        "model": {"kind": "decoder", **model, "vocabulary": vocabulary},
        "data": {"source": str(tokens), "tokens": True, "sequence": sequence, "vocabulary": vocabulary},
        "train": {
            "steps": 100_000,  # it is stopped before it would save
            "batch": batch,
            "optimizer": {"name": "adamw", "lr": 1e-4},
            "clip": {"norm": 1.0},
            "precision": "fp32" if device == "cpu" else "bf16",
        },
        "layout": {"replicate": 1, **layout},
        "machines": {"device": device},
        "checkpoint": {"every": 100_000},
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
    with started([sys.executable, "-m", "slipstream", *words], folder, around) as process:
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise Failed(why(process, limit, folder / "log")) from None
        said = (folder / "log").read_text()
        if process.returncode:
            raise Failed(why(process, limit, folder / "log"))
    kinds: dict[str, float] = json.JSONDecoder().raw_decode(said, said.index("{"))[0]["kinds"]  # after warnings
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="one tiny job on the CPU, to see that it works")
    parser.add_argument("--steps", type=int, default=60, help="of each run; memory is pinned beside the first")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a run may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_short.json")
    options = parser.parse_args()
    device, names = ("cpu", list(JOBS)[:1]) if options.short else ("cuda", list(JOBS))
    record, results = facts("triton"), []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tokens = Path(folder) / "tokens.npy"
        np.save(tokens, (np.random.default_rng(0).zipf(1.3, TOKENS) % VOCABULARY).astype(np.uint32))
        for number, name in enumerate(names):
            console.print(f"{number + 1}/{len(names)}  {name}", style="dim")
            here = Path(folder) / str(number)
            here.mkdir()
            (here / "job.yaml").write_text(yaml.safe_dump(job_of(name, tokens, device, options.short)))
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
