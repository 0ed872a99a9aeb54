"""One curve: the loss is a function of the job and its seed, never of how many workers ran it or how often it died."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jobs import decoder_job, mlp_job, resnet_job
from pool import Pool, forget_after
from slipstream.job import Job


def assert_same_curve(curve: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float) -> None:
    assert [line["step"] for line in curve] == [line["step"] for line in reference]
    assert [line["samples"] for line in curve] == [line["samples"] for line in reference]
    for key in ("loss", "lr", "val_loss", "grad_norm"):
        values = [line[key] for line in curve if key in line]
        expected = [line[key] for line in reference if key in line]
        assert values == pytest.approx(expected, rel=tolerance, abs=0), key


def reference(name: str, job: Job, pool: Pool, folder: Path, known: dict[str, Any]) -> list[dict[str, Any]]:
    """The curve of one worker with one micro-batch, trained once per test session."""
    if name not in known:
        known[name] = pool.train(job, folder / f"reference-{name}", workers=1)
        first, last = known[name][0], known[name][-1]
        assert last["loss"] < first["loss"], "it must learn, or equality would say little"
    return known[name]


def build(name: str, documents: Path, **changes: Any) -> Job:
    if name == "decoder":
        return decoder_job(documents, **changes)
    return {"resnet": resnet_job, "mlp": mlp_job}[name](**changes)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [None, 1, 2])
@pytest.mark.parametrize("name", ["decoder", "mlp"])
def test_in_fp64_any_workers_and_micro_batch(name, workers, micro_batch, pool, documents, tmp_path, references):
    expected = reference(name, build(name, documents), pool, tmp_path, references)
    job = build(name, documents, **({"layout.micro_batch": micro_batch} if micro_batch else {}))
    curve = pool.train(job, tmp_path / "run", workers)
    assert len(curve) == 30
    assert_same_curve(curve, expected, 1e-9)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_in_fp64_resnet_with_synchronised_batch_norm(workers, pool, tmp_path, references):
    expected = reference("resnet", resnet_job(), pool, tmp_path, references)
    assert_same_curve(pool.train(resnet_job(), tmp_path / "run", workers), expected, 1e-9)


def test_in_fp64_resnet_with_group_norm_in_micro_batches(pool, tmp_path):
    job = resnet_job(**{"model.norm": "group", "model.width": 8})
    split = resnet_job(**{"model.norm": "group", "model.width": 8, "layout.micro_batch": 2})
    expected = pool.train(job, tmp_path / "whole", 1)
    assert_same_curve(pool.train(split, tmp_path / "split", 3), expected, 1e-9)


# A batch norm over few values, and large steps, amplify rounding without bound: hence the larger batch for the resnet.
FP32 = {
    "decoder": ({}, {"sgd": 0.02, "adamw": 1e-3}),
    "mlp": ({}, {"sgd": 0.02, "adamw": 1e-3}),
    "resnet": ({"model.width": 8, "train.batch": 64}, {"sgd": 0.01, "adamw": 3e-4}),
}


@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 1e-5), ("adamw", 1e-4)])
@pytest.mark.parametrize("name", FP32)
def test_in_fp32(name, optimizer, tolerance, pool, documents, tmp_path):
    setting, rates = FP32[name]
    changes = {**setting, "train.precision": "fp32", "train.optimizer": {"name": optimizer, "lr": rates[optimizer]}}
    expected = pool.train(build(name, documents, **changes), tmp_path / "one", 1)
    # Batch norm meets forty times a step: on few cores that is slow.
    for workers in ({"sgd": 3, "adamw": 2}[optimizer],) if name == "resnet" else (2, 3, 4):
        curve = pool.train(build(name, documents, **changes), tmp_path / f"{workers}", workers)
        assert_same_curve(curve, expected, tolerance)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "lars", "lamb"])
def test_in_fp64_every_optimizer_with_ramp_and_rate_rule(optimizer, pool, tmp_path):
    job = mlp_job(
        **{
            "train.optimizer": {"name": optimizer, "lr": 1e-3},
            "train.steps": None,
            "train.samples": 300,
            "train.ramp": {"start": 4, "over": "50%"},
            "train.scale_lr": {"rule": "sqrt", "base_batch": 8},
        }
    )
    expected = pool.train(job, tmp_path / "one", 1)
    assert len({line["samples"] - before["samples"] for before, line in pairwise(expected)}) > 2
    assert_same_curve(pool.train(job, tmp_path / "three", 3), expected, 1e-9)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_resume_is_bit_for_bit_on_the_same_layout(workers, pool, documents, tmp_path):
    """Forget everything after step 20, as a crash would, and go on."""
    changes = {"train.precision": "fp32"}
    whole = pool.train(decoder_job(documents, **changes), tmp_path / "run", workers)
    forget_after(tmp_path / "run", 20)
    resumed = pool.resume(tmp_path / "run", workers)
    assert [exact(line) for line in resumed] == [exact(line) for line in whole]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 4)])
def test_resume_on_another_number_of_workers(before, after, pool, documents, tmp_path, references):
    expected = reference("decoder", decoder_job(documents), pool, tmp_path, references)
    pool.train(decoder_job(documents), tmp_path / "run", before)
    forget_after(tmp_path / "run", 20)
    assert_same_curve(pool.resume(tmp_path / "run", after), expected, 1e-9)


def exact(line: dict[str, Any]) -> tuple[Any, ...]:
    """What must not change by a bit; time may."""
    return tuple(line.get(key) for key in ("step", "samples", "loss", "lr", "val_loss", "grad_norm"))
