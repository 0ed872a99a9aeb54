"""Nothing silent: when something goes wrong, the run ends soon and says where, what and what to do."""

from pathlib import Path
from typing import Any

import pytest

from jobs import merge
from program import slipstream, write_job
from slipstream.fleet.failure import Failure, first_cause

BASE: dict[str, Any] = {
    "name": "faulty",
    "model": {"import": "faults:Faulty", "args": {}},
    "data": {"import": "faults:Numbers", "args": {}},
    "train": {"task": "regression", "steps": 400, "batch": 8, "optimizer": {"name": "sgd", "lr": 0.01}},
    "layout": {"replicate": 2},
    "checkpoint": {"every": 3},
}


def run_faulty(folder: Path, **changes: Any) -> tuple[int, str]:
    job = write_job(folder, merge(BASE, changes))
    done = slipstream("train", job, "--run-dir", "run", cwd=folder)
    return done.returncode, done.stdout + done.stderr


CASES: list[tuple[str, str, int, list[str]]] = [
    ("raise", "forward", 3, ["KeyError", "the model lost its way", "faults.py"]),
    ("backward", "backward", 3, ["ArithmeticError", "backward lost its way"]),
    ("memory", "forward", 3, ["out of memory", "layout.micro_batch"]),
    ("kill", "forward", 3, ["signal 9 (SIGKILL)", "slipstream resume"]),
    ("exit", "forward", 3, ["exit code 7"]),
    ("nan", "update", 5, ["NonFiniteLoss", "samples", "on_nonfinite"]),
]


@pytest.mark.parametrize(("fault", "phase", "code", "words"), CASES, ids=[case[0] for case in CASES])
def test_a_worker_that_fails_ends_the_run_with_a_report(fault, phase, code, words, tmp_path):
    returned, text = run_faulty(tmp_path, **{"model.args": {"fault": fault, "rank": 1, "at": 5}})
    assert returned == code, text
    last = text.strip().splitlines()[-3:]
    assert any(f"rank 1 failed at step 5 in {phase}" in line for line in last), text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("exchange", [{"kind": "local", "every": 4, "overlap": 2}, {"codec": "int8"}], ids=str)
def test_a_worker_that_dies_ends_the_run_with_any_exchange(exchange, tmp_path):
    args = {"fault": "kill", "rank": 1, "at": 6, "width": 512}
    changes = {"model.args": args, "train.steps": 50, "limits": {"step": "30s"}, "exchange": exchange}
    code, text = run_faulty(tmp_path, **changes)
    assert code == 3 and "rank 1 failed at step 6 in forward" in text and "signal 9 (SIGKILL)" in text, text


def test_an_operation_without_a_fixed_order_is_refused_where_one_is_asked_for(tmp_path):
    fault = {"model.args": {"fault": "unordered", "rank": 0, "at": 2}, "train.steps": 3}
    (tmp_path / "any").mkdir()
    returned, text = run_faulty(tmp_path / "any", **fault)
    assert returned == 0, text
    returned, text = run_faulty(tmp_path, **fault, **{"train.deterministic": True})
    assert returned == 3 and "put_" in text and "train.deterministic" in text


def test_a_failure_ends_all_ranks_within_ten_seconds(tmp_path):
    run_faulty(tmp_path, **{"model.args": {"fault": "raise", "rank": 1, "at": 5}})
    import json

    last_step = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime
    failure = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()][-1]
    assert failure["event"] == "failure" and failure["rank"] == 1 and failure["step"] == 5
    assert failure["time"] - last_step < 10


def test_a_sample_that_cannot_be_read_is_named(tmp_path):
    code, text = run_faulty(tmp_path, **{"data.args": {"bad": 11}})
    assert code == 3 and "in data: OSError: sample 11 cannot be read" in text, text


def test_a_shape_mismatch_has_a_hint(tmp_path):
    code, text = run_faulty(tmp_path, **{"model.args": {"outputs": 3}})
    assert code == 3 and "shape mismatch" in text and "compare model and data" in text, text


@pytest.mark.parametrize("fault", ["hang", "hang-in-c"])
def test_a_worker_that_hangs_is_found_and_every_stack_is_shown(fault, tmp_path):
    changes = {"model.args": {"fault": fault, "rank": 0, "at": 5}, "limits": {"step": "10s", "first_step": "60s"}}
    code, text = run_faulty(tmp_path, **changes)
    assert code == 4, text
    assert "rank 0 failed at step 5 in forward: hanging" in text, text
    assert "_go_wrong" in text and "--- rank 1 was here ---" in text and "limits.step" in text, text


def test_the_first_step_has_a_limit_of_its_own(tmp_path):
    changes = {"model.args": {"fault": "hang", "rank": 1, "at": 1}, "limits": {"step": "2s", "first_step": "15s"}}
    code, text = run_faulty(tmp_path, **changes)
    assert code == 4 and "rank 1 failed at step 1 in forward: hanging" in text, text


def test_nonfinite_skip_leaves_the_update_out_and_counts_it(tmp_path):
    import json

    changes = {"model.args": {"fault": "nan", "rank": 1, "at": 5}, "train.on_nonfinite": "skip", "train.steps": 20}
    code, text = run_faulty(tmp_path, **changes)
    assert code == 0, text
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("skipped")] == [5]
    assert lines[4]["loss"] is None and lines[5]["loss"] is not None
    assert json.loads((tmp_path / "run" / "result.json").read_text())["skipped"] == 1


def test_nonfinite_warn_goes_on(tmp_path):
    changes = {"model.args": {"fault": "nan", "rank": 1, "at": 5}, "train.on_nonfinite": "warn", "train.steps": 8}
    code, text = run_faulty(tmp_path, **changes)
    assert code == 0 and "warning: the loss of step 5 is nan" in text, text


OOM = Failure(0, 3, "forward", "killed", "the worker was killed by signal 9 (SIGKILL)")
ABORTED = Failure(1, 3, "exchange", "killed", "the worker was killed by signal 6 (SIGABRT)")
RAISED = Failure(2, 3, "forward", "ValueError", "seven", time=2.0)
LATER = Failure(3, 3, "forward", "ValueError", "eight", time=3.0)
QUIT = Failure(4, 0, "program", "ended", "mine.py ended by itself with exit code 1", time=1.0)
LOST = Failure(5, 3, "exchange", "DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed.")


@pytest.mark.parametrize("first, failures", [
    (OOM, [ABORTED, RAISED, LOST, OOM]),
    (RAISED, [QUIT, LOST, ABORTED, LATER, RAISED]),
    (QUIT, [LOST, QUIT]),
    (ABORTED, [LOST, ABORTED]),
], ids=lambda found: found.error if isinstance(found, Failure) else "")  # fmt: skip
def test_the_first_cause_is_named(first: Failure, failures: list[Failure]) -> None:
    assert first_cause(failures) == first_cause(failures[::-1]) == first
