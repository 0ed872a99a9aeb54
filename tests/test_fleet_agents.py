"""Agents on several machines make one run: here they are processes that meet over loopback."""

import json
import os
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from fleet import both_agents, losses, processes_of, steps_of, until
from jobs import mlp_values
from program import SLIPSTREAM, environment, slipstream, write_job
from slipstream.job import dump, load_job
from slipstream.plan import Machine
from slipstream.planning import plan_there
from slipstream.runs import RunFolder, write_yaml

MACHINE = Machine("", cores=2, memory=2**33, gpus=(), bf16=False)


def make_run(folder: Path, workers: int = 4, **changes: Any) -> Path:
    """A run for two machines that nobody has started."""
    job = load_job(write_job(folder, mlp_values(**changes)))
    run = RunFolder.create(folder / "runs/mlp-1", dump(job))
    write_yaml(run.plan, plan_there(job, MACHINE, 2, workers).model_dump(mode="json"))
    return run.path


def agents(run: Path) -> AbstractContextManager[list[subprocess.Popen[str]]]:
    """Both, with what they say anew."""
    for log in run.glob("logs/agent-*"):
        log.unlink()
    return both_agents(str(run), run.parents[1], run / "logs")


def said_by(run: Path, machine: int) -> str:
    return (run / f"logs/agent-{machine}").read_text()


def test_one_curve_over_machines(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with agents(run) as both:
        assert [agent.wait(120) for agent in both] == [0, 0], said_by(run, 0) + said_by(run, 1)
    assert slipstream("train", "job.yaml", "--workers", "4", cwd=tmp_path).returncode == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "runs/mlp-2"), rel=1e-9)  # in fp64
    assert not (run / "meeting.json").exists(), "it has a secret in it"
    assert not processes_of(tmp_path)


def test_servers_on_machines(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, exchange={"kind": "server", "servers": 3}, **{"train.steps": 10})
    with agents(run) as both:
        assert [agent.wait(120) for agent in both] == [0, 0], said_by(run, 0) + said_by(run, 1)
    assert len(losses(run)) == 10 and not processes_of(tmp_path)


def worker_of(agent: int) -> int:
    """Some rank of its: a process that was forked from the one that it started."""
    for host in children(agent):
        return next(iter(children(host)), host)
    raise AssertionError("it has no workers yet")


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.parametrize("victim", ["worker", "agent", "head"])
def test_whoever_is_killed_ends_all_and_it_goes_on(tmp_path: Path, victim: str) -> None:
    run = make_run(tmp_path, 2, **{"train.steps": 3000, "checkpoint.every": 20})
    with agents(run) as (head, other):
        until(lambda: list(run.glob("checkpoints/*/manifest.json")))
        if victim == "worker":
            os.kill(worker_of(other.pid), signal.SIGKILL)
        else:
            (other if victim == "agent" else head).kill()
        codes = head.wait(30), other.wait(30)
        until(lambda: not processes_of(tmp_path), 20)
    if victim == "worker":
        assert codes == (3, 0) and "killed by signal 9" in said_by(run, 0), said_by(run, 0)
    elif victim == "agent":
        assert codes[0] == 3 and "machine 1 is out of reach" in said_by(run, 0), said_by(run, 0)
    else:
        assert codes[1] == 3 and "the first machine is gone" in said_by(run, 1), said_by(run, 1)
    before = losses(run)
    with agents(run) as (head, other):
        until(lambda: "resuming mlp-1 from step" in said_by(run, 0))
        until(lambda: steps_of(run) > len(before))
        (other if victim == "agent" else head).terminate()  # whoever is asked, all save and stop
        assert (head.wait(30), other.wait(30)) == (130, 0)
    assert losses(run)[: len(before)] == before
    assert json.loads((run / "result.json").read_text())["reason"] == "interrupted"


def test_a_hanging_worker_of_another_machine_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, **{"train.steps": 100_000, "limits.step": "4s"})
    with agents(run) as (head, other):
        until(lambda: steps_of(run) > 5)
        rank = worker_of(other.pid)
        os.kill(rank, signal.SIGSTOP)
        assert head.wait(60) == 4, said_by(run, 0)
        assert other.wait(30) == 0
    assert "has shown no sign of life" in said_by(run, 0)
    assert not processes_of(tmp_path)


def test_machines_that_do_not_come(tmp_path: Path) -> None:
    run = make_run(tmp_path, **{"limits.first_step": "1s"})
    reasons = ("machines [1] of 2 have not come in 1 s", "has not found the first one", "which of 2 machines this is")
    codes = (3, 3, 2)  # to start them again may help, but not against what is wrong
    for machine, (reason, code) in enumerate(zip(reasons, codes, strict=True)):
        told = environment() | {"SLIPSTREAM_MACHINE": str(machine), "SLIPSTREAM_ADDRESS": "127.0.0.1"}
        command = [SLIPSTREAM, "agent", str(run)]
        alone = subprocess.run(command, env=told, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert alone.returncode == code and reason in alone.stderr, alone.stderr
