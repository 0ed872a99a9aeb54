"""The loss on a GPU in fewer bits, beside the same job in more: what is lost by it, over a whole run.

Pairs: llama-1b in fp8 beside bf16, on text, on the GPU; a small decoder in bf16 there beside fp32 on the CPU. Both runs
of a pair go through `slipstream train`, at the same time, for nothing is timed, and differ in precision and device
alone. They are compared by means over some steps, because single steps are moved by roundings alone.
"""

import argparse
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from common import RESULTS, console, facts, save, show
from watched import Timed, environment, train


@dataclass(frozen=True)
class Pair:
    """A job, and the precisions and devices that it is trained with: what the second loses beside the first."""

    job: dict[str, Any]
    sides: tuple[tuple[str, str], tuple[str, str]]
    steps: int
    mean: int
    """Steps of one mean."""


def decoder(model: dict[str, Any], data: dict[str, Any], batch: int, lr: float, steps: int, warmup: str) -> Any:
    train = {
        "steps": steps + 1,  # it is stopped before it would save
        "batch": batch,
        "optimizer": {"name": "adamw", "lr": lr},
        "schedule": {"decay": "cosine", "warmup": warmup, "floor": "10%"},
        "clip": {"norm": 1.0},
    }
    return {"model": model, "data": data, "train": train, "checkpoint": {"every": 2 * steps}}


PAIRS = {
    # A rate of 3e-4 for half a million tokens a step, as Llama 3 has it, comes to 4e-5 for 8,192 by the root of the
    # batch (Malladi et al. 2022, arXiv 2205.10287). With more tokens two runs on one GPU take over ten minutes.
    "fp8": Pair(
        decoder(
            {"preset": "llama-1b"},
            {"source": "python-stdlib", "sequence": 1024, "vocabulary": 32768},
            8,
            5e-5,
            1000,
            "20%",
        ),
        (("bf16", "cuda"), ("fp8", "cuda")),
        steps=1000,
        mean=100,
    ),
    "cpu": Pair(
        decoder(
            {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 8},
            {"source": "python-stdlib", "sequence": 256, "vocabulary": 4096},
            8,
            3e-4,
            200,
            "5%",
        ),
        (("fp32", "cpu"), ("bf16", "cuda")),
        steps=200,
        mean=20,
    ),
}


def shortened(pair: Pair) -> Pair:
    """The same in tiny, for a CPU."""
    model = {"kind": "decoder", "layers": 2, "hidden": 64, "heads": 2}
    job = decoder(model, {"source": "python-stdlib", "sequence": 32, "vocabulary": 300}, 4, 1e-3, 10, "20%")
    return replace(pair, job=job, sides=(("fp32", "cpu"), ("bf16", "cpu")), steps=10, mean=5)


def compare(name: str, pair: Pair, folder: Path, limit: float) -> dict[str, Any]:
    """Both runs, and how far apart they are."""
    console.print(f"{name}  {' beside '.join(' on '.join(side) for side in pair.sides)}", style="dim")
    with ProcessPoolExecutor(len(pair.sides)) as processes:  # whose runs end with them, and all of them by Ctrl-C
        folders = [folder / f"{name}-{'-'.join(side)}" for side in pair.sides]
        sides = list(processes.map(partial(run_side, pair, limit=limit), pair.sides, folders))
    exact, ours = (means(side.losses, pair.mean) for side in sides)
    return {
        "pair": name,
        "sides": [" on ".join(side) for side in pair.sides],
        "means": [exact, ours],
        "off": [round(mine / theirs - 1, 6) for mine, theirs in zip(ours, exact, strict=True)],
        "off_in_all": round(statistics.fmean(ours) / statistics.fmean(exact) - 1, 6),
        "losses": [side.losses for side in sides],
    }


def run_side(pair: Pair, side: tuple[str, str], folder: Path, limit: float) -> Timed:
    """One of the two."""
    precision, device = side
    folder.mkdir()
    train_section = {**pair.job["train"], "precision": precision}
    job = {"name": "gpu-curve", **pair.job, "train": train_section, "machines": {"device": device}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return train(folder / "job.yaml", folder, pair.steps, environment(folder / "cache", device == "cuda"), limit)


def means(losses: list[float], steps: int) -> list[float]:
    """Over so many steps each."""
    return [round(statistics.fmean(losses[at : at + steps]), 6) for at in range(0, len(losses), steps)]


def show_pair(found: dict[str, Any], pair: Pair) -> None:
    (first, second), rows = found["means"], []
    for number, off in enumerate(found["off"]):
        steps = f"{number * pair.mean + 1}–{(number + 1) * pair.mean}"
        rows.append((steps, f"{first[number]:.4f}", f"{second[number]:.4f}", f"{off:+.3%}"))
    rows.append(("all", "", "", f"{found['off_in_all']:+.3%}"))
    show(f"{found['pair']}: mean loss", ("steps", *found["sides"], "off"), rows)
    console.print(f"at most {max(abs(off) for off in found['off']):.3%} off")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a tiny pair on the CPU, to see that it works")
    parser.add_argument("--pairs", type=lambda text: text.split(","), help=f"default: {','.join(PAIRS)}")
    parser.add_argument(
        "--prepared", type=Path, help="a dataset of text for fp8 (others take none); default: Python's library"
    )
    parser.add_argument("--limit", type=float, default=400, help="seconds that a run may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_curve.json")
    options = parser.parse_args()
    wanted = options.pairs or (["cpu"] if options.short else list(PAIRS))
    if unknown := set(wanted) - set(PAIRS):
        parser.error(f"no such pair: {', '.join(sorted(unknown))}; there are {', '.join(PAIRS)}")
    record, results = facts("triton"), []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in wanted:
            pair = shortened(PAIRS[name]) if options.short else PAIRS[name]
            if options.prepared and name == "fp8":
                data = {"prepared": str(options.prepared.absolute()), "sequence": pair.job["data"]["sequence"]}
                pair = replace(pair, job={**pair.job, "data": data})
            results.append(compare(name, pair, Path(folder), options.limit))
            show_pair(results[-1], pair)
            save(options.out, {**record, "results": results})  # at once: the next pair may not end


if __name__ == "__main__":
    main()
