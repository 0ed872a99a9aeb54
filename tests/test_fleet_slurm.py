"""`submit --on slurm`, with a real cluster of four virtual nodes that the tests start and stop."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet import jobs, losses, processes_of, steps_of, until
from jobs import mlp_values, write_documents
from program import slipstream, write_job
from s3 import serving
from slipstream.data.storage import Storage
from slipstream.runs import read_lines
from slurm import ask, cluster, missing

DDP = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.item(), "on", os.environ["SLURMD_NODENAME"], flush=True)
dist.destroy_process_group()
"""
SLOW = {"import": "faults:SlowRegression", "args": {"seconds": 0.03}}
"""Twelve seconds for four hundred steps: a test that has seen some of them has time to send a signal."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if reason := missing():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")) as environment:
        before = dict(os.environ)
        os.environ.update(environment)
        yield environment
        os.environ.clear()
        os.environ.update(before)


def queue(environment: dict[str, str]) -> list[str]:
    return ask(environment, "squeue", "--noheader", "--format=%i").split()


@pytest.fixture
def corpus(slurm: dict[str, str], tmp_path: Path) -> Iterator[str]:  # noqa: ARG001 - nodes get the environment of who submits
    """A prepared dataset on an S3 server."""
    folder = tmp_path / "server"
    folder.mkdir()
    with serving(folder, "data"):
        text = write_documents(tmp_path / "documents.jsonl", 400)
        words = ["--vocabulary", "300", "--workers", "1"]
        done = slipstream("data", "prepare", text, "s3://data/corpus", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        yield "s3://data/corpus"


def test_one_curve_on_two_nodes_that_read_from_afar(slurm: dict[str, str], corpus: str, tmp_path: Path) -> None:
    values = {
        "name": "far",
        "model": {"kind": "decoder", "layers": 1, "hidden": 16, "heads": 2},
        "data": {"prepared": corpus, "sequence": 64},
        "train": {"steps": 12, "batch": 8, "optimizer": {"name": "adamw", "lr": 1e-3}, "precision": "fp64"},
        "machines": {"slurm": {"setup": ["export GREETING=hello"], "time": "10m"}},
    }
    write_job(tmp_path, values)
    words = ["submit", "job.yaml", "--on", "slurm", "--machines", "2", "--workers", "4"]
    shown = slipstream(*words, "--dry-run", cwd=tmp_path)
    assert {"#SBATCH --nodes=2", "#SBATCH --time=00:10:00", "export GREETING=hello"} <= set(shown.stdout.splitlines())
    assert not (tmp_path / "runs").exists()
    sent = slipstream(*words, cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    watched = slipstream("attach", "far-1", cwd=tmp_path)
    assert watched.returncode == 0 and "finished after 12 steps" in watched.stdout, watched.stdout + watched.stderr
    script = (tmp_path / "runs/far-1/slurm.sh").read_text()
    assert script == shown.stdout, "what was shown is what was sent"
    assert slipstream("train", "job.yaml", "--workers", "4", cwd=tmp_path).returncode == 0
    assert losses(tmp_path / "runs/far-1") == pytest.approx(losses(tmp_path / "runs/far-2"), rel=1e-9)  # of fp64
    assert jobs(tmp_path)["far-1"]["machines"] == 2
    until(lambda: not queue(slurm))
    assert not [words for words in processes_of(tmp_path).values() if "slipstream" in words]


def test_warned_of_its_limit_it_saves_and_is_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    """The warning is the signal that Slurm itself sends before a time limit."""
    write_job(tmp_path, mlp_values(model=SLOW, **{"train.steps": 400, "checkpoint.every": 300}))
    slipstream("submit", "job.yaml", "--on", "slurm", "--machines", "2", "--workers", "2", cwd=tmp_path)
    run = tmp_path / "runs/mlp-1"
    until(lambda: steps_of(run) > 20)
    number = json.loads((run / "submission.json").read_text())["id"]
    ask(slurm, "scancel", "--signal=USR1", number)
    until(lambda: "PENDING" in ask(slurm, "squeue", "--noheader", "--format=%T"))
    saved = steps_of(run)
    assert 20 < saved < 400
    assert jobs(tmp_path)["mlp-1"]["status"].startswith("queued")
    let_begin(slurm)
    watched = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert f"resuming mlp-1 from step {saved}" in (run / "logs/launcher.log").read_text()
    assert slipstream("train", "job.yaml", "--workers", "2", cwd=tmp_path).returncode == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "runs/mlp-2"), rel=1e-9)


def let_begin(environment: dict[str, str]) -> None:
    """A job that is queued again. Slurm itself waits for two minutes, as the nodes refuse it for some seconds."""
    time.sleep(4)
    ask(environment, "scontrol", "update", f"JobId={queue(environment)[0]}", "StartTime=now")


def blinking(folder: Path) -> Path:
    """Slurm's command, which does not reach its controller every other time."""
    folder.mkdir()
    there, count = shutil.which("squeue"), folder / "count"
    (folder / "squeue").write_text(
        f"#!/bin/bash\necho . >> {count}\nif (( $(wc -l < {count}) % 2 == 0 )); then\n"
        "  echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1\nfi\n"
        f'exec {there} "$@"\n'
    )
    (folder / "squeue").chmod(0o755)
    return folder


def test_a_run_in_object_storage_is_queued_again(
    slurm: dict[str, str], corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watched by somebody to whom Slurm answers now and then."""
    store = corpus.rpartition("/")[0] + "/runs"
    changes = {"train.steps": 400, "checkpoint.every": 300}
    write_job(tmp_path, mlp_values(model=SLOW, machines={"store": store}, **changes))
    sent = slipstream("submit", "job.yaml", "--on", "slurm", "--machines", "2", "--workers", "2", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    run = tmp_path / "runs/mlp-1"
    until(lambda: jobs(tmp_path)["mlp-1"]["step"] > 20)
    ask(slurm, "scancel", "--signal=USR1", json.loads((run / "submission.json").read_text())["id"])
    until(lambda: "PENDING" in ask(slurm, "squeue", "--noheader", "--format=%T"))
    let_begin(slurm)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{blinking(tmp_path / 'bin')}:{os.environ['PATH']}")
        watched = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert [event["event"] for event in read_lines(run / "events.jsonl")].count("launch") == 2
    assert not (run / "meeting.json").exists() and not Storage(f"{store}/mlp-1").find("meeting.json")
    assert slipstream("train", "job.yaml", "--workers", "2", cwd=tmp_path).returncode == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "runs/mlp-2"), rel=1e-9)


def test_stop_saves_and_takes_back(slurm: dict[str, str], tmp_path: Path) -> None:
    write_job(tmp_path, mlp_values(**{"train.steps": 100_000}))
    for _ in range(2):  # together they want more nodes than there are
        words = ["--on", "slurm", "--machines", "3", "--workers", "3"]
        assert slipstream("submit", "job.yaml", *words, cwd=tmp_path).returncode == 0
    until(lambda: steps_of(tmp_path / "runs/mlp-1") > 3)
    assert jobs(tmp_path)["mlp-2"]["status"] == "queued (pending (Resources))"
    assert slipstream("stop", "mlp-2", cwd=tmp_path).returncode == 0
    never = slipstream("attach", "mlp-2", cwd=tmp_path)
    assert never.returncode == 130 and "stopped before it began" in never.stderr
    assert jobs(tmp_path)["mlp-2"]["status"] == "stopped"
    assert slipstream("stop", "mlp-1", cwd=tmp_path).returncode == 0
    assert slipstream("attach", "mlp-1", cwd=tmp_path).returncode == 130
    until(lambda: not queue(slurm))
    assert jobs(tmp_path)["mlp-1"]["status"] == "stopped"
    assert not processes_of(tmp_path)
    saved = steps_of(tmp_path / "runs/mlp-1")
    elsewhere = slipstream("resume", "mlp-1", "--on", "local", cwd=tmp_path)
    assert elsewhere.returncode == 2 and "--on slurm" in elsewhere.stderr
    again = slipstream("resume", "mlp-1", "--on", "slurm", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    until(lambda: steps_of(tmp_path / "runs/mlp-1") > saved)
    assert f"resuming mlp-1 from step {saved}" in (tmp_path / "runs/mlp-1/logs/launcher.log").read_text()
    for words in (["resume", "mlp-1"], ["resume", "mlp-1", "--on", "slurm"]):
        beside = slipstream(*words, cwd=tmp_path)
        assert beside.returncode == 2 and "still" in beside.stderr
    assert slipstream("stop", "mlp-1", cwd=tmp_path).returncode == 0
    assert slipstream("attach", "mlp-1", cwd=tmp_path).returncode == 130


def test_a_worker_that_fails_ends_the_allocation(slurm: dict[str, str], tmp_path: Path) -> None:
    write_job(tmp_path, mlp_values(**{"train.optimizer": {"name": "sgd", "lr": 1e30}, "train.steps": 50}))
    slipstream("submit", "job.yaml", "--on", "slurm", "--machines", "2", "--workers", "2", cwd=tmp_path)
    watched = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert watched.returncode == 5 and "NonFiniteLoss" in watched.stderr, watched.stdout + watched.stderr
    until(lambda: not queue(slurm))
    assert not processes_of(tmp_path)


@pytest.mark.usefixtures("slurm")
def test_a_torch_program_on_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    sent = slipstream("submit", "ddp.py", "--on", "slurm", "--machines", "2", "--workers", "2", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    slipstream("logs", "-f", "ddp-1", cwd=tmp_path)
    said = [(tmp_path / f"runs/ddp-1/logs/rank-{rank}.log").read_text() for rank in (0, 1)]
    assert all(text.startswith("sum 3.0 on n") for text in said) and said[0] != said[1], said
    assert jobs(tmp_path)["ddp-1"]["status"] == "finished"


def test_what_slurm_cannot_give(slurm: dict[str, str], tmp_path: Path) -> None:
    write_job(tmp_path, mlp_values())
    for words, reason in (
        (["--machines", "5", "--workers", "5"], "could never give 5 nodes"),
        (["--set", "machines.slurm.partition=gpu"], "Slurm has no 'gpu'; it has main"),
        (["--set", "machines.slurm.account=nobody", "--set", "machines.slurm.constraint=gold"], "Slurm refuses"),
    ):
        refused = slipstream("submit", "job.yaml", "--on", "slurm", *words, cwd=tmp_path)
        assert refused.returncode == 8 and reason in refused.stderr, refused.stderr
    assert not (tmp_path / "runs").exists() and not queue(slurm)
    shown = slipstream("capacity", "--on", "slurm", cwd=tmp_path)
    assert shown.stdout == "   4 × 2 cores, 4 GB   in main\n"
