"""Runs whose folder is in object storage: machines that share no disk, and a real S3 server."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from fleet import agent_of, both_agents, jobs, losses, processes_of, until
from jobs import mlp_values
from program import slipstream, write_job
from s3 import Server, serving
from slipstream.data.storage import Storage
from slipstream.fleet.mirror import Mirror
from slipstream.job import dump, load_job
from slipstream.plan import Machine
from slipstream.planning import plan_there
from slipstream.runs import RunFolder, write_yaml

MACHINE = Machine("", cores=2, memory=2**33, gpus=(), bf16=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "runs") as server:
        yield server


def names(address: str) -> set[str]:
    return {name for name, _, _ in Storage(address).listed()}


@pytest.mark.usefixtures("server")
def test_a_run_far_away_is_seen_from_here(tmp_path: Path) -> None:
    values = mlp_values(machines={"store": "s3://runs/some"}, **{"train.steps": 60, "checkpoint.every": 20})
    write_job(tmp_path, values)
    sent = slipstream("submit", "job.yaml", "--on", "local", "--workers", "2", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    watched = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert watched.returncode == 0 and "finished after 60 steps" in watched.stdout, watched.stdout + watched.stderr
    assert slipstream("train", "job.yaml", "--workers", "2", cwd=tmp_path).returncode == 0
    assert losses(tmp_path / "runs/mlp-1") == losses(tmp_path / "runs/mlp-2")
    assert jobs(tmp_path)["mlp-1"]["status"] == "finished"
    assert "finished" in slipstream("show", "mlp-1", cwd=tmp_path).stdout
    there = names("s3://runs/some/mlp-1")
    assert {"job.yaml", "plan.yaml", "metrics.jsonl", "events.jsonl", "result.json", "logs/rank-1.log"} <= there
    kept = sorted({name.split("/")[1] for name in there if name.startswith("checkpoints/")})
    assert kept == ["step-00000040", "step-00000060"], "the older one is gone there too"
    assert not list((tmp_path / "runs/mlp-1/checkpoints").iterdir()), "they stay there"
    taken = slipstream("submit", "job.yaml", "--on", "local", "--run-dir", "other/mlp-1", cwd=tmp_path)
    assert taken.returncode == 2 and "already holds something" in taken.stderr
    assert not (tmp_path / "other/mlp-1").exists() and names("s3://runs/some/mlp-1") == there


def make_run(folder: Path, address: str, **changes: Any) -> None:
    """For two machines, in the storage alone."""
    job = load_job(write_job(folder, mlp_values(**changes)))
    run = RunFolder.create(folder / "first", dump(job))
    write_yaml(run.plan, plan_there(job, MACHINE, 2, 2).model_dump(mode="json"))
    Mirror(run, address).push()


def agents(folder: Path, address: str, head: str) -> AbstractContextManager[list[subprocess.Popen[str]]]:
    """Both, each with a disk of its own."""
    told = {"SLIPSTREAM_HEAD": head, "SLIPSTREAM_TOKEN": "a word that they know"}
    return both_agents(address, folder, folder, **told, SLIPSTREAM_CACHE=str(folder / "disk-{}"))


def said_by(folder: Path, machine: int) -> str:
    return (folder / f"agent-{machine}").read_text()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("layout", [{}, {"shard": 2}])
def test_machines_that_share_no_disk(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Killed in the middle, both go on with what the storage has, on disks that know nothing."""
    from s3 import free_ports

    address = f"s3://runs/apart-{len(layout)}"
    make_run(tmp_path, address, layout=layout, **{"train.steps": 1500, "checkpoint.every": 50})
    with agents(tmp_path, address, f"127.0.0.1:{free_ports(1)[0]}") as both:
        until(lambda: any(name.endswith("/manifest.json") for name in names(address)))
        for agent in both:
            agent.send_signal(signal.SIGKILL)
    until(lambda: not [words for words in processes_of(tmp_path).values() if "slipstream" in words])
    for machine in (0, 1):
        (tmp_path / f"disk-{machine}").rename(tmp_path / f"lost-{machine}")
    with agents(tmp_path, address, f"127.0.0.1:{free_ports(1)[0]}") as both:
        assert [agent.wait(180) for agent in both] == [0, 0], said_by(tmp_path, 0) + said_by(tmp_path, 1)
    assert "resuming" in said_by(tmp_path, 0) and "from step" in said_by(tmp_path, 0)
    seen = RunFolder(tmp_path / "seen")
    seen.path.mkdir()
    Mirror(seen, address).pull()
    words = ["train", "job.yaml", "--workers", "2", "--run-dir", "here"]
    assert slipstream(*words, cwd=tmp_path).returncode == 0
    assert losses(seen.path) == pytest.approx(losses(tmp_path / "here"), rel=1e-9)
    assert json.loads((seen.path / "result.json").read_text())["status"] == "finished"
    assert (seen.path / "export/model.safetensors").exists()


@pytest.mark.usefixtures("server")
def test_its_agent_is_killed_and_nothing_is_lost_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = mlp_values(machines={"store": "s3://runs/killed"}, **{"train.steps": 100_000, "checkpoint.every": 50})
    write_job(tmp_path, values)
    slipstream("submit", "job.yaml", "--on", "local", "--workers", "1", cwd=tmp_path)
    address = "s3://runs/killed/mlp-1"
    until(lambda: any(name.endswith("/manifest.json") for name in names(address)))
    os.kill(agent_of(tmp_path / "runs/mlp-1"), signal.SIGKILL)
    until(lambda: jobs(tmp_path)["mlp-1"]["status"] == "killed")
    refused = slipstream("resume", "mlp-1", cwd=tmp_path)
    assert refused.returncode == 2 and f"is at {address}" in refused.stderr
    fresh = RunFolder(tmp_path / "fresh")
    fresh.path.mkdir()
    Mirror(fresh, address).pull_whole()
    assert len(list(fresh.checkpoints.glob("step-*/manifest.json"))) == 1
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    assert jobs(tmp_path)["mlp-1"]["status"].startswith("unknown: s3://runs/killed/mlp-1")
    refused = slipstream("submit", "job.yaml", "--on", "local", cwd=tmp_path)
    assert refused.returncode == 8 and "machines.store" in refused.stderr
    assert not (tmp_path / "runs/mlp-2").exists()


@pytest.mark.usefixtures("server")
def test_a_result_is_taken_back_when_the_run_goes_on(tmp_path: Path) -> None:
    values = mlp_values(machines={"store": "s3://runs/again"}, **{"train.steps": 100_000, "checkpoint.every": 50})
    write_job(tmp_path, values)
    assert slipstream("submit", "job.yaml", "--on", "local", "--workers", "1", cwd=tmp_path).returncode == 0
    until(lambda: jobs(tmp_path)["mlp-1"]["step"] > 5)
    assert slipstream("stop", "mlp-1", cwd=tmp_path).returncode == 0
    assert slipstream("attach", "mlp-1", cwd=tmp_path).returncode == 130
    saved = jobs(tmp_path)["mlp-1"]
    assert saved["status"] == "stopped"
    assert slipstream("resume", "mlp-1", "--on", "local", cwd=tmp_path).returncode == 0
    until(lambda: jobs(tmp_path)["mlp-1"]["step"] > saved["step"])
    os.kill(agent_of(tmp_path / "runs/mlp-1"), signal.SIGKILL)
    until(lambda: jobs(tmp_path)["mlp-1"]["status"] == "killed")
    watched = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert watched.returncode == 3 and "ended without a word" in watched.stderr
