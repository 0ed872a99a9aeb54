"""Training on this machine's CPU: Slipstream beside a hand-written loop, Hugging Face Trainer and Lightning.

Every side trains the same decoder on the same tokens with the same recipe, processes and threads; only the trainer
differs. Sides take turns, each in processes of its own; a round's figure is the median over its steady steps, and a
side's figure is its best round, because on a shared machine noise only ever slows. What a trainer sets up by itself,
such as the allocator of Slipstream's workers, belongs to it; evaluation, checkpoints and loggers are off on all sides.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from common import RESULTS, SLIPSTREAM, alternate, console, facts, installed, run_all, save, show
from slipstream.plan import this_machine
from slipstream.runs import read_lines

PEERS = Path(__file__).parent / "peers"
UNSTEADY = 0.2
"""Part of the steps, from the first one on, that does not count."""


@dataclass(frozen=True)
class Shape:
    """What is trained, and for how long."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    sequence: int = 128
    vocabulary: int = 4096
    batch: int = 8
    steps: int = 24


SHORT = Shape(layers=1, hidden=32, heads=2, sequence=32, vocabulary=256, batch=4, steps=10)


class Timed(NamedTuple):
    """One side in one round."""

    seconds: list[float]
    """Of every step."""
    losses: list[float]


class Turn(NamedTuple):
    """One side on one number of processes."""

    side: str
    processes: int


def time_slipstream(job: Path, processes: int, folder: Path) -> Timed:
    """Through the door that everybody takes."""
    command = [SLIPSTREAM, "train", str(job), "--workers", str(processes), "--run-dir", str(folder / "run")]
    run_all([command], [{}], folder / "log")
    lines = list(read_lines(folder / "run" / "metrics.jsonl"))
    return Timed([line["seconds"] for line in lines], [line["loss"] for line in lines])


def time_peer(script: str, job: Path, processes: int, folder: Path) -> Timed:
    """One process for each rank."""
    command = [sys.executable, str(PEERS / script), str(job), str(folder / "times.json")]
    run_all([command] * processes, environments(processes), folder / "log")
    return Timed(**json.loads((folder / "times.json").read_text()))


def environments(processes: int) -> list[dict[str, str]]:
    """What torchrun would give each rank; a process alone is started without it, as one would by hand."""
    base = {"OMP_NUM_THREADS": str(max(1, this_machine().cores // processes)), "HF_HUB_OFFLINE": "1"}
    if processes == 1:
        return [base]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    return [{**base, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


class Side(NamedTuple):
    time: Callable[[Path, int, Path], Timed]
    needs: tuple[str, ...] = ()
    """Packages of the extra [bench]."""


SIDES = {
    "slipstream": Side(time_slipstream),
    "plain": Side(lambda *a: time_peer("plain_loop.py", *a)),
    "hf": Side(lambda *a: time_peer("hf_trainer.py", *a), ("transformers", "accelerate")),
    "lightning": Side(lambda *a: time_peer("lightning_trainer.py", *a), ("lightning",)),
}


def write_job(shape: Shape, folder: Path) -> Path:
    """The job file that all sides read, and its tokens: random, a few of them far more frequent than the rest."""
    draw = np.random.default_rng(0)
    tokens = draw.zipf(1.3, 400 * shape.batch * shape.sequence) % shape.vocabulary
    np.save(folder / "tokens.npy", tokens.astype(np.uint16))
    model = {name: value for name, value in asdict(shape).items() if name in ("layers", "hidden", "heads")}
    job = {
        "name": "cpu-train",
        "model": {"kind": "decoder", **model},
        "data": {
            "source": str(folder / "tokens.npy"),
            "tokens": True,
            "sequence": shape.sequence,
            "vocabulary": shape.vocabulary,
        },
        "train": {
            "steps": shape.steps,
            "batch": shape.batch,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "clip": {"norm": 1.0},
            "precision": "fp32",
        },
        "machines": {"device": "cpu"},
        "checkpoint": {"every": shape.steps},  # at the end only, after the last step: the peers have none
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def measure(turns: Sequence[Turn], rounds: int, shape: Shape) -> dict[Turn, list[Timed]]:
    """Let the sides take turns."""
    times: dict[Turn, list[Timed]] = {turn: [] for turn in turns}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = write_job(shape, Path(folder))
        for number, turn in enumerate(alternate(turns, rounds), 1):
            console.print(f"{number}/{rounds * len(turns)}  {turn.side} × {turn.processes}", style="dim")
            here = Path(folder) / str(number)
            here.mkdir()
            times[turn].append(SIDES[turn.side].time(job, turn.processes, here))
    return times


def summarise(turn: Turn, rounds: list[Timed], shape: Shape) -> dict[str, Any]:
    """One side's figures."""
    medians = [statistics.median(timed.seconds[round(UNSTEADY * len(timed.seconds)) :]) for timed in rounds]
    speeds = [round(shape.batch * shape.sequence / seconds, 1) for seconds in medians]
    return {
        "side": turn.side,
        "processes": turn.processes,
        "tokens_per_s": max(speeds),
        "rounds": speeds,
        "first_loss": round(rounds[0].losses[0], 4),
        "last_loss": round(rounds[0].losses[-1], 4),
    }


def compare(results: list[dict[str, Any]]) -> None:
    """Add each side's ratio to the plain loop on as many processes."""
    plain = {r["processes"]: r["tokens_per_s"] for r in results if r["side"] == "plain"}
    for result in results:
        base = plain.get(result["processes"])
        result["ratio"] = round(result["tokens_per_s"] / base, 3) if base else None


def choose_sides(wanted: list[str]) -> list[str]:
    """Those that are installed; one that is not is left out, and said to be."""
    chosen = []
    for side in wanted:
        missing = [package for package in SIDES[side].needs if not installed(package)]
        if missing:
            console.print(f'{side} is left out: {", ".join(missing)} not installed (pip install -e ".[bench]")')
        else:
            chosen.append(side)
    return chosen


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a tiny shape and one round, to see that it works")
    parser.add_argument("--rounds", type=int, help="default: 3")
    parser.add_argument("--processes", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help=", ".join(SIDES))
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_train.json")
    for name in ("sequence", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape, name))
    options = parser.parse_args()
    if unknown := set(options.sides) - set(SIDES):
        parser.error(f"no such side: {', '.join(sorted(unknown))}; sides are {', '.join(SIDES)}")
    return options


def main() -> None:
    options = read_options()
    shape = SHORT if options.short else Shape(sequence=options.sequence, batch=options.batch, steps=options.steps)
    rounds = options.rounds or (1 if options.short else 3)
    record = facts("transformers", "accelerate", "lightning")
    turns = [Turn(side, n) for n in options.processes for side in choose_sides(options.sides)]
    times = measure(turns, rounds, shape)
    results = [summarise(turn, timed, shape) for turn, timed in times.items()]
    compare(results)
    show(
        f"decoder on {record['machine']}, torch {record['versions']['torch']}, fp32",
        ("side", "processes", "tokens/s", "slowest round", "ratio to plain"),
        [
            (
                r["side"],
                str(r["processes"]),
                f"{r['tokens_per_s']:,.0f}",
                f"{min(r['rounds']):,.0f}",
                "" if r["ratio"] is None else f"{r['ratio']:.3f}",
            )
            for r in results
        ],
    )
    save(options.out, {**record, "settings": {**asdict(shape), "rounds": rounds}, "results": results})


if __name__ == "__main__":
    main()
