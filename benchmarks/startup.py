"""Starting up: how long until `slipstream train` has done its first step, and the commands before it.

The time runs from the start of the process to the first line in metrics.jsonl, for a tiny model on two workers: what
is waited for is Python, torch, the workers' meeting and one step. `import torch` alone is timed beside it.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from common import RESULTS, SLIPSTREAM, alternate, console, facts, save, show

JOB = {
    "name": "startup",
    "model": {"kind": "mlp", "hidden": [16]},
    "data": {"source": "synthetic", "samples": 64, "inputs": 4},
    "train": {"steps": 2, "batch": 8, "optimizer": {"name": "adamw", "lr": 1e-3}},
    "machines": {"device": "cpu"},
}


def time_command(command: list[str]) -> float:
    """Seconds from start to end."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def time_first_step(root: Path) -> float:
    """Seconds from the start of the program to the first line of metrics."""
    folder = Path(tempfile.mkdtemp(dir=root))
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    run = folder / "run"
    command = [SLIPSTREAM, "train", str(folder / "job.yaml"), "--workers", "2", "--run-dir", str(run)]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not (metrics := run / "metrics.jsonl").exists() or metrics.stat().st_size == 0:
            if process.poll():
                raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
            time.sleep(0.005)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="once each, to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.json")
    options = parser.parse_args()
    rounds, record = 1 if options.short else 5, facts()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        timers: dict[str, Callable[[], float]] = {
            "python": partial(time_command, [sys.executable, "-c", ""]),
            "import slipstream": partial(time_command, [sys.executable, "-c", "import slipstream"]),
            "slipstream --help": partial(time_command, [SLIPSTREAM, "--help"]),
            "import torch": partial(time_command, [sys.executable, "-c", "import torch"]),
            "first step": partial(time_first_step, Path(folder)),
        }
        times: dict[str, list[float]] = {name: [] for name in timers}
        for name in alternate(list(timers), rounds):
            console.print(name, style="dim")
            times[name].append(timers[name]())
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rows = [(name, f"{medians[name]:.2f}", f"{min(s):.2f}", f"{max(s):.2f}") for name, s in times.items()]
    show(f"starting up on {record['machine']}", ("what", "median s", "least", "most"), rows)
    results = [{"what": name, "seconds": round(medians[name], 4), "rounds": times[name]} for name in times]
    save(options.out, {**record, "settings": {"rounds": rounds, "workers": 2}, "results": results})


if __name__ == "__main__":
    main()
