"""`submit --on local`, and asking after it: the same run as by `train`, beside the terminal."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from fleet import agent_of, jobs, losses, processes_of, steps_of, until
from jobs import mlp_values
from program import SLIPSTREAM, slipstream, start, write_job
from slipstream.fleet.launch import Silence
from slipstream.fleet.programs import ProgramWork
from slipstream.fleet.watch import WorkersFailed
from slipstream.runs import RunFolder

DDP = """
import sys
import torch
import torch.distributed as dist
from helper import name

dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(name, "sum", total.item(), sys.argv[1:], flush=True)
if "--fail" in sys.argv and dist.get_rank() == 1:
    raise RuntimeError("as it was told")
if "--wait" in sys.argv:
    dist.all_reduce(total)
if "--stay" in sys.argv:
    import time

    time.sleep(300)
dist.destroy_process_group()
"""


NET = """
import torch
from mine.size import WIDE

def build():
    return torch.nn.Linear(WIDE, 1)
"""


def test_what_is_submitted_is_what_train_does(tmp_path: Path) -> None:
    write_job(tmp_path, mlp_values(**{"train.steps": 12}))
    shown = slipstream("submit", "job.yaml", "--on", "local", "--workers", "2", "--dry-run", cwd=tmp_path)
    assert "-m slipstream agent" in shown.stdout and not (tmp_path / "runs").exists(), "a dry run leaves nothing"
    sent = slipstream("submit", "job.yaml", "--on", "local", "--workers", "2", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    watched = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert watched.returncode == 0 and "finished after 12 steps" in watched.stdout, watched.stdout + watched.stderr
    assert slipstream("train", "job.yaml", "--workers", "2", cwd=tmp_path).returncode == 0
    assert losses(tmp_path / "runs/mlp-1") == losses(tmp_path / "runs/mlp-2")
    row = jobs(tmp_path)["mlp-1"]
    assert (row["status"], row["fleet"], row["workers"], row["step"]) == ("finished", "local", 2, 12)
    assert list(jobs(tmp_path)) == ["mlp-1"], "what was only trained is no submission"
    assert slipstream("stop", "mlp-1", cwd=tmp_path).returncode == 2
    assert not processes_of(tmp_path)


def test_stopped_it_has_saved_and_goes_on(tmp_path: Path) -> None:
    write_job(tmp_path, mlp_values(**{"train.steps": 50_000}))
    slipstream("submit", "job.yaml", "--on", "local", "--workers", "2", cwd=tmp_path)
    run = tmp_path / "runs/mlp-1"
    until(lambda: steps_of(run) > 5)
    assert jobs(tmp_path)["mlp-1"]["status"] == "running"
    following = start("logs", "-f", "mlp-1", cwd=tmp_path)
    assert slipstream("stop", "mlp-1", cwd=tmp_path).returncode == 0
    watched = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert watched.returncode == 130, watched.stdout + watched.stderr
    assert following.wait(20) == 0 and "with a checkpoint" in following.communicate()[0]
    assert jobs(tmp_path)["mlp-1"]["status"] == "stopped"
    assert not processes_of(tmp_path)
    step = steps_of(run)
    going_on = start("resume", "mlp-1", cwd=tmp_path)
    until(lambda: steps_of(run) > step)
    going_on.send_signal(signal.SIGINT)
    assert f"resuming mlp-1 from step {step}" in going_on.communicate(timeout=60)[0]


def test_own_code_travels_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/net.py").write_text(NET)
    (tmp_path / "mine/size.py").write_text("WIDE = 16\n")
    write_job(tmp_path, mlp_values(model={"import": "mine.net:build"}, **{"train.steps": 4}))
    assert slipstream("submit", "job.yaml", "--on", "local", "--workers", "1", cwd=tmp_path).returncode == 0
    (tmp_path / "mine/size.py").write_text("raise RuntimeError('changed while it waited')\n")
    watched = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    refused = slipstream("submit", "job.yaml", "--on", "local", cwd=tmp_path)
    assert refused.returncode == 2 and "importing mine.net raised RuntimeError: changed" in refused.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mlp-1"], "what was refused leaves nothing"


def test_what_fails_says_so(tmp_path: Path) -> None:
    write_job(tmp_path, mlp_values(**{"train.optimizer": {"name": "sgd", "lr": 1e30}, "train.steps": 50}))
    slipstream("submit", "job.yaml", "--on", "local", "--workers", "2", cwd=tmp_path)
    watched = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert watched.returncode == 5 and "NonFiniteLoss" in watched.stderr, watched.stdout + watched.stderr
    assert jobs(tmp_path)["mlp-1"]["status"] == "failed"
    again = slipstream("submit", "job.yaml", "--on", "local", "--run-dir", "runs/mlp-1", cwd=tmp_path)
    assert again.returncode == 2 and "already holds a run" in again.stderr
    several = slipstream("submit", "job.yaml", "--on", "local", "--machines", "2", cwd=tmp_path)
    assert several.returncode == 8 and "this one alone" in several.stderr


def test_when_its_agent_is_killed_nothing_is_left(tmp_path: Path) -> None:
    write_job(tmp_path, mlp_values(**{"train.steps": 100_000}))
    slipstream("submit", "job.yaml", "--on", "local", "--workers", "2", cwd=tmp_path)
    until(lambda: steps_of(tmp_path / "runs/mlp-1") > 2)
    os.kill(agent_of(tmp_path / "runs/mlp-1"), signal.SIGKILL)
    until(lambda: not processes_of(tmp_path))
    assert jobs(tmp_path)["mlp-1"]["status"] == "killed"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    (tmp_path / "ddp.py").write_text(DDP)
    (tmp_path / "helper.py").write_text('name = "mine"\n')
    return tmp_path


def test_only_the_last_start_has_a_last_word(tmp_path: Path) -> None:
    write_job(tmp_path, mlp_values(**{"train.steps": 100_000, "checkpoint.every": 20}))
    assert slipstream("submit", "job.yaml", "--on", "local", "--workers", "2", cwd=tmp_path).returncode == 0
    run = tmp_path / "runs/mlp-1"
    until(lambda: any(run.glob("checkpoints/*/manifest.json")))
    os.kill(next(number for number, words in processes_of(run).items() if "slipstream.fleet.worker" in words), 9)
    failed = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert failed.returncode == 3 and "failed at step" in failed.stderr
    assert slipstream("resume", "mlp-1", "--on", "local", cwd=tmp_path).returncode == 0
    before = steps_of(run)
    until(lambda: steps_of(run) > before)
    os.kill(agent_of(run), signal.SIGKILL)
    until(lambda: jobs(tmp_path)["mlp-1"]["status"] == "killed")
    killed = slipstream("attach", "mlp-1", cwd=tmp_path)
    assert killed.returncode == 3 and "ended without a word" in killed.stderr


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def test_a_program_that_does_not_listen_is_ended_when_asked_twice(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(STUBBORN)
    assert slipstream("submit", "deaf.py", "--on", "local", "--workers", "2", cwd=tmp_path).returncode == 0
    until(lambda: "deaf" in slipstream("logs", "deaf-1", cwd=tmp_path).stdout)
    for _ in range(2):
        assert slipstream("stop", "deaf-1", cwd=tmp_path).returncode == 0
    until(lambda: jobs(tmp_path)["deaf-1"]["status"] == "stopped")
    assert not processes_of(tmp_path)


def test_arguments_reach_a_program(programs: Path) -> None:
    sent = slipstream("submit", "ddp.py", "--on", "local", "--workers", "2", "--", "--epochs", "3", cwd=programs)
    assert sent.returncode == 0, sent.stderr
    said = slipstream("logs", "-f", "ddp-1", "--rank", "1", cwd=programs)
    assert said.stdout == "mine sum 3.0 ['--epochs', '3']\n"
    assert slipstream("resume", "ddp-1", cwd=programs).returncode == 2


def test_a_program_that_fails_ends_all_of_it(programs: Path) -> None:
    slipstream("submit", "ddp.py", "--on", "local", "--workers", "2", "--", "--fail", "--stay", cwd=programs)
    said = slipstream("logs", "-f", "ddp-1", cwd=programs)
    assert "rank 1 failed: RuntimeError: as it was told" in said.stdout, said.stdout
    assert jobs(programs)["ddp-1"]["status"] == "failed"
    assert not processes_of(programs)


def test_of_a_program_that_fails_the_first_one_is_named(programs: Path) -> None:
    """Not those that only lost their connection to it."""
    slipstream("submit", "ddp.py", "--on", "local", "--workers", "3", "--", "--fail", "--wait", cwd=programs)
    said = slipstream("logs", "-f", "ddp-1", cwd=programs)
    assert "rank 1 failed: RuntimeError: as it was told" in said.stdout, said.stdout


ABORTS = """
import os, sys, traceback

sys.excepthook = lambda *error: (traceback.print_exception(*error), sys.stderr.flush(), os.abort())
raise ValueError("seven")
"""


IGNORED = """
import atexit

class Held:
    def __del__(self):
        self.missing.close()

held = Held()
atexit.register(lambda: 1 / 0)
raise ValueError("seven")
"""


@pytest.mark.parametrize("program", [ABORTS, IGNORED], ids=["aborts", "ignores"])
def test_an_exception_counts_whatever_python_says_after_it(program: str, tmp_path: Path) -> None:
    """It may abort, with threads of a process group, and ignore other exceptions on its way out."""
    (tmp_path / "ends.py").write_text(program)
    slipstream("submit", "ends.py", "--on", "local", "--workers", "1", cwd=tmp_path)
    said = slipstream("logs", "-f", "ends-1", cwd=tmp_path)
    assert "rank 0 failed: ValueError: seven" in said.stdout, said.stdout


def test_what_an_earlier_launch_said_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text("import sys\nprint('no such folder')\nsys.exit(1)\n")
    slipstream("submit", "twice.py", "--on", "local", "--workers", "1", cwd=tmp_path)
    run = RunFolder(tmp_path / "runs/twice-1")
    until(lambda: not processes_of(tmp_path))
    log = run.logs / "rank-0.log"
    log.write_text("Traceback (most recent call last):\n  there\nValueError: before\n")
    with pytest.raises(WorkersFailed) as failed:
        ProgramWork.of(run, str(tmp_path)).lead(None, Silence(), os.open(os.devnull, os.O_RDONLY))
    assert failed.value.failure.message == "twice.py ended by itself with exit code 1"
    assert failed.value.failure.trace == "no such folder"


def test_a_program_that_ends_without_an_exception(tmp_path: Path) -> None:
    (tmp_path / "quits.py").write_text("import sys\nprint('no such folder')\nsys.exit(1)\n")
    slipstream("submit", "quits.py", "--on", "local", "--workers", "1", cwd=tmp_path)
    said = slipstream("logs", "-f", "quits-1", cwd=tmp_path)
    assert "rank 0 failed: ended: quits.py ended by itself with exit code 1" in said.stdout, said.stdout


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_program_ends_with_its_agent(programs: Path, how: str) -> None:
    slipstream("submit", "ddp.py", "--on", "local", "--workers", "2", "--", "--stay", cwd=programs)
    run = programs / "runs/ddp-1"
    until(lambda: len([log for log in run.glob("logs/rank-*.log") if "sum" in log.read_text()]) == 2)
    if how == "stop":
        assert slipstream("stop", "ddp-1", cwd=programs).returncode == 0
    else:
        os.kill(agent_of(run), signal.SIGKILL)
    until(lambda: not processes_of(programs))
    assert jobs(programs)["ddp-1"]["status"] == ("stopped" if how == "stop" else "killed")


def test_what_is_no_program_is_refused(programs: Path) -> None:
    (programs / "broken.py").write_text("def f(:\n")
    for words, reason in (
        (["broken.py"], "broken.py:1"),
        (["missing.py"], "No such file"),
        (["ddp.py", "--set", "train.batch=4"], "only machines"),
        (["ddp.py", "--set", "machines.slurm.partitoin=x"], "partition"),
        (["ddp.py", "--workers", "3", "--machines", "2"], "evenly"),
    ):
        refused = slipstream("submit", *words, "--on", "local", cwd=programs)
        assert refused.returncode == 2 and reason in refused.stderr, refused.stderr
    assert not (programs / "runs").exists()


def test_without_an_engine(tmp_path: Path) -> None:
    write_job(tmp_path, mlp_values())
    for words in (["submit", "job.yaml"], ["capacity"]):
        environment = {**os.environ, "PATH": "/nowhere"}
        asked = subprocess.run(
            [SLIPSTREAM, *words, "--on", "slurm"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.returncode == 8 and "no Slurm" in asked.stderr
    assert not (tmp_path / "runs").exists()
