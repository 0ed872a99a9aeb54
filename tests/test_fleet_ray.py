"""The fleet `ray` on a real cluster: a head and two nodes, each on a host of its own (network namespaces)."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet import processes_of, steps_of, until
from jobs import write_documents
from program import SLIPSTREAM, write_job
from s3 import Server

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SLOW = """
import time
from torch import nn

class Slow(nn.Linear):
    def forward(self, inputs):
        time.sleep(0.05)
        return super().forward(inputs)

def build():
    return Slow(16, 1)
"""

DDP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        from ray_cluster import cluster, missing

        if reason := missing():
            pytest.skip(reason)
        with cluster(nodes=2, cores=2) as made:
            yield made


class Desk:
    """Where a user of the cluster sits: on its head's host, in a folder."""

    def __init__(self, ray: Any, folder: Path) -> None:
        self.ray, self.folder = ray, folder

    def begin(self, *words: str | Path, host: int = 0, **environment: str) -> subprocess.Popen[str]:
        told = {"COLUMNS": "200", **environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        begun: subprocess.Popen[str] = self.ray.start(
            [SLIPSTREAM, *map(str, words)], told, host, cwd=self.folder, **pipes
        )
        return begun

    def say(self, *words: str | Path, host: int = 0, **environment: str) -> tuple[int, str, str]:
        """Run a command: its exit code, and what it prints."""
        begun = self.begin(*words, host=host, **environment)
        out, err = begun.communicate(timeout=400)  # to attach is to wait for a run's end: minutes on a slow machine
        return begun.returncode, out, err

    def submit(self, *words: str | Path, **more: Any) -> None:
        code, out, err = self.say("submit", *words, "--on", "ray", **more)
        assert code == 0, out + err

    def standing(self, name: str) -> str:
        rows = json.loads(self.say("jobs", "--json")[1])
        return next(str(row["status"]) for row in rows if row["run"].endswith(name))

    def steps(self, name: str) -> int:
        return steps_of(self.folder / "runs" / name)

    def processes(self, name: str, what: str) -> list[int]:
        """All of a run, anywhere, with these words in their command."""
        return [number for number, words in processes_of(self.folder / "runs" / name).items() if what in words]

    def nothing_left(self, name: str) -> bool:
        actors = self.ray.ask("/api/v0/actors?limit=1000")["data"]["result"]["result"]
        groups = self.ray.ask("/api/v0/placement_groups?limit=1000")["data"]["result"]["result"]
        alive = [actor for actor in actors if actor["class_name"] == "Keeper" and actor["state"] != "DEAD"]
        held = [group for group in groups if group["name"].startswith(name) and group["state"] != "REMOVED"]
        return not processes_of(self.folder / "runs" / name) and not alive and not held


@pytest.fixture
def desk(ray: Any, tmp_path: Path) -> Desk:
    return Desk(ray, tmp_path)


def job(**changes: Any) -> dict[str, Any]:
    return {
        "name": "on-ray",
        "model": {"kind": "mlp", "hidden": [24]},
        "data": {"source": "synthetic", "samples": 200, "validation": 0.1},
        "train": {"steps": 30, "batch": 12, "optimizer": {"name": "adam", "lr": 3e-3}, "evaluate": {"every": 10}},
        "machines": {"device": "cpu"},
        "layout": {"replicate": 4},
        "exchange": {"algorithm": "ring"},  # auto goes by the links, which are not the same on one machine
        **changes,
    }


def slow(desk: Desk, name: str, machines: int) -> Path:
    """A job of one's own code, which travels with it, and which takes long."""
    (desk.folder / "slow.py").write_text(SLOW)
    values = job(
        name=name,
        model={"import": "slow:build"},
        data={"source": "synthetic", "samples": 200},
        train={"task": "regression", "steps": 2000, "batch": 4, "optimizer": {"name": "sgd", "lr": 0.01}},
        layout={"replicate": 2 * machines},
    )
    return write_job(desk.folder, values, f"{name}.yaml")


def curve(run: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line.get("val_loss")) for line in lines]


@pytest.fixture
def storage(desk: Desk) -> Iterator[dict[str, str]]:
    """The environment of who may read an S3 server on the head's host."""
    folder = desk.folder / "server"
    folder.mkdir()
    server = Server(folder, desk.ray.network.addresses[0])
    with ThreadPoolExecutor(1) as visitor:  # a thread alone can go to another network, and start processes there
        visitor.submit(desk.ray.network.visit, 0).result()
        visitor.submit(server.start).result()
        visitor.submit(server.make_bucket, "data").result()
    yield server.environment
    server.kill()


def test_the_curve_is_that_of_one_machine(desk: Desk, storage: dict[str, str]) -> None:
    """With data from afar."""
    text = write_documents(desk.folder / "documents.jsonl", 400)
    words = ["--vocabulary", "300", "--workers", "1"]
    code, out, err = desk.say("data", "prepare", text, "s3://data/corpus", *words, **storage)
    assert code == 0, out + err
    values = job(
        model={"kind": "decoder", "layers": 1, "hidden": 16, "heads": 2},
        data={"prepared": "s3://data/corpus", "sequence": 64, "validation": 0.1},
        machines={"device": "cpu", "ray": {"environment": list(storage)}},
    )
    path = write_job(desk.folder, values)
    code, out, _ = desk.say("capacity", "--on", "ray")
    assert code == 0 and "2 × 2 cores" in out
    desk.submit(path, "--machines", "2", "--workers", "4", **storage)
    code, out, err = desk.say("train", path, "--workers", "4", "--run-dir", "here", **storage)
    assert code == 0, out + err
    code, out, err = desk.say("attach", "on-ray-1")
    assert code == 0, out + err
    run = desk.folder / "runs" / "on-ray-1"
    assert curve(run) == curve(desk.folder / "here")
    assert yaml.safe_load((run / "plan.yaml").read_text())["machines"] == 2
    assert desk.standing("on-ray-1") == "finished"
    code, out, _ = desk.say("logs", "on-ray-1")
    addresses = desk.ray.network.addresses
    assert code == 0 and any(f"on {a}, {b}" in out for a, b in (addresses[1:3], addresses[2:0:-1]))
    until(lambda: desk.nothing_left("on-ray-1"))


def test_a_run_in_object_storage_is_stopped_and_goes_on(desk: Desk, storage: dict[str, str]) -> None:
    machines = {"device": "cpu", "store": "s3://data/runs", "ray": {"environment": list(storage)}}
    train = {"steps": 1500, "batch": 12, "optimizer": {"name": "adam", "lr": 3e-3}}
    path = write_job(desk.folder, job(name="far", machines=machines, train=train))
    desk.submit(path, "--machines", "2", "--workers", "4", **storage)
    until(lambda: any(row["step"] > 10 for row in json.loads(desk.say("jobs", "--json", **storage)[1])))
    assert desk.say("stop", "far-1", **storage)[0] == 0
    assert desk.say("attach", "far-1", **storage)[0] == 130
    assert 10 < desk.steps("far-1") < 1500
    code, out, err = desk.say("resume", "far-1", "--on", "ray", **storage)
    assert code == 0, out + err
    code, out, err = desk.say("attach", "far-1", **storage)
    assert code == 0, out + err
    assert "resuming" in desk.say("logs", "far-1", **storage)[1]
    assert desk.say("train", path, "--workers", "4", "--run-dir", "here", **storage)[0] == 0
    run = desk.folder / "runs/far-1"
    assert [point[:2] for point in curve(run)] == [point[:2] for point in curve(desk.folder / "here")]
    assert not list((run / "checkpoints").iterdir())
    until(lambda: desk.nothing_left("far-1"))


def test_one_waits_until_there_is_room_and_a_killed_worker_is_reported(desk: Desk) -> None:
    first, second = slow(desk, "first", machines=2), slow(desk, "second", machines=2)
    desk.submit(first, "--machines", "2")
    until(lambda: desk.steps("first-1") > 2)
    desk.submit(second, "--machines", "2")
    watcher = desk.begin("attach", "second-1")
    assert watcher.stdout
    waiting = next(line for line in iter(watcher.stdout.readline, "") if "CPUs" in line)
    assert "2 nodes with 2 CPUs each are not free now" in waiting
    assert desk.standing("second-1").startswith("queued") and desk.standing("first-1") == "running"
    assert desk.say("stop", "second-1")[0] == 0
    assert watcher.wait(30) == 130 and "stopped before it began" in watcher.stderr.read()  # type: ignore[union-attr]
    os.kill(max(desk.processes("first-1", "slipstream.fleet.worker")), signal.SIGKILL)
    code, _, err = desk.say("attach", "first-1")
    assert code == 3 and "killed" in err
    assert desk.standing("first-1") == "failed"
    until(lambda: desk.nothing_left("first-1") and desk.nothing_left("second-1"))


def test_a_run_is_stopped_with_a_checkpoint_and_nothing_outlives_a_killed_driver(desk: Desk) -> None:
    for name in ("stopped", "killed"):  # side by side, on a node each
        desk.submit(slow(desk, name, machines=1))
    until(lambda: desk.steps("stopped-1") > 2 and desk.steps("killed-1") > 2)
    (driver,) = desk.processes("killed-1", "slipstream.fleet.on_ray")
    os.kill(driver, signal.SIGKILL)
    assert desk.say("stop", "stopped-1")[0] == 0
    code, _, err = desk.say("attach", "stopped-1")
    assert code == 130, err
    run = desk.folder / "runs" / "stopped-1"
    assert json.loads((run / "result.json").read_text())["status"] == "stopped" and any((run / "checkpoints").iterdir())
    until(lambda: desk.nothing_left("killed-1") and desk.nothing_left("stopped-1"))
    code, _, err = desk.say("attach", "killed-1")
    assert code == 3 and "ray says: failed" in err
    code, _, err = desk.say("stop", "killed-1")
    assert code == 2 and "not running" in err


def test_somebodys_program(desk: Desk) -> None:
    (desk.folder / "ddp.py").write_text(DDP)
    desk.submit("ddp.py", "--machines", "2", "--workers", "4")
    out = desk.say("logs", "-f", "ddp-1")[1]
    assert desk.standing("ddp-1") == "finished" and out.count("sum 10.0") >= 4, out
    until(lambda: desk.nothing_left("ddp-1"))


def test_what_is_sent_can_be_seen_before(desk: Desk) -> None:
    path = write_job(desk.folder, job(machines={"device": "cpu", "ray": {"environment": ["SECRET"]}}))
    words = ("submit", path, "--on", "ray", "--machines", "2", "--dry-run")
    code, out, err = desk.say(*words, SECRET="hidden from view")
    assert code == 0, err
    target, _, body = out.partition("\n")
    sent = json.loads(body)
    assert target == f"POST {desk.ray.address}/api/jobs/"
    assert f"slipstream.fleet.on_ray {desk.folder}/runs/on-ray-1 --machines 2 --cores 2" in sent["entrypoint"]
    assert sent["runtime_env"]["env_vars"]["SECRET"] == "…" and "hidden" not in out
    assert not (desk.folder / "runs").exists()
    code, _, err = desk.say(*words)
    assert code == 8 and "machines.ray.environment: SECRET is not set here" in err


REFUSALS: list[tuple[list[str], dict[str, str], str]] = [
    (["--machines", "3"], {}, "could never give 3 nodes with 2 CPUs each: 2 of its nodes are so large"),
    (["--set", "machines.ray.address=http://127.0.0.1:1"], {}, "no dashboard of Ray answers at http://127.0.0.1:1"),
    (["--set", "machines.ray.address=nonsense"], {}, "machines.ray.address: 'nonsense' is none"),
    (
        ["--set", "machines.ray.address=ray://10.77.0.3:10001"],
        {},
        "no dashboard of Ray answers at http://10.77.0.3:8265",
    ),
    ([], {"RAY_AUTH_TOKEN": "wrong"}, "wants another token"),
    ([], {"RAY_AUTH_MODE": ""}, "set RAY_AUTH_MODE=token"),
]


def test_what_cannot_be_is_refused_and_nothing_is_left(desk: Desk) -> None:
    path = write_job(desk.folder, job(layout={}))
    for words, environment, expected in REFUSALS:
        began = time.monotonic()
        code, _, err = desk.say("submit", path, "--on", "ray", *words, **environment)
        assert code == 8 and expected in err, (words, err)
        assert time.monotonic() - began < 10
        assert not (desk.folder / "runs").exists()


def test_a_head_without_slipstream_is_named(desk: Desk) -> None:
    other = desk.folder / "python"
    other.write_text("#!/bin/sh\necho No module named slipstream >&2\nexit 1\n")
    other.chmod(0o755)
    path = write_job(desk.folder, job(machines={"device": "cpu", "ray": {"python": str(other)}}))
    desk.submit(path, "--machines", "2")
    began = time.monotonic()
    code, _, err = desk.say("attach", "on-ray-1")
    assert code == 3 and "ray says: failed: No module named slipstream" in err
    assert time.monotonic() - began < 10
    code, _, err = desk.say("submit", path, "--on", "ray", "--machines", "2", "--run-dir", "runs/on-ray-1")
    assert code == 2 and "already holds a run" in err


def test_a_cluster_is_started_where_there_is_none_and_goes_with_the_run(desk: Desk) -> None:
    alone = {"RAY_ADDRESS": "", "RAY_AUTH_MODE": "", "RAY_AUTH_TOKEN": "", "GLOO_SOCKET_IFNAME": "lo"}
    apart: dict[str, Any] = {"host": desk.ray.apart, "RAY_TMPDIR": str(desk.folder), **alone}
    path = write_job(desk.folder, job(layout={"replicate": 2}, train={**job()["train"], "steps": 300}))
    code, _, err = desk.say("submit", path, "--on", "ray", "--machines", "2", **apart)
    assert code == 8 and "no Ray cluster was found" in err
    desk.submit(path, **apart)
    until(lambda: desk.steps("on-ray-1") > 0)
    listening = desk.ray.start(["ss", "-ltnH"], host=desk.ray.apart, stdout=subprocess.PIPE, text=True).communicate()[0]
    places = {line.split()[3].rpartition(":")[0] for line in listening.splitlines()}
    assert places and places <= {"127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"}
    code, out, err = desk.say("attach", "on-ray-1", **apart)
    assert code == 0 and "finished after 300 steps" in out, err
    ours = ["ip", "netns", "pids", desk.ray.network.names[desk.ray.apart]]
    until(lambda: not subprocess.run(ours, capture_output=True, text=True, check=True).stdout.split())
