"""Parameter servers, as a user runs them: the curve of all-reduce, whoever dies; and words for what cannot be."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import merge, mlp_job
from pool import Pool, forget_after
from program import slipstream, start, write_job
from slipstream.api import dry_run
from slipstream.job import Job, JobError, check_job, dump
from slipstream.plan import Layout, Machine, make_plan
from test_kill import children_of

KEYS = ("step", "samples", "loss", "lr", "val_loss", "grad_norm")
SLOW: dict[str, Any] = {
    "name": "served",
    "model": {"import": "faults:SlowRegression", "args": {"seconds": 0.03}},
    "data": {"source": "synthetic", "samples": 200, "validation": 0.1},
    "train": {
        "steps": 40,
        "batch": 9,
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "schedule": {"decay": "cosine", "warmup": "10%"},
        "clip": {"norm": 1.0},
        "precision": "fp64",
        "evaluate": {"every": 15},
    },
    "checkpoint": {"every": 10, "keep": 5},
    "layout": {"replicate": 2},
    "exchange": {"kind": "server", "servers": 2},
}


def read(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(run: Path) -> list[tuple[Any, ...]]:
    return [tuple(line.get(key) for key in KEYS) for line in read(run)]


def ranks_of(launcher: int) -> dict[int, int]:
    """The process of each rank."""
    found = {}
    for host in children_of(launcher):
        words = Path(f"/proc/{host}/cmdline").read_bytes().split(b"\0")
        ranks = [int(rank) for rank in words[words.index(b"slipstream.fleet.worker") + 2].split(b",")]
        found |= dict(zip(ranks, sorted(children_of(host)) if len(ranks) > 1 else [host], strict=False))
    return found


def kill_at(
    run: Path, step: int, rank: int, program: subprocess.Popen[str], saved: int = 0, by: int = signal.SIGKILL
) -> None:
    """Kill a rank after this step, when so many checkpoints have been written, which is done beside training."""
    until = time.time() + 100
    while program.poll() is None and time.time() < until:
        metrics = run / "metrics.jsonl"
        written = len(list(run.glob("checkpoints/step-*/manifest.json")))
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= step and written >= saved:
            os.kill(ranks_of(program.pid)[rank], by)
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come: {program.communicate()[0] if program.poll() is not None else ''}")


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_whoever_dies_the_curve_is_that_of_all_reduce(tmp_path: Path, pool: Pool) -> None:
    job = write_job(tmp_path, SLOW)
    torn, whole = tmp_path / "torn", tmp_path / "whole"
    program = start("train", job, "--run-dir", torn, cwd=tmp_path)
    kill_at(torn, 5, 0, program)
    kill_at(torn, 11, 3, program, saved=1)
    said = program.communicate(timeout=120)[0]
    assert program.returncode == 0, said
    again = [(event["rank"], event.get("step")) for event in events(torn) if event["event"] == "restart"]
    assert [rank for rank, _ in again] == [0, 2] and again[0][1] is None, "a worker as it is"
    assert again[1][1] in (10, 20, 30), "the servers from their newest checkpoint"

    done = slipstream("train", job, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert curve(torn) == curve(whole)

    forget_after(whole, 20)
    done = slipstream("resume", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert curve(whole) == curve(torn), "bit for bit"

    plain = Job.model_validate(merge(SLOW, {"exchange": {}, "model.args.seconds": 0}))
    expected = pool.train(plain, tmp_path / "plain", 2)
    for key in ("loss", "grad_norm", "val_loss", "lr"):
        values, others = ([line[key] for line in lines if key in line] for lines in (read(whole), expected))
        assert values == pytest.approx(others, rel=1e-9, abs=0), key


def test_a_worker_that_hangs_is_started_again(tmp_path: Path) -> None:
    job = write_job(tmp_path, merge(SLOW, {"limits.step": "10s", "checkpoint.every": 100}))
    program = start("train", job, "--run-dir", "run", cwd=tmp_path)
    kill_at(tmp_path / "run", 5, 1, program, by=signal.SIGSTOP)
    said = program.communicate(timeout=120)[0]
    assert program.returncode == 0, said
    assert "worker 1: the worker has shown no sign of life" in said and "worker 1 was killed" in said
    assert [line["step"] for line in read(tmp_path / "run")] == list(range(1, 41))


def test_a_server_that_hangs_is_named(tmp_path: Path) -> None:
    """Also where all were asked before where they were, when a worker hung."""
    job = write_job(tmp_path, merge(SLOW, {"limits.step": "5s", "train.steps": 400}))
    program = start("train", job, "--run-dir", "run", cwd=tmp_path)
    kill_at(tmp_path / "run", 5, 1, program, by=signal.SIGSTOP)
    kill_at(tmp_path / "run", 30, 3, program, by=signal.SIGSTOP)
    said = " ".join(program.communicate(timeout=120)[0].split())
    assert program.returncode == 4, said
    assert "rank 3 failed" in said and "server 2 of 2 has shown no sign of life" in said


def test_more_servers_than_tensors_are_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path, merge(dump(mlp_job()), {"exchange": {"kind": "server", "servers": 7}}))
    done = slipstream("train", job, "--workers", "2", cwd=tmp_path)
    assert done.returncode == 2 and "exchange.servers (7) must be at most 6" in " ".join(done.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
    with pytest.raises(JobError, match=r"exchange.servers \(7\) must be at most 6"):
        dry_run(job)


def test_asynchronous_servers_learn_as_well(tmp_path: Path, pool: Pool) -> None:
    values = {
        "name": "digits",
        "model": {"kind": "mlp", "hidden": [64]},
        "data": {"source": "digits", "validation": 0.2},
        "train": {"epochs": 3, "batch": 32, "optimizer": {"name": "sgd", "lr": 0.2}, "precision": "fp32"},
        "layout": {"replicate": 2},
    }
    (expected,) = pool.train(check_job(values), tmp_path / "plain", 2)[-1:]
    exchange = {"kind": "server", "mode": "async", "staleness": 2, "compensation": 0.04, "lr": "staleness"}
    job = write_job(tmp_path, {**values, "exchange": exchange})
    done = slipstream("train", job, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = read(tmp_path / "run")
    assert lines[-1]["val_loss"] == pytest.approx(expected["val_loss"], rel=0.2)
    staleness = [line["staleness"] for line in lines]
    assert max(staleness) <= 2
    assert all(line["lr"] == pytest.approx(0.2 / max(1, line["staleness"])) for line in lines)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["staleness"] == {str(late): staleness.count(late) for late in sorted(set(staleness))}
    assert all(line["pushes_per_s"] > 0 and line["sent"] > 0 for line in lines)


REFUSED = {
    "staleness has no effect with mode: sync": {"exchange.staleness": 2},
    "lr has no effect with mode: sync": {"exchange.lr": "staleness"},
    "does not go with batch norm": {
        "model": {"kind": "resnet", "depth": 18},
        "data": {"source": "digits", "validation": 0.1},
    },
    "train.precision fp16 does not go with exchange.kind server": {"train.precision": "fp16"},
    "codec": {"exchange.codec": "int8"},
    "layout.offload has no effect with exchange.kind server": {
        "layout.offload": "optimizer",
        "machines.device": "cuda",
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_servers_cannot_do_is_refused(words: str) -> None:
    changed = merge({**dump(mlp_job()), "exchange": {"kind": "server"}}, REFUSED[words])
    with pytest.raises(JobError, match=words):
        check_job(changed)


def test_layouts_that_servers_do_not_fit_are_refused() -> None:
    job = mlp_job(exchange={"kind": "server"})
    with pytest.raises(ValueError, match=r"use layout.replicate alone"):
        make_plan(
            job, Machine("any", cores=8, memory=10**12, gpus=(), bf16=True), layout=Layout(shard=2, micro_batch=6)
        )
    old = Machine("any", cores=8, memory=10**12, gpus=("V100",), bf16=False)
    with pytest.raises(ValueError, match=r"fp16 does not go with exchange.kind server"):
        make_plan(mlp_job(**{"exchange": {"kind": "server"}, "train.precision": "auto"}), old, 1)
