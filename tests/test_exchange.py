"""Jobs with each way of adding up: one curve, the same bits after a resume, and words for what cannot be."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from fleet import until
from jobs import mlp_job
from pool import Pool, forget_after
from program import slipstream, start, write_job
from slipstream.fleet.scratch import Scratch
from slipstream.fleet.workers import Workers
from slipstream.job import dump
from slipstream.plan import Layout, Machine, Network, make_plan, this_machine
from slipstream.runs import RunFolder
from slipstream.train.exchange.adding import ALGORITHMS
from slipstream.train.exchange.adding.backend import Backend
from slipstream.train.exchange.adding.choose import choose
from slipstream.train.exchange.adding.timing import trials_of
from slipstream.train.nodes import NODES, nodes_of

SHORT = {"train.steps": 10, "train.evaluate.every": 5, "checkpoint.every": 4, "exchange.bucket": 2000}
GPUS = Machine("any", cores=8, memory=10**12, gpus=("H100", "H100"), bf16=True)


@contextmanager
def over_links_alone() -> Iterator[None]:
    """Around every worker of a pool: gradients must not be added up by the backend."""
    with patch.object(Backend, "start", side_effect=AssertionError("the backend adds up")):
        yield


@contextmanager
def two_machines() -> Iterator[None]:
    """The same, and the last of three stands on a machine of its own."""
    with patch.dict(os.environ, {NODES: "a,a,b"}), over_links_alone():
        yield


def around(algorithm: str, workers: int) -> str:
    return "test_exchange:" + ("two_machines" if (algorithm, workers) == ("hierarchical", 3) else "over_links_alone")


@pytest.fixture(scope="module")
def expected(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return pool.train(mlp_job(**SHORT), tmp_path_factory.mktemp("one") / "run", 1)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_curve_is_that_of_one_worker(algorithm, workers, pool, expected, tmp_path):
    job = mlp_job(**SHORT, **{"exchange.algorithm": algorithm})
    curve = pool.train(job, tmp_path / "run", workers, around(algorithm, workers))
    for key in ("loss", "val_loss"):
        values, others = ([line[key] for line in lines if key in line] for lines in (curve, expected))
        assert values == pytest.approx(others, rel=1e-9, abs=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resume_is_bit_for_bit(algorithm, pool, tmp_path):
    job = mlp_job(**SHORT, **{"exchange.algorithm": algorithm, "train.precision": "fp32"})
    whole = pool.train(job, tmp_path / "run", 3)
    forget_after(tmp_path / "run", 4)
    assert losses(pool.resume(tmp_path / "run", 3)) == losses(whole)


def losses(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line.get("val_loss")) for line in lines]


def test_what_auto_has_measured_stays_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv(NODES, "a,b,c")
    job = dump(mlp_job(**SHORT, **{"train.precision": "fp32", "layout.replicate": 3}))
    done = slipstream("train", write_job(tmp_path, job), "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0 and re.search("links between machines: .*\ngradients are added up by ", done.stdout), (
        done.stdout + done.stderr
    )
    run = RunFolder(tmp_path / "run")
    whole, network = read(run), yaml.safe_load(run.plan.read_text())["network"]
    assert network["nodes"] == [0, 1, 2] and network["latency"] > 0 and network["bandwidth"] > 0
    tried = {int(size) for sizes in network["sums"].values() for size in sizes}
    assert len(network["sums"]) > 1 and max(tried) == 2304, "the run's own buckets: a weight is never cut"
    forget_after(run.path, 4)
    done = slipstream("resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(run.plan.read_text())["network"] == network
    assert read(run) == whole


def test_ctrl_c_ends_trials(tmp_path, monkeypatch):
    monkeypatch.setenv(NODES, "a,b")
    job = dump(mlp_job(**{**SHORT, "train.steps": 5_000_000}, **{"train.precision": "fp32", "layout.replicate": 2}))
    program, run = start("train", write_job(tmp_path, job), "--run-dir", "run", cwd=tmp_path), tmp_path / "run"
    until(lambda: "network" in kinds(run))
    program.send_signal(signal.SIGINT)
    said = program.communicate(timeout=120)[0]
    assert program.returncode == 130 and "interrupted" in said, said
    assert yaml.safe_load(RunFolder(run).plan.read_text())["network"] is None and "adding up" not in kinds(run)
    assert [line[0] for line in read(RunFolder(run))] == [1], "what it needs for a checkpoint"


def kinds(run: Path) -> list[str]:
    """Of the events so far."""
    events = run / "events.jsonl"
    return [json.loads(line)["event"] for line in events.read_text().splitlines()] if events.exists() else []


def read(run: RunFolder) -> list[tuple[Any, ...]]:
    return losses([json.loads(line) for line in run.metrics.read_text().splitlines()])


def test_a_machine_must_be_named_for_every_worker(monkeypatch):
    monkeypatch.setenv(NODES, "a,b,a")
    assert nodes_of(3) == (0, 1, 0)
    with pytest.raises(ValueError, match=f"{NODES} names the machines of 3 workers, and there are 4"):
        nodes_of(4)


def test_auto_goes_by_size_and_links():
    far = Network(nodes=(0, 1, 2, 3), latency=0.02, bandwidth=1e8)
    assert choose(4_096, far.nodes, far) == "halving-doubling"
    assert choose(4_096, [0, 0, 0, 0], far) == "backend", "on one machine"
    assert choose(4_096, far.nodes, None) == "backend", "where nothing was measured"
    near = far.model_copy(update={"latency": 1e-5})
    assert choose(10**9, near.nodes, near) == "backend"
    assert choose(10**6, [0] * 8 + [1] * 8, far) == "hierarchical"


def test_auto_goes_by_what_was_tried_and_not_by_the_model():
    """For other sizes and groups, by the model from there."""
    sums = {"ring": {1024: 0.1, 2**22: 0.2}, "tree": {1024: 0.04, 2**22: 0.9}, "halving-doubling": {1024: 0.2}}
    tried = Network(nodes=(0, 1, 2, 3), latency=0.02, bandwidth=1e8, sums=sums)
    assert choose(1024, tried.nodes, tried) == choose(4096, tried.nodes, tried) == "tree"
    assert choose(2**22, tried.nodes, tried) == choose(2**24, tried.nodes, tried) == "ring"
    assert choose(1024, (0, 1), tried) == "tree"


def test_auto_tries_few_sizes_that_stand_for_all_buckets():
    far = Network(nodes=(0, 1, 2, 3), latency=0.02, bandwidth=1e8)
    assert list(trials_of([1_000, 4_000, 10_000, 2_000_000, 2_050_000], 1, far)) == [2_050_000, 10_000]
    assert list(trials_of([2**26, 2**24], 1, far)) == [2**26, 2**24], "large ones too"
    assert list(trials_of([2**30], 1, far)) == [2**27], "none takes minutes"


@pytest.mark.parametrize("algorithm", ["halving-doubling", "hierarchical"])
def test_what_nccl_has_not_is_refused_on_gpus(algorithm):
    with pytest.raises(
        ValueError, match=rf"exchange.algorithm {algorithm} is for CPUs; on GPUs NCCL has ring and tree"
    ):
        make_plan(mlp_job(**{"exchange.algorithm": algorithm}), GPUS, 2)


def test_where_weights_are_sharded_an_algorithm_is_refused():
    job = mlp_job(**{"exchange.algorithm": "tree", "layout.shard": 2})
    with pytest.raises(ValueError, match=r"exchange.algorithm tree has no effect where weights are sharded"):
        make_plan(job, this_machine(), 2)
    assert make_plan(mlp_job(**{"layout.shard": 2}), this_machine(), 2).layout == Layout(shard=2, micro_batch=6)


@pytest.mark.parametrize(
    ("algorithm", "said"), [("tree", "allreduce:tree"), ("ring", "allreduce:ring"), ("auto", None)]
)
def test_workers_tell_nccl_which_algorithm(algorithm: str, said: str | None, tmp_path: Path) -> None:
    job = mlp_job(**{"exchange.algorithm": algorithm, "train.precision": "bf16"})
    run = RunFolder.create(tmp_path / "run", dump(job))
    for machine, expected in ((GPUS, said), (this_machine(), None)):
        workers = Workers(run, job, make_plan(job, machine, 2), str(tmp_path), Scratch(tmp_path))
        assert workers.environment().get("NCCL_ALGO") == expected
