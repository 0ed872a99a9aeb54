"""Parameter servers: Slipstream's beside the usual one of Ray, an actor, with two workers that compute nothing.

Updates a second of a model of 10 million numbers (fp32, plain gradient descent): pushes alone, and each push after a
fetch of the weights. Ours is the server of a real run, with all it does for each update (tickets, a line of metrics);
Ray's is in an environment apart (`make .venv-ray/.installed`) and in a network of its own. Of several rounds, which
alternate, a side's figure is its best.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, alternate, console, facts, save, show
from slipstream.fleet.scratch import Scratch
from slipstream.job import check_job, dump
from slipstream.plan import make_plan, this_machine
from slipstream.runs import RunFolder, create_pulse, write_yaml
from slipstream.train.server.addresses import on_this_machine

HERE = Path(__file__).parent
PEERS = HERE / "peers" / "server"
RAY = HERE.parent / ".venv-ray" / "bin" / "python"
WORKERS = 2


def job(width: int) -> dict[str, Any]:
    return {
        "name": "push",
        "model": {"kind": "mlp", "hidden": [width, width]},
        "data": {"source": "synthetic", "samples": 1000},
        "train": {"steps": 10**6, "batch": 8, "optimizer": {"name": "sgd", "lr": 0.01}, "precision": "fp32"},
        "checkpoint": {"every": 10**6},
        "exchange": {"kind": "server", "mode": "async"},
    }


def numbers_of(width: int) -> int:
    return 16 * width + width + width * width + width + width + 1


def ours(width: int, rounds: int, fetch: str, root: Path) -> float:
    """Updates a second of a server with its two workers."""
    checked = check_job(job(width))
    run = RunFolder.create(Path(tempfile.mkdtemp(dir=root)) / "run", dump(checked))
    write_yaml(run.plan, make_plan(checked, this_machine(), WORKERS).model_dump(mode="json"))
    scratch = Scratch.create()
    create_pulse(scratch.pulse, WORKERS + 1)
    environment = {**os.environ, **on_this_machine(1), "OMP_NUM_THREADS": "1"}

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, *words]
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    place = [str(run.path), str(WORKERS), str(WORKERS), str(scratch.path)]
    processes = [start("-m", "slipstream.fleet.worker", *place)]
    try:
        for rank in range(WORKERS):
            words = [str(run.path), str(rank), str(scratch.pulse), str(rounds), fetch]
            processes.append(start(str(PEERS / "by_slipstream.py"), *words))
        workers = processes[1:]
        for said in [_line(worker) for worker in workers]:
            assert said == "ready"
        for worker in workers:
            assert worker.stdin
            worker.stdin.write("go\n")
        times = [tuple(map(float, _line(worker).split())) for worker in workers]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        scratch.remove()
    return WORKERS * rounds / (max(end for _, end in times) - min(began for began, _ in times))


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def by_ray(width: int, rounds: int, fetch: str, _root: Path) -> float:
    """The same of Ray's actors. Ray looks for the outside interface by itself: so it has a network of its own."""
    command = [str(RAY), str(PEERS / "by_ray.py"), str(numbers_of(width)), str(rounds), fetch]
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"Ray failed:\n{done.stderr[-4000:]}")
    return float(done.stdout.split()[-1])


SIDES = {"slipstream": ours, "ray": by_ray}
MEASURES = {"push": "pushes/s", "fetch": "push + fetch/s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a small model and few rounds, to see that it works")
    parser.add_argument("--sides", default="slipstream,ray", help="which sides")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--out", type=Path, default=RESULTS / "server.json")
    options = parser.parse_args()
    sides = [side for side in options.sides.split(",") if side != "ray" or RAY.exists()]
    if "ray" in options.sides and "ray" not in sides:
        console.print("Ray is not here: `make .venv-ray/.installed`", style="yellow")
    width, rounds, times = (100, 5, 1) if options.short else (3_160, 40, options.rounds)
    found: dict[tuple[str, str], list[float]] = {(side, way): [] for side in sides for way in MEASURES}
    record = facts()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for way in MEASURES:
            for side in alternate(sides, times):
                found[side, way].append(SIDES[side](width, rounds, way, Path(folder)))
                console.print(f"{side} {MEASURES[way]}: {found[side, way][-1]:.1f}", style="dim")
    results = [
        {"side": side, "measure": MEASURES[way], "per_s": round(max(each), 2), "rounds": [round(v, 2) for v in each]}
        for (side, way), each in found.items()
    ]
    rows = [
        (
            side,
            *(f"{max(found[side, way]):.1f} ({', '.join(f'{v:.1f}' for v in found[side, way])})" for way in MEASURES),
        )
        for side in sides
    ]
    show(f"{numbers_of(width):,} numbers, {WORKERS} workers", ("side", *MEASURES.values()), rows)
    save(options.out, {**record, "numbers": numbers_of(width), "workers": WORKERS, "results": results})


if __name__ == "__main__":
    main()
