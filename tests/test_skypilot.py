"""The fleet skypilot: its tasks by SkyPilot itself, and whole runs by its client on a stand-in for its API server,
whose machines are processes."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import merge, mlp_job
from program import SLIPSTREAM, TESTS, environment, slipstream, write_job
from sky_choice import write_catalog
from sky_server import Server
from slipstream.fleet.base import FleetError, Order
from slipstream.fleet.skypilot import CLOUDS, SkyPilotFleet
from slipstream.job.machines import Machines
from slipstream.plan import Layout
from slipstream.plan.offers import load_offers


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SkyPilot keeps what it knows in the home folder: what there is to rent, here made from our table of offers."""
    home = tmp_path_factory.mktemp("home")
    write_catalog(home / ".sky/catalogs/v8", load_offers())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("SKYPILOT_DISABLE_LOCAL_API_SERVER", "1")  # none is to be started behind our back
        for way in ("http_proxy", "https_proxy"):  # and nobody else asked
            patch.setenv(way, "http://127.0.0.1:9")
        patch.setenv("no_proxy", "127.0.0.1")
        yield home


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for one which all machines and we see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(tmp_path)
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", server.address)
    yield server
    server.close()


def job_file(folder: Path, place: Path, steps: int = 20, **changes: Any) -> Path:
    values = mlp_job(**{"train.steps": steps, "checkpoint.every": 10}).model_dump(mode="json", exclude_defaults=True)
    settings = {"image": "registry/slipstream:1", "shared": str(place), **changes}
    return write_job(folder, merge(values, {"machines": {"device": "cpu", "skypilot": settings}}))


def plan_file(folder: Path, machines: int = 2, name: str = "plan.yaml", **changes: Any) -> Path:
    """A saved plan; a small machine, because ours are."""
    wanted = {"cloud": "aws", "machine": "g4dn.xlarge", "region": "us-east-1", **changes}
    spot = wanted.pop("spot", True)
    offer = next(
        each for each in load_offers() if (each.cloud, each.machine, each.region) == tuple(wanted.values())
    )  # fmt: skip
    named = {"accelerator": offer.accelerator.name, "accelerators": offer.count, "spot": spot}
    price = offer.spot if spot else offer.price
    assert price
    values = {
        "offer": {**wanted, **named, "price_per_hour": price, "price_date": offer.date.isoformat()},
        "machines": machines,
        "layout": Layout(replicate=machines, micro_batch=12 // machines).model_dump(mode="json"),
        "predicted": {"step_seconds": 0.1, "seconds": 7200.0, "cost": 2.5 * price * machines, "sure": 0.25},
    }
    return write_job(folder, values, name)


def submit(job: Path, plan: Path, place: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return slipstream("submit", job, "--on", "skypilot", "--plan", plan, *words, cwd=place)


def test_skypilot_picks_the_offer_of_the_plan(place: Path, tmp_path: Path) -> None:
    """From `slipstream plan` to SkyPilot's optimiser, which has a catalog made from our offers."""
    job = job_file(tmp_path, place)
    big = write_job(
        tmp_path,
        {
            "name": "big",
            "model": {"kind": "decoder", "preset": "llama-8b"},
            "data": {"source": "tokens.npy", "tokens": True, "sequence": 4096, "vocabulary": 128_256},
            "train": {"tokens": "2B", "batch": 256, "optimizer": {"name": "adamw", "lr": 3e-4}},
            "limits": {"deadline": "3d", "clouds": ["aws"], "spot": "only"},
            "machines": yaml.safe_load(job.read_text())["machines"] | {"device": "auto"},
        },
        "big.yaml",
    )
    planned = slipstream("plan", big, "--save", tmp_path / "big-plan.yaml", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    plans = [tmp_path / "big-plan.yaml"]
    plans += [
        plan_file(tmp_path, 1, f"{number}.yaml", spot=spot, cloud=cloud, machine=machine, region=region)
        for number, (cloud, machine, region, spot) in enumerate(
            [
                ("gcp", "a2-highgpu-1g", "us-central1", True),
                ("azure", "Standard_NC24ads_A100_v4", "eastus", False),
                ("lambda", "gpu_1x_a10", "us-east-1", False),
                ("runpod", "1x_A100-80GB_SECURE", "JP", True),
            ]
        )
    ]
    tasks = []
    for number, plan in enumerate(plans):
        shown = submit(job if number else big, plan, place, "--dry-run")
        assert shown.returncode == 0, shown.stderr
        tasks.append(tmp_path / f"task-{number}.yaml")
        tasks[-1].write_text(shown.stdout)
    asked = subprocess.run(
        [sys.executable, TESTS / "sky_choice.py", *tasks],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert asked.returncode == 0, asked.stdout + asked.stderr
    found = json.loads(asked.stdout.splitlines()[-1])
    for plan, chosen in zip(map(yaml.safe_load, map(Path.read_text, plans)), found, strict=True):
        offer = plan["offer"]
        assert {key: chosen[key] for key in ("cloud", "machine", "region", "spot")} == {
            key: offer[key] for key in ("cloud", "machine", "region", "spot")
        }
        assert chosen["machines"] == plan["machines"]
        assert chosen["price"] == pytest.approx(offer["price_per_hour"])
        assert list(chosen["accelerators"].values()) == [offer["accelerators"]]
        assert chosen["down"], "machines are never left running"
        assert chosen["recovery"]["max_restarts_on_errors"] == 10
    assert found[0]["spot"] and found[0]["machines"] >= 1


def test_clouds_that_skypilot_knows() -> None:
    import sky

    ours = {offer.cloud for offer in load_offers()}
    assert set(CLOUDS) == {cloud for cloud in ours if cloud in sky.CLOUD_REGISTRY}


def test_a_run_from_submit_to_its_end(cloud: Server, place: Path, tmp_path: Path) -> None:
    job, plan = job_file(tmp_path, place), plan_file(tmp_path)
    sent = submit(job, plan, place, "--yes")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    price = yaml.safe_load(plan.read_text())["offer"]["price_per_hour"]
    assert (
        f"2 × aws g4dn.xlarge spot in us-east-1: ${2 * price:.2f} an hour, about ${5 * price:.2f} in all" in sent.stdout
    )
    run = place / "runs" / "mlp-1"
    assert f"as 1@{run}" in sent.stdout
    shown = yaml.safe_load((run / "skypilot.yaml").read_text())
    task = cloud.jobs[0]["task"]
    assert (task["num_nodes"], task["run"]) == (2, shown["run"])
    assert task["resources"]["autostop"] == {"idle_minutes": 10, "down": True, **task["resources"]["autostop"]}
    assert oct((run / "skypilot.yaml").stat().st_mode)[-3:] == "600"
    watched = slipstream("attach", run, cwd=place, timeout=120)
    assert watched.returncode == 0, watched.stdout + watched.stderr + cloud.jobs[0]["log"].read_text()
    assert json.loads((run / "result.json").read_text())["step"] == 20
    assert "waiting for 1 more machines" in slipstream("logs", run, cwd=place).stdout
    listed = json.loads(slipstream("jobs", "--json", cwd=place).stdout)
    assert [(row["fleet"], row["status"]) for row in listed] == [("skypilot", "finished")]
    assert yaml.safe_load((run / "job.yaml").read_text())["machines"]["price_per_hour"] == pytest.approx(2 * price)


def test_stop_leaves_a_checkpoint(cloud: Server, place: Path, tmp_path: Path) -> None:
    folder = place / "stopped"
    sent = submit(job_file(tmp_path, place, 1_000_000), plan_file(tmp_path, 1), place, "--yes", "--run-dir", folder)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    _until(lambda: (folder / "metrics.jsonl").exists())
    assert slipstream("stop", folder, cwd=place).returncode == 0
    _until(lambda: cloud.jobs[0]["machines"][0].poll() is not None)
    assert cloud.state(cloud.jobs[0]) == "SUCCEEDED", "else SkyPilot would start it again"
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("stopped", "interrupted")
    assert any((folder / "checkpoints").iterdir())
    assert slipstream("stop", folder, cwd=place).returncode == 2


def _until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_nothing_is_rented_before_somebody_agrees(cloud: Server, place: Path, tmp_path: Path) -> None:
    job, plan = job_file(tmp_path, place), plan_file(tmp_path, 1)
    folder = place / "asked"
    unasked = submit(job, plan, place, "--run-dir", folder)
    assert unasked.returncode == 2 and "add --yes" in unasked.stderr and "an hour" in unasked.stdout
    code, said = _at_a_terminal(
        "n\n", "submit", job, "--on", "skypilot", "--plan", plan, "--run-dir", folder, cwd=place
    )
    assert code == 2 and "an hour" in said and "nothing was rented" in said
    assert not cloud.jobs and not folder.exists()
    code, said = _at_a_terminal(
        "y\n", "submit", job, "--on", "skypilot", "--plan", plan, "--run-dir", folder, cwd=place
    )
    assert code == 0 and len(cloud.jobs) == 1, said


def _at_a_terminal(answer: str, *words: str | Path, cwd: Path) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    try:
        command = [SLIPSTREAM, *map(str, words)]
        os.write(ours, answer.encode())
        done = subprocess.run(
            command, cwd=cwd, env=environment(), stdin=theirs, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr
    finally:
        os.close(ours)
        os.close(theirs)


def refused(job: Path, plan: Path, place: Path, *words: str | Path, code: int = 8) -> str:
    """What is said where it cannot be, with nothing left."""
    folder = place / "refused"
    done = submit(job, plan, place, "--yes", "--run-dir", folder, *words)
    assert done.returncode == code, done.stdout + done.stderr
    assert not folder.exists()
    return done.stderr


def test_what_stands_in_the_way_is_said(
    cloud: Server, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, plan = job_file(tmp_path, place), plan_file(tmp_path)
    unplanned = slipstream("submit", job, "--on", "skypilot", "--yes", cwd=place)
    assert unplanned.returncode == 8 and "--plan plan.yaml" in unplanned.stderr
    runpod = plan_file(
        tmp_path, 2, "runpod.yaml", cloud="runpod", machine="1x_A100-80GB_SECURE", region="JP", spot=True
    )
    assert "multi-node" in refused(job, runpod, place)
    values = yaml.safe_load(plan.read_text())
    wrong = write_job(tmp_path, {**values, "offer": {**values["offer"], "machine": "g4dn.xlarg"}}, "wrong.yaml")
    assert "did you mean 'g4dn.xlarge'" in refused(job, wrong, place, code=2)
    cloud.enabled = False
    begun = time.monotonic()
    assert "SkyPilot has no access to aws; `sky check aws`" in refused(job, plan, place)
    assert not cloud.jobs
    answered = time.monotonic() - begun  # what it takes now with a server that answers at once
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", "http://127.0.0.1:9")
    begun = time.monotonic()
    assert "http://127.0.0.1:9" in refused(job, plan, place)
    assert time.monotonic() - begun - answered < 10


@pytest.mark.parametrize(
    ("settings", "cloud", "said"),
    [
        ({}, "hyperstack", "SkyPilot rents nothing from hyperstack"),
        ({"shared": None}, "aws", "machines.skypilot.shared to a folder"),
        ({"shared": "/elsewhere"}, "aws", "is not below machines.skypilot.shared"),
        ({"image": None}, "aws", "set machines.skypilot.image"),
        ({"secrets": ["NO_SUCH_KEY"]}, "aws", "NO_SUCH_KEY"),
    ],
)
def test_what_is_missing_is_said_before_skypilot_is_asked(
    settings: dict[str, Any], cloud: str, said: str, tmp_path: Path
) -> None:
    section = {"image": "registry/slipstream:1", "shared": str(tmp_path), **settings}
    machines = Machines.model_validate({"skypilot": section})
    order = Order(tmp_path / "runs" / "x-1", 1, 4, 1, machines, offer={"cloud": cloud, "machine": "m", "region": "r"})
    with pytest.raises(FleetError, match=re.escape(said)):
        SkyPilotFleet(machines).validate(order)


def test_without_skypilot(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sky.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "pip install 'slipstream[skypilot]'" in refused(job_file(tmp_path, place), plan_file(tmp_path), place)


def test_capacity_is_what_can_be_rented(place: Path) -> None:
    done = slipstream("capacity", "--on", "skypilot", cwd=place)
    assert done.returncode == 8 and "`slipstream offers`" in done.stderr
