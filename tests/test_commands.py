"""The commands as a person and a script use them."""

import compileall
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import merge, mlp_job
from pool import Pool
from program import slipstream, start, write_job
from slipstream.job import dump, load_job
from slipstream.runs import RunFolder

FILES = {"job.yaml", "plan.yaml", "metrics.jsonl", "events.jsonl", "result.json", "curve.png", "checkpoints", "export"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run made by `slipstream train`, in a folder of its own."""
    folder = tmp_path_factory.mktemp("trained")
    job = write_job(folder, merge(dump(mlp_job()), {"train.precision": "fp32"}))
    done = slipstream("train", job, "--workers", 2, "--set", "train.steps=12", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "printed.json").write_text(done.stdout)
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_its_whole_record(trained):
    run = trained / "runs/mlp-1"
    assert {path.name for path in run.iterdir()} >= FILES
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 13))
    assert all(
        {"step", "samples", "loss", "lr", "tokens_per_s", "seconds", "data_wait"} <= set(line) for line in metrics
    )
    assert [event["event"] for event in lines(run / "events.jsonl")] == ["launch", "build", "finished"]
    assert load_job(run / "job.yaml").train.steps == 12
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_train_json_prints_the_result(trained):
    printed = json.loads((trained / "printed.json").read_text())
    assert printed == json.loads((trained / "runs/mlp-1/result.json").read_text())
    assert printed["status"] == "finished" and printed["workers"] == 2 and printed["step"] == 12


def test_runs_and_show(trained):
    listed = json.loads(slipstream("runs", "--json", cwd=trained).stdout)
    assert [(row["run"], row["status"], row["step"]) for row in listed] == [("runs/mlp-1", "finished", 12)]
    assert "mlp-1" in slipstream("runs", cwd=trained).stdout
    shown = slipstream("show", "mlp-1", cwd=trained)
    assert "finished" in shown.stdout and "validation" in shown.stdout, shown.stderr
    detail = json.loads(slipstream("show", "runs/mlp-1", "--json", cwd=trained).stdout)
    assert detail["plan"]["layout"]["replicate"] == 2 and detail["result"]["step"] == 12


def test_the_package_is_the_program_too(tmp_path):
    words = [sys.executable, "-m", "slipstream", "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "verify" in done.stdout


def test_show_of_nothing(tmp_path):
    done = slipstream("show", "nothing", cwd=tmp_path)
    assert done.returncode == 2 and "holds no run" in done.stderr and "Traceback" not in done.stderr


def test_doctor(tmp_path):
    found = json.loads(slipstream("doctor", "--json", cwd=tmp_path).stdout)
    assert found["problems"] == [] and found["workers"] >= 1 and found["torch"].startswith("2.")
    assert "all is well" in slipstream("doctor", cwd=tmp_path).stdout


def test_init_writes_a_job_that_loads(tmp_path):
    listed = slipstream("init", cwd=tmp_path).stdout
    for task in ("next-token", "masked-token", "classification", "regression", "own-model"):
        assert task in listed
        done = slipstream("init", task, cwd=tmp_path)
        assert done.returncode == 0 and (tmp_path / f"{task}.yaml").exists(), done.stderr
        assert "#" in (tmp_path / f"{task}.yaml").read_text()
        load_job(tmp_path / f"{task}.yaml")
    again = slipstream("init", "regression", cwd=tmp_path)
    assert again.returncode == 2 and "exists already" in again.stderr
    wrong = slipstream("init", "regresion", cwd=tmp_path)
    assert wrong.returncode == 2 and "did you mean 'regression'" in wrong.stderr


def test_import_is_quick_and_loads_no_torch():
    code = "import sys, slipstream; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_worker_does_not_load_torchs_compiler():
    """It would add a second to every start (benchmarks/startup.py)."""
    code = """
import sys, torch
from slipstream.job.train import AdamW, Nesterov
from slipstream.train import loop
from slipstream.train.optim import build_optimizer, step
from slipstream.train.optim.trust import plain_norm
for setting in (AdamW(name="adamw", lr=1e-3), Nesterov(name="nesterov", lr=1e-3)):
    model = torch.nn.Linear(3, 3)
    optimizer = build_optimizer(setting, list(model.parameters()), plain_norm)
    before = model.weight.clone()
    model(torch.ones(2, 3)).sum().backward()
    step(optimizer)
    optimizer.zero_grad()
    assert not torch.equal(model.weight, before)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_launcher_loads_no_torch_without_a_gpu():
    code = "import sys, slipstream.cli, slipstream.api, slipstream.cli.watching; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_more_workers_than_samples_is_refused_and_nothing_written(tmp_path):
    job = write_job(tmp_path, merge(dump(mlp_job()), {"train.batch": 2}))
    done = slipstream("train", job, "--workers", 3, cwd=tmp_path)
    assert done.returncode == 2 and "3 workers cannot share a batch of 2" in done.stderr, done.stderr
    line = job.read_text().splitlines().index("  batch: 2") + 1
    assert f"job.yaml:{line}: " in done.stderr.replace("\n", " "), "the file and the line of the key it names"
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_what_only_model_and_data_together_show_is_refused_and_nothing_written(tmp_path):
    job = write_job(tmp_path, merge(dump(mlp_job()), {"model": {"import": "faults:Faulty", "args": {"speed": 3}}}))
    done = slipstream("train", job, cwd=tmp_path)
    assert done.returncode == 2 and "model.import" in done.stderr and "speed" in done.stderr, done.stderr
    assert "job.yaml:" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == [job]


def long_job(folder: Path, **changes: Any) -> Path:
    slow = {"model": {"import": "faults:SlowRegression", "args": {"seconds": 0.02}}, "train.steps": 3000}
    return write_job(folder, merge(dump(mlp_job(**slow)), changes))


def test_control_c_saves_stops_and_resume_goes_on(tmp_path):
    program = start("train", long_job(tmp_path), "--run-dir", "run", cwd=tmp_path)
    metrics = tmp_path / "run/metrics.jsonl"
    while not metrics.exists() and program.poll() is None:
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    output = program.communicate(timeout=30)[0]
    assert program.returncode == 130 and "with a checkpoint" in output and "slipstream resume" in output, output
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "stopped" and result["reason"] == "interrupted"
    assert (tmp_path / f"run/checkpoints/step-{result['step']:08d}/manifest.json").exists()
    shown = json.loads(slipstream("show", "run", "--json", cwd=tmp_path).stdout)
    assert shown["status"] == "stopped" and shown["step"] == result["step"]


@pytest.mark.parametrize(
    ("reason", "limits"),
    [
        ("deadline", {"limits": {"deadline": "4s"}}),
        ("budget", {"limits": {"budget": "$0.004"}, "machines": {"price_per_hour": "$3.60"}}),  # $0.001 a second
    ],
)
def test_a_limit_stops_the_run_with_a_checkpoint(reason, limits, tmp_path):
    done = slipstream("train", long_job(tmp_path, **limits), "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 6, done.stdout + done.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["reason"]) == ("stopped", reason)
    assert (result["cost"] is not None) == (reason == "budget")
    again = slipstream("resume", "run", cwd=tmp_path)
    assert again.returncode == 2 and f"the {reason} is spent" in again.stderr, again.stderr
    assert f"({reason})" in done.stdout


def test_a_budget_without_a_price_is_refused_where_it_would_be_spent(tmp_path):
    job = write_job(tmp_path, {**dump(mlp_job()), "limits": {"budget": "$5"}})
    done = slipstream("train", job, cwd=tmp_path)
    assert done.returncode == 2 and "limits.budget has no effect on this machine" in done.stderr, done.stderr
    assert "job.yaml:" in done.stderr and not (tmp_path / "runs").exists()


def test_two_launchers_cannot_have_one_run(pool: Pool, tmp_path):
    pool.train(mlp_job(), tmp_path / "run", 1)
    (tmp_path / "run/result.json").unlink()
    import os

    run = RunFolder.open(tmp_path / "run")
    held = run.lock()
    assert run.is_running
    with pytest.raises(ValueError, match="being run by another process"):
        run.lock(patience=600)  # whose holder lives: no need to wait
    os.truncate(held, 0)
    os.pwrite(held, b"999999999", 0)
    with pytest.raises(ValueError, match="being run by another process"):
        run.lock(patience=0.2)  # whose launcher is gone, and something it started is not
    os.close(held)
    assert not run.is_running


def test_python_door(tmp_path):
    import slipstream as product
    import slipstream.train.loop  # the folder of the same name must not hide the function

    result = product.train(dump(mlp_job(**{"train.steps": 5})), workers=1, run_dir=tmp_path / "run")
    assert result.status == "finished" and result.step == 5 and result.val_loss is not None
    with pytest.raises(product.JobError, match="did you mean 'layers'"):
        product.train({**dump(mlp_job()), "model": {"kind": "decoder", "layrs": 3}})
    with pytest.raises(ValueError, match="is finished"):
        product.resume(tmp_path / "run")


def test_a_refused_job_touches_nothing_that_was_there(tmp_path):
    """Not even when the folder named for the run is one with things in it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    job = write_job(tmp_path, merge(dump(mlp_job()), {"model": {"import": "faults:Faulty", "args": {"speed": 3}}}))
    done = slipstream("train", job, "--run-dir", "mine", cwd=tmp_path)
    assert done.returncode == 2 and "is not empty" in done.stderr, done.stderr
    assert (tmp_path / "mine/thesis.txt").read_text() == "precious"


def test_a_torn_line_in_the_diary_is_mended(trained, tmp_path):
    import shutil

    shutil.copytree(trained / "runs/mlp-1", tmp_path / "run")
    with (tmp_path / "run/events.jsonl").open("a") as events:
        events.write('{"time": 1, "ev')
    (tmp_path / "run/result.json").unlink()
    assert slipstream("resume", "run", cwd=tmp_path).returncode == 0
    assert slipstream("show", "run", cwd=tmp_path).returncode == 0


def test_damaged_records_are_named_and_do_not_hide_other_runs(trained, tmp_path):
    import shutil

    shutil.copytree(trained / "runs/mlp-1", tmp_path / "runs/good-1")
    shutil.copytree(trained / "runs/mlp-1", tmp_path / "runs/bad-1")
    (tmp_path / "runs/bad-1/metrics.jsonl").write_text("garbage\n")
    listed = json.loads(slipstream("runs", "--json", cwd=tmp_path).stdout)
    assert {row["run"]: row["status"] for row in listed} == {"runs/good-1": "finished", "runs/bad-1": "damaged"}
    shown = slipstream("show", "bad-1", cwd=tmp_path)
    assert shown.returncode == 2 and "metrics.jsonl:1 is damaged" in shown.stderr, shown.stderr


def test_time_is_counted_over_launches_and_not_between_them(tmp_path):
    import os

    from slipstream.runs import append_line

    run = RunFolder(tmp_path)
    append_line(run.events, {"time": 1000.0, "event": "launch", "spent": 0.0})
    append_line(run.events, {"time": 1002.0, "event": "build"})
    run.metrics.write_text("")
    os.utime(run.metrics, (1030.0, 1030.0))
    assert run.seconds_spent() == 30.0, "killed without a word, but steps were written until then"
    append_line(run.events, {"time": 90000.0, "event": "launch", "spent": 30.0})
    append_line(run.events, {"time": 90005.0, "event": "finished"})
    assert run.seconds_spent() == 35.0


def test_control_c_while_starting_is_no_failure(tmp_path):
    program = start("train", long_job(tmp_path), "--run-dir", "run", cwd=tmp_path)
    while not (tmp_path / "run/plan.yaml").exists() and program.poll() is None:
        time.sleep(0.01)
    time.sleep(0.4)
    program.send_signal(signal.SIGINT)
    output = program.communicate(timeout=30)[0]
    assert program.returncode == 130 and "failed" not in output, output


@pytest.mark.parametrize("shipped", [False, True])
def test_bytecode_is_kept_in_the_cache_where_torch_has_none(tmp_path, shipped):
    """As in a container image that forbids Python to write it."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    if shipped:
        compileall.compile_dir(package, quiet=1)
    program = (
        "from slipstream.runs.cache import bytecode_environment, keep_bytecode\n"
        "keep_bytecode()\n"
        "import torch\n"
        "print(bytecode_environment().get('PYTHONPYCACHEPREFIX'))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SLIPSTREAM_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    kept = list((tmp_path / "cache").rglob("torch/__init__.*.pyc"))
    if shipped:
        assert done.stdout == "None\n" and not kept
    else:
        assert (
            done.stdout == f"{tmp_path}/cache/bytecode\n" and len(kept) == 1 and not (package / "__pycache__").exists()
        )
