"""Whether a codec, local steps or servers cost anything in the end: the same jobs, on two workers, with each and with
plain all-reduce.

A decoder on the text of Python's own library and a residual network on handwritten digits are trained to their end;
what is compared is the loss on held-out samples. `bytes` is what each worker sent in a step. Servers do not go with
batch norm: for them the network has group norm. Where every gradient is an update, as soon as it comes, batches are a
quarter as large and as many samples are seen; where workers take steps by themselves, Adam's rate is larger.
"""

import argparse
import json
import math
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from common import RESULTS, SLIPSTREAM, console, facts, save, show

WORKERS = 2
DILOCO = {"kind": "local", "every": 16, "outer": {"lr": 0.7, "momentum": 0.4, "nesterov": True}}
CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    **{name: {"codec": name} for name in ("fp16", "bf16", "int8", "onebit", "topk", "randomk", "powersgd")},
    "local": {"kind": "local", "every": 4},
    "diloco": DILOCO,
    "diloco-int8": {**DILOCO, "codec": "int8"},
    "server": {"kind": "server"},
    "async": {"kind": "server", "mode": "async"},
    "staleness": {"kind": "server", "mode": "async", "staleness": 1},
}
"""As a job file has them, with the settings that docs/exchange.md recommends."""
JOBS: dict[str, dict[str, Any]] = {
    "decoder": {
        "name": "decoder",
        "model": {"kind": "decoder", "layers": 2, "hidden": 64, "heads": 4},
        "data": {"source": "python-stdlib", "sequence": 64, "vocabulary": 512, "validation": "1%"},
        "train": {
            "steps": 600,
            "batch": 16,
            "optimizer": {"name": "adamw", "lr": 2e-3},
            "schedule": {"decay": "cosine", "warmup": "10%"},
            "clip": {"norm": 1.0},
            "evaluate": {"every": "100%"},
        },
    },
    "digits": {
        "name": "digits",
        "model": {"kind": "resnet", "depth": 18, "width": 8, "stem": "small"},
        "data": {"source": "digits", "validation": "20%"},
        "train": {
            "task": {"kind": "classification", "label_smoothing": 0.05},
            "epochs": 8,
            "batch": 64,
            "optimizer": {"name": "nesterov", "lr": 0.05},
            "schedule": {"decay": "cosine", "warmup": "10%"},
            "l2": 5e-4,
            "evaluate": {"every": "100%"},
        },
    },
}

JOBS["digits-group"] = {**JOBS["digits"], "model": {**JOBS["digits"]["model"], "norm": "group"}}


def goes_with(job: str, name: str) -> bool:
    """Every codec and exchange is tried on the decoder and on one of the networks, beside none."""
    served = CODECS[name].get("kind") == "server"
    return name == "none" or job == "decoder" or served == (job == "digits-group")


def smaller_batches(recipe: dict[str, Any]) -> dict[str, Any]:
    """A quarter of a batch, and the rate that goes with it: a quarter for gradient descent, half for Adam."""
    optimizer = recipe["optimizer"]
    rate = optimizer["lr"] / (2 if optimizer["name"] == "adamw" else 4)
    longer = {"steps": 4 * recipe["steps"]} if "steps" in recipe else {}
    return {**recipe, "batch": recipe["batch"] // 4, "optimizer": {**optimizer, "lr": rate}, **longer}


def larger_rate(recipe: dict[str, Any]) -> dict[str, Any]:
    """Adam divides by the size of a worker's own gradients, which are noisier than the sum of all."""
    optimizer = recipe["optimizer"]
    more = math.sqrt(WORKERS) if optimizer["name"] == "adamw" else 1.0
    return {**recipe, "optimizer": {**optimizer, "lr": more * optimizer["lr"]}}


def recipe_with(exchange: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """As docs/exchange.md recommends."""
    if exchange.get("mode") == "async":
        return smaller_batches(recipe)
    return larger_rate(recipe) if exchange.get("kind") == "local" else recipe


def train(values: dict[str, Any], exchange: dict[str, Any], seed: int, short: bool, root: Path) -> dict[str, Any]:
    """The result of a run to its end."""
    folder = Path(tempfile.mkdtemp(dir=root))
    recipe = recipe_with(exchange, values["train"])
    lengths = {"steps": 4, "epochs": None} if short else {}
    job = {**values, "seed": seed, "machines": {"device": "cpu"}, "exchange": exchange, "checkpoint": {"every": "100%"}}
    (folder / "job.yaml").write_text(yaml.safe_dump({**job, "train": {**recipe, **lengths}}))
    command = [SLIPSTREAM, "train", "job.yaml", "--workers", str(WORKERS), "--run-dir", "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{exchange} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads((folder / "run/result.json").read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few steps each, to see that it works")
    parser.add_argument("--jobs", default=",".join(JOBS), help="which jobs")
    parser.add_argument("--codecs", default=",".join(CODECS), help="which codecs, beside none")
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each, of whose losses the mean counts; default: 1"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "codecs.json")
    options = parser.parse_args()
    names = ["none", *(name for name in options.codecs.split(",") if name != "none")]
    record, results = facts(), []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for job in options.jobs.split(","):
            plain: float | None = None
            for name in (name for name in names if goes_with(job, name)):
                runs = [
                    train(JOBS[job], CODECS[name], seed, options.short, Path(folder)) for seed in range(options.seeds)
                ]
                losses = [run["val_loss"] for run in runs]
                loss = statistics.mean(losses)
                plain = plain or loss
                keys = ("val_accuracy", "sent", "compression", "seconds")
                found = {"val_loss": loss, "losses": losses, **{key: runs[0][key] for key in keys}}
                results.append({"job": job, "codec": name, "loss_ratio": round(loss / plain, 4), **found})
                console.print(f"{job} {name}: {loss:.4f} ({results[-1]['loss_ratio']:.4f})", style="dim")
    for job in options.jobs.split(","):
        rows = [
            (
                r["codec"],
                f"{r['val_loss']:.4f}",
                f"{r['loss_ratio'] - 1:+.1%}",
                f"{r['sent']:,}",
                f"{r['compression']:.1f}",
            )
            for r in results
            if r["job"] == job
        ]
        show(f"{job}, loss on held-out samples", ("codec", "loss", "against none", "bytes a step", "compression"), rows)
    save(options.out, {**record, "settings": {"jobs": JOBS, "codecs": CODECS, "workers": WORKERS}, "results": results})


if __name__ == "__main__":
    main()
