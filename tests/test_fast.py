"""What makes steps quicker or smaller leaves the curve where it was: through the command line, on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import decoder_job, merge, mlp_job, write_documents
from program import slipstream, write_job
from slipstream.job import dump


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    documents = write_documents(tmp_path_factory.mktemp("data") / "documents.jsonl")
    changes = {"model.dropout": 0.0, "train.precision": "fp32", "train.steps": 12, "layout.replicate": 1}
    return dump(decoder_job(documents, **changes))


def curve(values: dict[str, Any], folder: Path, *words: str) -> list[dict[str, Any]]:
    done = slipstream("train", write_job(folder, values), "--run-dir", "run", *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    return lines


@pytest.fixture(scope="module")
def plain(job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return curve(job, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({"train.compile": True}, 1e-5),
        ({"train.optimizer.state": "bf16"}, 2e-3),
        ({"train.precision": "fp8"}, 2e-2),
        ({"train.precision": "fp8", "layout": {"tensor": 2}}, 2e-2),
        ({"train.precision": "fp8-rows"}, 2e-2),
        ({"train.precision": "int8"}, 2e-2),
    ],
    ids=["compiled", "narrow state", "fp8", "fp8 on two workers", "fp8 by rows", "int8"],
)
def test_the_curve_stays(job, plain, changes, within, tmp_path):
    lines = curve(merge(job, changes), tmp_path)
    for ours, theirs in zip(lines, plain, strict=True):
        for key in ("loss", "val_loss"):
            assert ours.get(key) == (pytest.approx(theirs[key], rel=within) if key in theirs else None)


def test_a_run_that_reads_late_stops_and_goes_on_to_the_bit(job, tmp_path):
    """With its state in bf16 a run is read one step behind, as on a GPU."""
    values = merge(job, {"train.optimizer.state": "bf16", "checkpoint.every": 5})
    (tmp_path / "whole").mkdir()
    whole = curve(values, tmp_path / "whole")
    limits = {"limits.budget": "$0.0001", "machines.price_per_hour": "$3600"}
    path = write_job(tmp_path, merge(values, limits))
    stopped = slipstream("train", path, "--run-dir", "run", cwd=tmp_path)
    assert stopped.returncode == 6, stopped.stdout + stopped.stderr
    saved = tmp_path / "run/job.yaml"
    saved.write_text(saved.read_text().replace("budget: 0.0001", "budget: 1000.0"))
    done = slipstream("resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for key in ("step", "loss", "grad_norm"):
        assert [line[key] for line in lines] == [line[key] for line in whole]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.compile": True, "layout": {"tensor": 2}}, "train.compile: with layout.tensor"),
        ({"train.compile": True, "model.dropout": 0.1}, "train.compile: dropout whose masks belong to samples"),
        ({"train.precision": "int8", "model.layers": 1}, "leaves the first block in bf16"),
        ({"train.precision": "fp8", "model.hidden": 72}, "multiples of 16, and model.hidden is 72"),
    ],
)
def test_what_cannot_be_is_refused(job, changes, words, tmp_path):
    done = slipstream("train", write_job(tmp_path, merge(job, changes)), cwd=tmp_path)
    assert done.returncode == 2 and words in " ".join(done.stderr.split()), done.stderr


def test_fp8_is_for_decoders(tmp_path):
    done = slipstream("train", write_job(tmp_path, merge(dump(mlp_job()), {"train.precision": "fp8"})), cwd=tmp_path)
    assert done.returncode == 2 and "train.precision fp8" in done.stderr
