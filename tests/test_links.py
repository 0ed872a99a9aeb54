"""A link between hosts is cut for ten seconds in the middle of training: every exchange waits, and goes on."""

import math
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slipstream.data import prepare
from slipstream.fleet.scratch import Scratch
from slipstream.job import Job, dump
from slipstream.plan import make_plan, this_machine
from slipstream.runs import RunFolder, create_pulse, read_lines, write_yaml

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
EXCHANGES: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "ring": {"algorithm": "ring"},
    "local": {"kind": "local", "every": 4, "overlap": 2},
    "sync": {"kind": "server"},
    "async": {"kind": "server", "mode": "async", "staleness": 2},
}
STEPS = 60


def test_a_link_that_is_cut_for_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from network import hosts, missing

    if reason := missing():
        pytest.skip(reason)
    with ExitStack() as stack, hosts(3) as network:
        runs = {
            name: start(exchange, tmp_path / name, 7000 + number, network, stack)
            for number, (name, exchange) in enumerate(EXCHANGES.items())
        }
        wait(runs, 10)
        with network.cut(1):
            time.sleep(3)
            before = {name: len(losses(run)) for name, (run, _) in runs.items()}
            time.sleep(7)
            stood = {name: len(losses(run)) for name, (run, _) in runs.items()}
        assert before == {**stood, "async": before["async"]}, "nobody can go on, but for the other worker in async"
        wait(runs, STEPS)
        for name, (run, processes) in runs.items():
            codes = [process.wait(120) for process in processes]
            said = "".join(path.read_text()[-3000:] for path in run.logs.iterdir())
            assert codes == [0] * len(codes), f"{name}: {codes} {said}"
    curves = {name: losses(run) for name, (run, _) in runs.items()}
    assert all(len(curve) == STEPS and curve[-1] < curve[0] for curve in curves.values())
    assert curves["ring"] == pytest.approx(curves["allreduce"], rel=1e-5)
    assert curves["sync"] == pytest.approx(curves["allreduce"], rel=1e-5)


def start(
    exchange: dict[str, Any], folder: Path, port: int, network: Any, stack: ExitStack
) -> tuple[RunFolder, list[subprocess.Popen[bytes]]]:
    """A worker on each of two hosts, and a server, if there is one, on the third."""
    sleepy = {"import": "sleepy:Sleepy", "args": {"seconds": 0.004, "mark": str(folder) + ".slow", "slower": 1.0}}
    job = Job.model_validate({
        "name": folder.name, "model": sleepy, "data": {"source": "digits", "validation": 0}, "exchange": exchange,
        "machines": {"device": "cpu"}, "layout": {"replicate": 2}, "checkpoint": {"every": "100%"},
        "train": {"task": "classification", "steps": STEPS, "batch": 16, "optimizer": {"name": "sgd", "lr": 0.05}},
    })  # fmt: skip
    prepare(job, lambda _: None)
    run = RunFolder.create(folder, dump(job))
    write_yaml(run.plan, make_plan(job, this_machine(), 2).model_dump(mode="json"))
    scratch = Scratch.create()
    stack.callback(scratch.remove)
    run.event("launch", workers=2, spent=0.0, folder=str(folder), scratch=str(scratch.path), restore=None)
    ranks = range(3 if exchange.get("kind") == "server" else 2)
    create_pulse(scratch.pulse, len(ranks))
    environment = {
        "SLIPSTREAM_SERVERS": f"{network.addresses[2]}:{port}",
        "SLIPSTREAM_TOKEN": "a word that they know",
        "SLIPSTREAM_NODES": "a,b",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS / "peers"), *sys.path]),
    }
    words = [sys.executable, "-m", "slipstream.fleet.worker", str(run.path)]
    return run, [
        network.start(rank, [*words, str(rank), "2", str(scratch.path)], environment, stdin=subprocess.PIPE)
        for rank in ranks
    ]


def losses(run: RunFolder) -> list[float]:
    return [line["loss"] for line in read_lines(run.metrics)]


def wait(runs: dict[str, tuple[RunFolder, list[subprocess.Popen[bytes]]]], steps: int) -> None:
    until = time.monotonic() + 120
    for name, (run, processes) in runs.items():
        while len(losses(run)) < steps:
            said = "".join(path.read_text()[-3000:] for path in run.logs.iterdir())
            assert not any(process.poll() for process in processes), f"{name}: {said}"
            assert time.monotonic() < until, f"{name} does not come to step {steps}: {said}"
            time.sleep(0.05)
    assert all(math.isfinite(loss) for run, _ in runs.values() for loss in losses(run))
