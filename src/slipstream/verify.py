"""Verify a layout: a shrunken copy of a job, trained on one worker and on the layout, must give the same model."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.api import LateRefusal, train
from slipstream.job import Job, JobError, dump
from slipstream.job.models import DecoderModel
from slipstream.plan import Layout, make_plan, this_machine
from slipstream.runs import RunFolder, read_lines

STEPS = 10
TOLERANCE = 1e-8


@dataclass(frozen=True)
class Verdict:
    """How far a layout is from one worker: the largest relative differences."""

    layout: str
    workers: int
    steps: int
    loss: float
    grad_norm: float
    weights: float

    @property
    def passed(self) -> bool:
        """Whether only rounding is left."""
        return max(self.loss, self.grad_norm, self.weights) < TOLERANCE


def verify(job: Job) -> Verdict:
    """Train a shrunken copy of the job in fp64, on one worker and on the job's layout, and compare."""
    try:
        layout = make_plan(job, this_machine()).layout
    except ValueError as error:
        raise LateRefusal(job, str(error)) from error
    if layout.workers == 1:
        raise LateRefusal(job, "there is nothing to verify on one worker; name a layout: --layout shard=2")
    small = shrink(job, layout)
    folder = tempfile.mkdtemp(prefix="slipstream-verify-")  # it stays if a run fails, whose report names its logs
    one, many = Path(folder, "one"), Path(folder, "many")
    try:
        train(_on(small, {"micro_batch": None}), workers=1, run_dir=one)
        train(_on(small, _choices(layout)), workers=layout.workers, run_dir=many)
    except JobError:
        shutil.rmtree(folder)
        raise
    curves = list(read_lines(RunFolder(one).metrics)), list(read_lines(RunFolder(many).metrics))
    verdict = Verdict(
        layout=str(layout),
        workers=layout.workers,
        steps=STEPS,
        loss=_farthest("loss", *curves),
        grad_norm=_farthest("grad_norm", *curves),
        weights=_farthest_weight(one, many),
    )
    shutil.rmtree(folder)
    return verdict


def shrink(job: Job, layout: Layout) -> Job:
    """The same job in small: few steps, a small batch, and for a decoder few and narrow layers."""
    values = dump(job)
    batch = layout.data * 2 * layout.pipeline
    train = dict.fromkeys(("tokens", "samples", "epochs", "ramp", "scale_lr", "sample")) | {
        "steps": STEPS,
        "batch": batch,
        "precision": "fp64",
        "evaluate": {"every": STEPS, "samples": batch, "batch": batch}
        if job.data.validation
        else values["train"]["evaluate"],
        "clip": values["train"]["clip"] or {"norm": 1.0},
    }
    values["train"] = {**values["train"], **train}
    values["checkpoint"] = {"every": STEPS, "keep": 1}
    # It is the layout that is verified: codecs and local steps are not those of one worker in any.
    values["exchange"] = {key: values["exchange"][key] for key in ("bucket", "algorithm") if key in values["exchange"]}
    values["limits"] = {}
    values["machines"] = {"device": job.machines.device}
    if isinstance(job.model, DecoderModel):
        values["model"] = {**values["model"], **_small_decoder(job.model, layout)}
        tokens = 2 * layout.context * layout.tensor
        values["data"]["sequence"] = min(job.sequence, -(-32 // tokens) * tokens)
    return Job.model_validate({key: value for key, value in values.items() if key != "layout"})


def _small_decoder(model: DecoderModel, layout: Layout) -> dict[str, Any]:
    kv_heads = layout.tensor
    heads = kv_heads * min(2, model.heads // (model.kv_heads or model.heads))
    return {
        "preset": None,
        "layers": max(layout.stages, min(model.layers, 2)),
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": heads * 8,
        "feed_forward": heads * 16,
    }


def _choices(layout: Layout) -> dict[str, Any]:
    """The layout as a job writes it, its micro-batches left to the small batch."""
    return {name: value for name, value in layout.choices.items() if name != "micro_batch"}


def _on(job: Job, layout: dict[str, Any]) -> Job:
    return Job.model_validate({**dump(job), "layout": layout})


def _farthest(key: str, one: list[dict[str, Any]], many: list[dict[str, Any]]) -> float:
    return float(max(abs(a[key] - b[key]) / max(abs(a[key]), 1e-12) for a, b in zip(one, many, strict=True)))


def _farthest_weight(one: Path, many: Path) -> float:
    from safetensors.torch import load_file

    whole, split = (load_file(run / "export" / "model.safetensors") for run in (one, many))
    return max(
        float((whole[name].double() - split[name].double()).norm() / whole[name].double().norm().clamp(min=1e-6))
        for name in whole
    )
