"""Layouts through the command line: train, verify, dry run, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import decoder_job, merge, mlp_job, write_documents
from program import slipstream, write_job
from slipstream.api import dry_run
from slipstream.job import dump

BIG: dict[str, Any] = {
    "name": "big",
    "model": {"kind": "decoder", "preset": "llama-405b"},
    "data": {"source": "python-stdlib", "sequence": 8192},
    "train": {"steps": 5, "batch": 2048, "optimizer": {"name": "adamw", "lr": 1e-4}},
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, dump(decoder_job(write_documents(tmp_path / "documents.jsonl"))))


def test_verify_passes_a_layout_that_is_right(job, tmp_path):
    done = slipstream("verify", job, "--layout", "tensor=2,pipeline=2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["passed"] and verdict["workers"] == 4 and max(verdict["loss"], verdict["weights"]) < 1e-8
    assert not (tmp_path / "runs").exists()


def test_verify_fails_one_that_is_not(tmp_path):
    """A model that draws its own random numbers, the same on no two layouts."""
    values = dump(mlp_job()) | {"model": {"import": "faults:Moody"}}
    done = slipstream("verify", write_job(tmp_path, values), "--layout", "shard=2", cwd=tmp_path)
    assert done.returncode == 1 and "fail" in done.stdout, done.stdout + done.stderr


def test_a_dry_run_counts_one_rank_of_many(tmp_path):
    path = write_job(tmp_path, BIG)
    words = ["--layout", "shard=64,tensor=8,micro_batch=1,recompute=full", "--dry-run", "--json"]
    done = slipstream("train", path, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout)
    parameters = 405_853_388_800
    assert held["parameters"] == pytest.approx(4 * parameters / 512, rel=0.001)
    assert held["optimizer"] == 2 * held["parameters"] == 2 * held["gradients"]
    # Full recomputation keeps the stream between blocks, a part of the sequence on each tensor worker, and the scores.
    stream, scores = 126 * 8192 // 8 * 16384 * 2, 8192 * 128256 // 8 * 4
    assert stream + scores < held["activations"] < 1.5 * (stream + scores)
    assert [file.name for file in tmp_path.iterdir()] == ["job.yaml"]


def test_a_dry_run_counts_what_is_offloaded(tmp_path):
    path = write_job(tmp_path, merge(BIG, {"model.preset": "gpt2-124m", "data.sequence": 64, "layout.replicate": 1}))
    held, offloaded = (dry_run(path, settings=settings) for settings in ([], ["layout.offload=optimizer"]))
    assert (offloaded.optimizer, offloaded.offloaded) == (0, held.optimizer)
    assert offloaded.total == held.total - held.optimizer > 0


def test_a_layout_that_does_not_fit_is_refused_with_the_line_and_those_that_do(job, tmp_path):
    done = slipstream("train", job, "--layout", "tensor=3", cwd=tmp_path)
    text = " ".join(done.stderr.split())
    assert done.returncode == 2, text
    assert "--set layout.tensor=3: layout.tensor (3) must divide model.kv_heads (2)" in text
    assert "nearest layouts that fit: " in text and "tensor=2,micro_batch=" in text, text


def test_a_split_run_is_trained_and_exported(job, tmp_path):
    done = slipstream(
        "train", job, "--layout", "shard=2", "--run-dir", "run", "--set", "train.steps=6", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["workers"] == 2 and (tmp_path / "run/export/model.safetensors").exists()
    assert "shard: 2" in (tmp_path / "run/plan.yaml").read_text()


OWN = {
    "name": "own",
    "model": {
        "import": "faults:Tower",
        "split": {
            "before": ["enter"],
            "blocks": "layers",
            "after": ["leave"],
            "tensor": {"layers.*.up": "column", "layers.*.down": "row"},
        },
    },
    "data": {"source": "synthetic", "samples": 64, "inputs": 8},
    "train": {"steps": 3, "batch": 4, "optimizer": {"name": "adamw", "lr": 1e-3}},
}


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"import": "faults:BentTower"}, "pipeline=2", "the model gives other outputs than whole"),
        ({"split": {"before": ["enter"], "blocks": "layers"}}, "pipeline=2", "leave.weight is in none of the modules"),
        ({"split": {"tensor": {"layers.*.up": "column"}}}, "tensor=2", "the model cannot be run"),
    ],
)
def test_a_split_that_changes_the_model_is_refused(changes, layout, words, tmp_path):
    """The curve would be another one, and nobody would know."""
    job = write_job(tmp_path, {**OWN, "model": {**OWN["model"], **changes}})
    done = slipstream("train", job, "--layout", layout, cwd=tmp_path)
    assert done.returncode == 2 and words in " ".join(done.stderr.split()), done.stdout + done.stderr
    assert "model.split" in done.stderr and not (tmp_path / "runs").exists()


def test_a_dry_run_of_any_model(tmp_path):
    job = write_job(tmp_path, OWN)
    last = slipstream("train", job, "--layout", "pipeline=2", "--dry-run", "--rank", "1", "--json", cwd=tmp_path)
    assert json.loads(last.stdout)["activations"] > 0, last.stderr
    shared = {
        how: dry_run(job, settings=["layout.shard=2", f"layout.sharded={how}"])
        for how in ("parameters", "gradients", "optimizer")
    }
    assert shared["parameters"].gathered <= shared["gradients"].gathered and not shared["optimizer"].gathered
    assert shared["gradients"].gathered == pytest.approx(2 * shared["gradients"].parameters, rel=0.01)


@pytest.mark.parametrize("layout", ["tensor", "tensor=2,tensor=4", ",,", ""])
def test_odd_layouts_are_refused(layout, job, tmp_path):
    done = slipstream("train", job, "--layout", layout, cwd=tmp_path)
    assert done.returncode == 2 and "--layout" in done.stderr, done.stderr


def test_a_run_goes_on_with_another_layout(job, tmp_path):
    words = ("train", job, "--layout", "tensor=2", "--run-dir", "run", "--set", "train.steps=6")
    limits = ("--set", "limits.budget=$0.0001", "--set", "machines.price_per_hour=$3600")
    assert slipstream(*words, *limits, cwd=tmp_path).returncode == 6
    path = tmp_path / "run/job.yaml"
    path.write_text(path.read_text().replace("budget: 0.0001", "budget: 1000.0"))
    assert slipstream("resume", "run", "--layout", "tensor=3", cwd=tmp_path).returncode == 2
    done = slipstream("resume", "run", "--layout", "pipeline=2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workers"] == 2 and "pipeline: 2" in path.read_text()
