"""Command to first step: `train` and `submit --on local`; on one Ray cluster, `submit --on ray` and Ray Train.

The time runs from the start of the command's process to the first line of metrics, for a tiny model: what is waited
for is Python, torch, the engine, the workers' meeting and one step. The cluster has a head and two nodes with two cores
each, on hosts of their own (ray_cluster.py), and every side trains the same model there with four workers. Ray Train's
TorchTrainer is a script of its own (peers/by_ray_train.py), started as a driver of the cluster, and as a Ray job, which
goes on when the terminal closes, as ours does. Sides alternate.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from common import RESULTS, SLIPSTREAM, alternate, console, facts, installed, save, show
from ray_cluster import Cluster, cluster, missing

PEER = Path(__file__).parent / "peers" / "by_ray_train.py"
RAY = str(Path(sys.executable).parent / "ray")
NODES, CORES = 2, 2
JOB = {
    "name": "launch",
    "model": {"kind": "mlp", "hidden": [16]},
    "data": {"source": "synthetic", "samples": 64, "inputs": 4},
    "train": {"steps": 2, "batch": 8, "optimizer": {"name": "adamw", "lr": 1e-3}},
    "machines": {"device": "cpu"},
}
Start = Callable[[list[str]], "subprocess.Popen[bytes]"]
Side = Callable[[Path], float]


def until_first_step(folder: Path, words: list[str], metrics: Path, start: Start) -> float:
    """Seconds from the start of a command to the first line of metrics."""
    began = time.perf_counter()
    process = start(words)
    while not metrics.exists() or metrics.stat().st_size == 0:
        if process.poll() or time.perf_counter() - began > 120:
            logs = "".join(log.read_text()[-2000:] for log in folder.rglob("*.log"))
            raise SystemExit(f"{' '.join(words)} gives no first step ({process.returncode}):\n{logs}")
        time.sleep(0.005)
    took = time.perf_counter() - began
    process.wait()
    return took


def ours(words: list[str], start: Start, folder: Path) -> float:
    """A command of Slipstream's, to the end of its run."""
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    run = folder / "run"
    took = until_first_step(
        folder,
        [SLIPSTREAM, words[0], str(folder / "job.yaml"), *words[1:], "--run-dir", str(run)],
        run / "metrics.jsonl",
        start,
    )
    while not (run / "result.json").exists():
        time.sleep(0.05)
    return took


def ray_train(before: list[str], start: Start, folder: Path) -> float:
    """The same training by TorchTrainer."""
    metrics = folder / "metrics.jsonl"
    words = [*before, sys.executable, str(PEER), str(metrics), str(NODES * CORES)]
    return until_first_step(folder, words, metrics, start)


def here(words: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(words, stdout=subprocess.DEVNULL)


def local_sides() -> dict[str, Side]:
    return {
        "slipstream train": partial(ours, ["train", "--workers", "2"], here),
        "slipstream submit --on local": partial(ours, ["submit", "--on", "local", "--workers", "2"], here),
    }


def ray_sides(ray: Cluster) -> dict[str, Side]:
    def there(words: list[str]) -> "subprocess.Popen[bytes]":
        return ray.start(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # type: ignore[no-any-return]

    def driver(words: list[str]) -> "subprocess.Popen[bytes]":
        join = {"RAY_ADDRESS": f"{ray.network.addresses[0]}:6379"}
        return ray.start(words, join, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # type: ignore[no-any-return]

    words = ["submit", "--on", "ray", "--machines", str(NODES), "--workers", str(NODES * CORES)]
    sides: dict[str, Side] = {"slipstream submit --on ray": partial(ours, words, there)}
    if installed("tensorboardX"):
        sides["TorchTrainer"] = partial(ray_train, [], driver)
        sides["TorchTrainer, a Ray job"] = partial(ray_train, [RAY, "job", "submit", "--no-wait", "--"], there)
    else:
        console.print("Ray Train is left out: ray[train] is not installed", style="yellow")
    return {name: partial(when_idle, ray, side) for name, side in sides.items()}


def when_idle(ray: Cluster, side: Side, folder: Path) -> float:
    """Everything of the last one must be gone: what ends beside the next would slow it down."""
    while any(job["status"] in ("PENDING", "RUNNING") for job in ray.ask("/api/jobs/") or []):
        time.sleep(0.2)
    time.sleep(2)
    return side(folder)


@contextmanager
def part(name: str) -> Iterator[dict[str, Side]]:
    """The sides of a part, while they can run."""
    if name == "local":
        yield local_sides()
    elif reason := missing():
        console.print(f"the part ray is left out: {reason}", style="yellow")
        yield {}
    else:
        with cluster(NODES, CORES) as ray:
            yield ray_sides(ray)


def measure(sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in alternate(list(sides), rounds):
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            times[name].append(sides[name](Path(folder)))
        console.print(f"{name}: {times[name][-1]:.2f} s", style="dim")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="once each, to see that it works")
    parser.add_argument("--parts", default="local,ray", help="which of local and ray")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed")
    parser.add_argument("--out", type=Path, default=RESULTS / "launch.json")
    options = parser.parse_args()
    rounds, record = 1 if options.short else options.rounds, facts("ray")
    results: list[dict[str, Any]] = []
    for name in options.parts.split(","):
        with part(name) as sides:
            times = measure(sides, rounds)
        for side, seconds in times.items():
            median = round(statistics.median(seconds), 3)
            results.append(
                {"part": name, "side": side, "median_s": median, "best_s": round(min(seconds), 3), "rounds": seconds}
            )
    rows = [
        (
            each["side"],
            f"{each['median_s']:.2f}",
            f"{each['best_s']:.2f}",
            ", ".join(f"{s:.2f}" for s in each["rounds"]),
        )
        for each in results
    ]
    show(f"from command to first step on {record['machine']}", ("side", "median s", "best", "rounds"), rows)
    save(options.out, {**record, "settings": {"rounds": rounds, "nodes": NODES, "cores": CORES}, "results": results})


if __name__ == "__main__":
    main()
