"""Nothing lost: kill -9 of anything at any moment, twenty times, and the curve is that of the undisturbed run."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from jobs import write_documents
from program import slipstream, start, write_job

STEPS, KILLS = 500, 20
KEYS = ("step", "samples", "loss", "lr", "val_loss", "grad_norm")


def job(documents: Path) -> dict[str, Any]:
    return {
        "name": "mortal",
        "model": {"import": "faults:SlowDecoder", "args": {"seconds": 0.01}},
        "data": {"source": str(documents), "sequence": 16, "vocabulary": 300, "validation": 0.1},
        "train": {
            "task": "next-token",
            "steps": STEPS,
            "batch": 6,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "schedule": {"decay": "cosine", "warmup": "10%"},
            "clip": {"norm": 1.0},
            "evaluate": {"every": 50},
        },
        "checkpoint": {"every": 3},
        "layout": {"replicate": 2},
    }


def children_of(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def workers_of(launcher: int) -> list[int]:
    """The ranks, and while they do not exist yet, the process that they are forked from."""
    hosts = children_of(launcher)
    return [worker for host in hosts for worker in children_of(host)] or hosts


def read(run: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line.get(key) for key in KEYS) for line in lines]


def kill(program: subprocess.Popen[str], what: str, draw: random.Random) -> None:
    workers = workers_of(program.pid) if what != "launcher" else []
    victims = draw.sample(workers, 1) if what == "worker" and workers else workers or [program.pid]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)


def wait_for_progress(run: Path, program: subprocess.Popen[str]) -> None:
    """Until a step is recorded in this life, or the program has ended."""
    since = time.time()
    metrics = run / "metrics.jsonl"
    while program.poll() is None and time.time() - since < 60:
        if metrics.exists() and metrics.stat().st_mtime > since:
            return
        time.sleep(0.02)


def test_twenty_kills_leave_the_curve_as_it_was(tmp_path):
    path = write_job(tmp_path, job(write_documents(tmp_path / "documents.jsonl")))
    whole = slipstream("train", path, "--run-dir", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    draw = random.Random(20)
    words: tuple[str | Path, ...] = ("train", path, "--run-dir", "torn")
    for number in range(KILLS):
        program = start(*words, cwd=tmp_path)
        if number % 5 == 4:  # while it is still starting
            time.sleep(draw.uniform(0.3, 2.5))
        else:
            wait_for_progress(tmp_path / "torn", program)
            time.sleep(draw.uniform(0.0, 0.3))
        assert program.poll() is None, f"it ended before kill {number}: {program.communicate()[0]}"
        kill(program, ("worker", "workers", "launcher")[number % 3], draw)
        output = program.communicate(timeout=30)[0]
        assert program.returncode in (3, -9), output
        if (tmp_path / "torn" / "job.yaml").exists():
            words = ("resume", "torn")
    done = slipstream("resume", "torn", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path / "torn") == read(tmp_path / "whole")
