"""Training on one GPU: Slipstream beside other trainers, each side in a fresh process with the same shape and recipe.

A row is a model with its batch and precision; a side is a trainer. All sides of a row train the same shape on the same
random tokens (or images) with the same optimiser. A side's figure is the median over its steady steps, by events in the
device's queue: nothing waits for a step but the first. A side starts with empty compile caches in its first round,
whose seconds to the first step count; of several rounds the quickest gives the speed. `--peers` names a folder with
packages that are not installed (litgpt, torchtitan, liger_kernel, nanoGPT's model.py as nanogpt_model.py): it is on the
path of the peers alone.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from common import RESULTS, alternate, console, facts, save, show
from slipstream.job import Job, load_job
from slipstream.job.data import TokenData
from slipstream.job.models import DecoderModel, ResnetModel
from slipstream.job.train import AdamW, Momentum
from slipstream.planning import work_of
from watched import Failed, Timed, environment, finish, steady, train

PEERS = Path(__file__).parent / "peers" / "gpu"
PEAK = 795e12
"""FLOP/s of bf16 products, measured on the H200."""
RESNET_FLOPS = 3 * 2 * 4.1e9
"""ResNet-50 on one image of 224 × 224: 4.1 billion multiply-adds forward, backward twice as many."""
BATCHES = 32
"""Different batches of tokens; longer runs see them again."""
ENDLESS = 100_000
"""Steps in Slipstream's job: it is stopped when it has done enough of them, and so never writes a checkpoint."""

# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A model, what it learns from, and how."""

    model: dict[str, Any]
    batch: int
    steps: int
    sides: tuple[str, ...] = ("slipstream",)
    sequence: int = 0
    """Tokens in a sample; 0 where samples are images."""
    pixels: int = 0
    """Width and height of an image."""
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adamw", "lr": 1e-4})
    precision: str = "bf16"
    layout: dict[str, Any] = field(default_factory=dict)
    device: str = "cuda"

    @property
    def unit(self) -> str:
        return "tokens" if self.sequence else "images"

    @property
    def size(self) -> int:
        """Units in a step."""
        return self.batch * (self.sequence or 1)

    def shortened(self) -> "Row":
        """The same in tiny, for a CPU."""
        if self.sequence:
            small = {"layers": 2, "hidden": 128, "heads": 16, "feed_forward": 384, "vocabulary": 256}
            optimizer = {**self.optimizer, "lr": 1e-3}
            short = replace(self, model={**self.model, **small}, sequence=32, optimizer=optimizer)
        else:
            short = replace(self, model={**self.model, "depth": 18}, pixels=32)
        return replace(short, batch=4, steps=10, device="cpu")


LLAMA_1B = Row(
    {"preset": "llama-1b"},
    batch=8,
    sequence=4096,
    steps=30,
    sides=("slipstream", "hf", "hf-liger", "lightning", "litgpt", "torchtitan", "plain"),
)
LLAMA_8B = Row(
    {"preset": "llama-8b"},
    batch=4,
    sequence=8192,
    steps=10,
    optimizer={"name": "adamw", "lr": 1e-4, "state": "bf16"},
    layout={"micro_batch": 1, "recompute": "selective"},
)
ROWS = {
    "llama-1b": LLAMA_1B,
    "llama-1b fp8": replace(LLAMA_1B, precision="fp8", sides=("slipstream",)),
    "gpt2": Row(
        {"preset": "gpt2-124m", "vocabulary": 50304},
        batch=64,
        sequence=1024,
        steps=60,
        sides=("slipstream", "hf", "nanogpt", "plain"),
    ),
    "llama-8b": LLAMA_8B,
    "llama-8b fp8": replace(LLAMA_8B, precision="fp8", layout={"micro_batch": 1}),
    "resnet-50": Row(
        {"kind": "resnet", "depth": 50},
        batch=256,
        pixels=224,
        steps=60,
        optimizer={"name": "momentum", "lr": 0.05, "momentum": 0.9},
        sides=("slipstream", "torchvision"),
    ),
}

# --- the job of a row, for Slipstream, and its shape, for the peers --------------------------------------------------


def write_job(row: Row, folder: Path) -> Path:
    """The job file and its data."""
    data = write_tokens(row, folder) if row.sequence else write_images(row, folder)
    train: dict[str, Any] = {
        "steps": ENDLESS,
        "batch": row.batch,
        "optimizer": row.optimizer,
        "precision": row.precision,
    }
    train |= {"clip": {"norm": 1.0}} if row.sequence else {"task": "classification"}
    job = {
        "name": "gpu-train",
        "model": row.model,
        "data": data,
        "train": train,
        "layout": row.layout,
        "machines": {"device": row.device},
        "checkpoint": {"every": ENDLESS},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def write_tokens(row: Row, folder: Path) -> dict[str, Any]:
    """Random tokens, a few of them far more frequent than the rest."""
    vocabulary: int = load_vocabulary(row)
    tokens = np.random.default_rng(0).zipf(1.3, BATCHES * row.size + 1) % vocabulary
    np.save(folder / "tokens.npy", tokens.astype(np.uint32))
    source = str(folder / "tokens.npy")
    return {"source": source, "tokens": True, "sequence": row.sequence, "vocabulary": vocabulary}


def load_vocabulary(row: Row) -> int:
    """As the row says, or its preset."""
    vocabulary = DecoderModel.model_validate(row.model).vocabulary
    assert vocabulary, "every row has one"
    return vocabulary


def write_images(row: Row, folder: Path) -> dict[str, Any]:
    """Random bytes, four batches of them, each with one of 1000 classes."""
    draw, count, classes = np.random.default_rng(0), 4 * row.batch, 1000
    np.save(folder / "images.npy", draw.integers(0, 256, (count, 3, row.pixels, row.pixels), dtype=np.uint8))
    targets = draw.integers(0, classes, count)
    targets[0] = classes - 1  # the largest says how many there are
    np.save(folder / "classes.npy", targets)
    return {"source": str(folder / "images.npy"), "target": str(folder / "classes.npy")}


def write_shape(row: Row, path: Path, job: Job) -> Path:
    """The same job in plain numbers, so that the peers need not know what a job is."""
    shape: dict[str, Any] = {"job": str(path), "batch": row.batch, "steps": row.steps, "compile": row.device == "cuda"}
    model, optimizer, data = job.model, job.train.optimizer, job.data
    if isinstance(model, DecoderModel):
        assert isinstance(optimizer, AdamW) and isinstance(data, TokenData) and job.train.clip, "written above"
        shape |= {
            "source": data.source,
            "sequence": data.sequence,
            "vocabulary": data.vocabulary,
            "family": "llama" if model.positions == "rotary" else "gpt2",
            "kv_heads": model.kv_heads or model.heads,
            "feed_forward": model.inner,
            "clip": job.train.clip.norm,
            **model.model_dump(include={"layers", "hidden", "heads", "norm_eps", "rope_theta", "tied"}),
            **optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay"}),
        }
    else:
        assert isinstance(model, ResnetModel) and isinstance(optimizer, Momentum), "written above"
        shape |= {"depth": model.depth, **optimizer.model_dump(include={"lr", "momentum"})}
        shape |= {"source": str(path.parent / "images.npy"), "target": str(path.parent / "classes.npy")}
    where = path.with_name("shape.json")
    where.write_text(json.dumps(shape))
    return where


def flops_of(row: Row, job: Job) -> float | None:
    """Of a step's products, forward and backward: causal attention counted once, recomputation not at all."""
    if row.sequence:
        return float(work_of(job).flops) * row.batch
    return RESNET_FLOPS * row.batch if row.pixels == 224 else None


# --- one side in one round -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What a side is given."""

    row: Row
    job: Path
    shape: Path
    folder: Path
    """For this side in this round alone."""
    environment: dict[str, str]
    seconds: float
    """How long it may take."""


def time_slipstream(task: Task) -> Timed:
    """Through the door that everybody takes, until there are enough steps."""
    return train(task.job, task.folder, task.row.steps, task.environment, task.seconds)


def time_peer(script: str, task: Task) -> Timed:
    """`script` is the name of the file and what it is told besides."""
    name, *words = script.split()
    times = task.folder / "times.json"
    command = [sys.executable, str(PEERS / name), str(task.shape), str(times), *words]
    finish(command, task.folder, task.environment, task.seconds)
    if not times.exists():
        raise Failed(f"it left no times\n{(task.folder / 'log').read_text(errors='replace')[-3000:]}")
    return Timed(**json.loads(times.read_text()))


class Side(NamedTuple):
    time: Callable[[Task], Timed]
    needs: tuple[str, ...] = ()
    """Modules that must be found."""


def peer(script: str, *needs: str) -> Side:
    return Side(lambda task: time_peer(script, task), needs)


SIDES = {
    "slipstream": Side(time_slipstream),
    "hf": peer("hf_trainer.py", "transformers", "accelerate"),
    "hf-liger": peer("hf_trainer.py liger", "transformers", "accelerate", "liger_kernel"),
    "lightning": peer("lightning_trainer.py", "lightning", "transformers"),
    "litgpt": peer("litgpt_loop.py", "lightning", "litgpt"),
    "torchtitan": peer("torchtitan_loop.py", "torchtitan", "tyro", "torchdata"),
    "nanogpt": peer("nanogpt_loop.py", "nanogpt_model|nanoGPT"),
    "torchvision": peer("torchvision_loop.py", "torchvision"),
    "plain": peer("plain_decoder.py"),
}
ONLY_IF_ASKED = ("plain",)
SHORT_SIDES = ("slipstream", "plain")


def missing(side: str, peers: Path | None) -> list[str]:
    """What a side needs and is not there; `|` stands between names of which one is enough."""
    path = [*([str(peers)] if peers else []), *sys.path]
    return [
        names for names in SIDES[side].needs if not any(PathFinder.find_spec(name, path) for name in names.split("|"))
    ]


# --- a row over all its sides ----------------------------------------------------------------------------------------


def measure(name: str, row: Row, sides: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let the sides take turns; give the results of a row."""
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = write_job(row, Path(folder))
        loaded = load_job(job)
        shape, flops = write_shape(row, job, loaded), flops_of(row, loaded)
        for number, side in enumerate(alternate(sides, options.rounds), 1):
            if side in failures:
                continue
            console.print(f"{name}  {number}/{options.rounds * len(sides)}  {side}", style="dim")
            here = Path(folder) / str(number)
            here.mkdir()
            peers = options.peers if side != "slipstream" else None
            caches = environment(Path(folder) / f"cache-{side}", row.device == "cuda", peers)
            began = time.time()
            try:
                timed = SIDES[side].time(Task(row, job, shape, here, caches, options.limit))
                rounds[side].append(figures(row, timed, began))
            except Failed as error:
                failures[side] = str(error)
                console.print(f"{side} failed: {error}", markup=False)
    results = [summarise(name, row, side, found, flops, options.peak) for side, found in rounds.items() if found]
    compare(results)
    failed = [{"row": name, "side": side, "failed": text[-2000:]} for side, text in failures.items()]
    return [*results, *(record for record in failed if not rounds[record["side"]])]


def figures(row: Row, timed: Timed, began: float) -> dict[str, Any]:
    """One side in one round."""
    seconds = statistics.median(steady(timed.seconds))
    return {
        "step_s": round(seconds, 6),
        "per_s": round(row.size / seconds, 1),
        "first_step_s": round(timed.first - began, 2),
        "memory_gb": round(timed.memory / 1e9, 2) if timed.memory else None,
        "first_loss": round(timed.losses[0], 4),
        "last_loss": round(timed.losses[-1], 4),
        "seconds": [round(step, 6) for step in timed.seconds],
    }


def summarise(
    name: str, row: Row, side: str, rounds: list[dict[str, Any]], flops: float | None, peak: float
) -> dict[str, Any]:
    """One side's figures: the best round's, and how long the first start took."""
    best = max(rounds, key=lambda figure: figure["per_s"])
    return {
        "row": name,
        "side": side,
        "unit": f"{row.unit}/s",
        **{key: best[key] for key in ("per_s", "step_s", "memory_gb", "first_loss", "last_loss")},
        "utilisation": round(flops / best["step_s"] / peak, 4) if flops else None,
        "first_step_s": rounds[0]["first_step_s"],
        "rounds": rounds,
    }


def compare(results: list[dict[str, Any]]) -> None:
    """Add to each side of a row how many times its speed Slipstream has."""
    ours = next((result["per_s"] for result in results if result["side"] == "slipstream"), None)
    for result in results:
        result["ratio"] = round(ours / result["per_s"], 3) if ours else None


# --- the command -----------------------------------------------------------------------------------------------------


def choose_sides(row: Row, options: argparse.Namespace) -> list[str]:
    """Those of the row that are wanted and there; one that is not there is left out, and said to be."""
    chosen = []
    for side in row.sides:
        if side in options.sides:
            if lacking := missing(side, options.peers):
                console.print(f"{side} is left out: {', '.join(lacking)} not found (see --peers)")
            else:
                chosen.append(side)
    return chosen


def read_options() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="tiny shapes on the CPU, to see that it works")
    parser.add_argument("--rows", type=words, help=f"default: all of {', '.join(ROWS)}")
    parser.add_argument("--sides", type=words, help=f"of {', '.join(SIDES)}; default: all but plain")
    parser.add_argument("--steps", type=int, help="of every side; default: the row's own")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=180, help="seconds that a process may take")
    parser.add_argument("--peak", type=float, default=PEAK, help="FLOP/s that utilisation is counted against")
    parser.add_argument("--peers", type=lambda text: Path(text).absolute(), help="a folder with peers' packages")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_train.json")
    options = parser.parse_args()
    options.rows = options.rows or (["llama-1b"] if options.short else list(ROWS))
    options.sides = options.sides or list(SHORT_SIDES if options.short else set(SIDES) - set(ONLY_IF_ASKED))
    for what, wanted, known in (("row", options.rows, ROWS), ("side", options.sides, SIDES)):
        if unknown := set(wanted) - set(known):
            parser.error(f"no such {what}: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return options


def peer_versions(peers: Path | None) -> dict[str, str]:
    """Of what was unpacked beside the installed packages."""
    return {found.name: found.version for found in distributions(path=[str(peers)])} if peers else {}


def show_row(name: str, row: Row, results: list[dict[str, Any]]) -> None:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    show(
        f"{name} {row.precision}" if row.precision not in name else name,
        ("side", f"{row.unit}/s", "used", "GB", "start s", "ratio", "loss"),
        [
            (r["side"], "failed", *[""] * 5)
            if "failed" in r
            else (
                r["side"],
                shown(r["per_s"], ",.0f"),
                shown(r["utilisation"], ".1%"),
                shown(r["memory_gb"], ".1f"),
                shown(r["first_step_s"], ".1f"),
                shown(r["ratio"], ".3f"),
                f"{r['first_loss']:.2f}→{r['last_loss']:.2f}",
            )
            for r in results
        ],
    )


def show_caption(record: dict[str, Any], peak: float) -> None:
    versions = record["versions"]
    console.print(
        f"on {record['machine']}, torch {versions['torch']}; used: utilisation of {peak / 1e12:,.0f} TFLOP/s (of bf16 "
        "products, in fp8 rows too), causal attention counted once, recomputation not at all, ResNet-50 as 3 × 2 × 4.1 "
        "GFLOP an image; GB: most that tensors took; start: seconds from the process's start to the end of its first "
        "step, compile caches empty; ratio: Slipstream's speed to the side's"
    )


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    options = read_options()
    record = facts("transformers", "accelerate", "lightning", "torchvision", "triton")
    record["versions"] |= peer_versions(options.peers)
    settings = {"rounds": options.rounds, "peak": options.peak, "rows": {}}
    results: list[dict[str, Any]] = []
    for name in options.rows:
        row = ROWS[name].shortened() if options.short else ROWS[name]
        row = replace(row, steps=options.steps or row.steps)
        settings["rows"][name] = asdict(row)
        found = measure(name, row, choose_sides(row, options), options)
        show_row(name, row, found)
        results += found
        save(options.out, {**record, "settings": settings, "results": results})  # at once: the next row may not end
    show_caption(record, options.peak)


if __name__ == "__main__":
    main()
