"""What the tests of layouts share: the job, its layouts as text, and how far two runs are apart."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from jobs import decoder_job
from pool import Pool
from slipstream.job import Job
from slipstream.plan import Layout

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model.kv_heads": 2, "model.tied": False},
    "gpt2": {
        "model.positions": "learned", "model.norm": "layer", "model.activation": "gelu", "model.bias": True,
        "model.kv_heads": None, "model.tied": True,
    },
}  # fmt: skip


def read_layout(text: str) -> dict[str, Any]:
    pairs = (pair.split("=") for pair in text.split(","))
    return {key: int(value) if value.isdigit() else value for key, value in pairs}


def workers(layout: dict[str, Any]) -> int:
    return Layout.model_validate({"micro_batch": 1, **layout}).workers


def job_of(family: str, documents: Path, **changes: Any) -> Job:
    base: dict[str, Any] = {
        "model.layers": 4,
        "train.steps": 20,
        "train.batch": 8,
        "train.clip": {"norm": 0.5},
        "train.optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "train.evaluate": {"every": 20, "samples": 8, "batch": 8},
        "checkpoint": {"every": 20, "keep": 1},
    }
    return decoder_job(documents, **(base | FAMILIES[family] | changes))


def deviation(
    run: Path, reference: Path, keys: tuple[str, ...] = ("loss", "grad_norm", "val_loss"), weights: bool = True
) -> float:
    """The largest relative difference of these figures and of the final weights."""
    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run, reference)
    )
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    curve = max(
        abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, theirs, strict=True) for key in keys if key in b
    )
    return max(curve, _apart(run, reference)) if weights else curve


def _apart(run: Path, reference: Path) -> float:
    mine, whole = (load_file(folder / "export/model.safetensors") for folder in (run, reference))
    assert mine.keys() == whole.keys()
    return max(
        float((mine[name] - whole[name]).double().norm() / whole[name].double().norm().clamp(min=1e-3))
        for name in whole
    )


def reference(name: str, job: Job, pool: Pool, folder: Path, known: dict[str, Path]) -> Path:
    """The run of one worker, trained once per test session."""
    if name not in known:
        known[name] = folder / f"reference-{name}"
        lines = pool.train(job, known[name], 1)
        assert lines[-1]["loss"] < lines[0]["loss"], "it must learn, or equality would say little"
        assert job.train.clip and job.train.clip.norm
        assert any(line["grad_norm"] > job.train.clip.norm for line in lines), "it must clip"
    return known[name]
