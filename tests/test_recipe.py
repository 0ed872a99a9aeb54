"""The recipe: schedules, batch rules, optimisers, clipping, precision. Each against what its paper or torch says."""

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from jobs import decoder_job, mlp_job, write_documents
from slipstream.job import Job
from slipstream.job.train import Optimizer, ScaleRate, Schedule
from slipstream.plan import make_plan, this_machine
from slipstream.train.models.dropout import SampleKeys
from slipstream.train.optim import build_optimizer, step
from slipstream.train.optim.offload import Offload
from slipstream.train.optim.schedules import batch_factor, rate
from slipstream.train.optim.trust import plain_norm
from slipstream.train.parallel.split import SplitModel
from slipstream.train.precision import LossScale
from slipstream.train.timeline import Timeline


def schedule(**values: Any) -> Any:
    return TypeAdapter(Schedule).validate_python(values)


def rates(setting: Any, total: int = 1000, batch: int = 10) -> list[float]:
    return [rate(setting, seen, batch, total) for seen in range(0, total, batch)]


def test_constant_with_warmup_rises_and_stays():
    values = rates(schedule(decay="constant", warmup="10%"))
    assert values[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert set(values[10:]) == {1.0}


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_falling_schedules_end_near_the_floor(decay):
    values = rates(schedule(decay=decay, warmup=100, floor="10%"))
    assert max(values) == 1.0 and all(later <= earlier for earlier, later in pairwise(values[10:]))
    assert 0.1 < values[-1] < 0.12
    assert rate(schedule(decay=decay, warmup=100, floor="10%"), 550, 10, 1000) == pytest.approx(0.55)  # half-way


def test_step_falls_in_stairs():
    values = rates(schedule(decay="step", every="25%", factor=0.5))
    assert [values[0], values[25], values[50], values[99]] == [1.0, 0.5, 0.25, 0.125]


def test_warmup_stable_decay_has_its_three_parts():
    values = rates(schedule(decay="warmup-stable-decay", warmup="10%", last=200, floor=0.2))
    assert values[9] == 1.0 and set(values[10:81]) == {1.0}
    assert values[90] == pytest.approx(0.6) and values[-1] == pytest.approx(0.24)


@given(
    st.sampled_from(["constant", "linear", "cosine", "warmup-stable-decay"]), st.integers(1, 64), st.integers(1, 5000)
)
def test_a_rate_is_always_between_zero_and_one(decay, batch, total):
    setting = schedule(decay=decay, warmup="7%")
    assert all(0 <= rate(setting, seen, batch, total) <= 1 for seen in range(0, total, batch))


@given(st.integers(1, 50), st.integers(1, 8), st.integers(2, 3000))
def test_the_rate_follows_samples_and_not_the_batch(small, factor, total):
    """A larger batch sees the same rate at the same sample, once the warm-up is over."""
    setting = schedule(decay="cosine")
    seen = small * factor
    assert rate(setting, seen, small, total) == rate(setting, seen, small * factor, total)


def test_batch_rules():
    assert batch_factor(ScaleRate(rule="linear", base_batch=256), 1024) == 4.0
    assert batch_factor(ScaleRate(rule="sqrt", base_batch=256), 1024) == 2.0
    assert batch_factor(None, 1024) == 1.0


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 8), st.integers(1, 4000))
def test_a_ramp_only_grows_and_covers_the_run(start, more, stairs, samples):
    batch = start + more
    ramp = {"start": start, "over": "50%", "stairs": min(stairs, more)}
    job = mlp_job(**{"train.steps": None, "train.samples": samples, "train.batch": batch, "train.ramp": ramp})
    timeline = Timeline.of(job, 100)
    batches = [end - begin for begin, end in pairwise(timeline.starts)]
    assert batches == sorted(batches) and batches[0] == start and max(batches) <= batch
    assert samples <= timeline.samples < samples + batch


def optimizer(model: torch.nn.Module, **values: Any) -> torch.optim.Optimizer:
    return build_optimizer(TypeAdapter(Optimizer).validate_python(values), list(model.parameters()), plain_norm)


def alone(model: torch.nn.Module, job: Job) -> SplitModel:
    """A model that one worker holds as a whole."""
    keys = SampleKeys()
    return SplitModel(model, job, make_plan(job, this_machine(), 1), 0, torch.device("cpu"), keys, keys.of)


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).double()
    layer.weight.grad, layer.bias.grad = torch.randn(2, 3).double(), torch.randn(2).double()
    return layer


def test_lars_moves_by_the_trust_ratio():
    layer = linear()
    before, gradient = layer.weight.detach().clone(), layer.weight.grad.clone()
    bias, bias_gradient = layer.bias.detach().clone(), layer.bias.grad.clone()
    optimizer(layer, name="lars", lr=0.5, momentum=0.0, weight_decay=0.01, trust=0.1).step()
    ratio = 0.1 * before.norm() / (gradient.norm() + 0.01 * before.norm())
    torch.testing.assert_close(layer.weight.detach(), before - 0.5 * ratio * (gradient + 0.01 * before))
    torch.testing.assert_close(layer.bias.detach(), bias - 0.5 * bias_gradient)  # no decay, no ratio


def test_lamb_first_step_has_the_length_of_the_weight():
    layer = linear()
    before, gradient = layer.weight.detach().clone(), layer.weight.grad.clone()
    optimizer(layer, name="lamb", lr=0.1, weight_decay=0.01, eps=1e-12).step()
    update = gradient.sign() + 0.01 * before  # Adam's first step is the sign
    expected = before - 0.1 * update * before.norm() / update.norm()
    torch.testing.assert_close(layer.weight.detach(), expected)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_tensor_of_zeros_can_leave_zero(name):
    layer = linear()
    torch.nn.init.zeros_(layer.weight)
    optimizer(layer, name=name, lr=0.1).step()
    assert layer.weight.abs().sum() > 0


def test_only_matrices_decay():
    layer = linear()
    layer.weight.grad.zero_()
    layer.bias.grad.zero_()
    before = layer.weight.detach().clone(), layer.bias.detach().clone()
    optimizer(layer, name="adamw", lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(layer.weight.detach(), before[0] * 0.95)
    torch.testing.assert_close(layer.bias.detach(), before[1])


@pytest.mark.parametrize("setting", ["momentum", "adamw", "lars", "lamb"])
def test_offloaded_state_gives_the_same_updates(setting):
    """Here without a GPU to visit: that no weight is left out, updated twice or given another's state."""

    def updated(offloaded: bool) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(2)
        weights = [torch.nn.Parameter(torch.randn(size, 3, generator=draw)) for size in (1, 5, 2, 9, 4)]
        weights.append(torch.nn.Parameter(torch.randn(7, generator=draw)))
        optimizer = build_optimizer(
            TypeAdapter(Optimizer).validate_python({"name": setting, "lr": 0.1}), weights, plain_norm
        )
        advance = Offload(optimizer, step, at_once=60).step if offloaded else partial(step, optimizer)
        for _ in range(4):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=draw)
            advance()
        state = [tensor for weight in weights for tensor in optimizer.state[weight].values() if tensor is not None]
        return [weight.detach() for weight in weights] + state

    for ours, expected in zip(updated(True), updated(False), strict=True):
        assert torch.equal(ours, expected)


def test_a_loss_scale_halves_on_overflow_and_doubles_after_patience():
    scale = LossScale(active=True)
    scale.record(overflowed=True)
    assert scale.value == 2.0**15
    for _ in range(LossScale.PATIENCE):
        scale.record(overflowed=False)
    assert scale.value == 2.0**16
    idle = LossScale(active=False)
    idle.record(overflowed=True)
    assert idle.value == 1.0


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.02)])
def test_low_precision_follows_fp32_and_keeps_fp32_weights(precision, tolerance, pool, tmp_path):
    documents = write_documents(tmp_path / "documents.jsonl")

    def job(which: str) -> Job:
        return decoder_job(documents, **{"train.precision": which, "model.dropout": 0.0})

    low = pool.train(job(precision), tmp_path / "low", 2)
    full = pool.train(job("fp32"), tmp_path / "full", 2)
    assert [line["loss"] for line in low if "skipped" not in line][-1] == pytest.approx(full[-1]["loss"], rel=tolerance)
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "low/export/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_fp16_overflow_skips_the_update_counts_it_and_survives_a_checkpoint(pool, tmp_path):
    """A model whose gradients are so large that 2¹⁶ times them overflow: the scale comes down until they fit."""
    changes = {
        "model": {"import": "faults:Loud", "args": {}},
        "train.precision": "fp16", "train.l1": 0.0, "train.l2": 0.0, "train.optimizer": {"name": "sgd", "lr": 1e-9},
        "checkpoint": {"every": 5, "keep": 9},
    }  # fmt: skip
    lines = pool.train(mlp_job(**changes), tmp_path / "run", 2)
    skipped = [line["step"] for line in lines if line.get("skipped")]
    assert skipped and skipped == list(range(1, len(skipped) + 1)) and len(skipped) < 20
    scales = [line["loss_scale"] for line in lines]
    assert scales[len(skipped)] == 2.0 ** (16 - len(skipped))
    from test_one_curve import exact, forget_after

    forget_after(tmp_path / "run", 5)
    resumed = pool.resume(tmp_path / "run", 2)
    assert [(exact(line), line["loss_scale"]) for line in resumed] == [
        (exact(line), line["loss_scale"]) for line in lines
    ]


def test_clipping_by_value_bounds_each_element():
    from slipstream.train.update import Update

    job = mlp_job(
        **{"train.clip": {"value": 0.001}, "train.optimizer": {"name": "sgd", "lr": 1.0}, "train.l1": 0, "train.l2": 0}
    )
    layer = linear()
    before = layer.weight.detach().clone()
    Update(job.train, alone(layer, job), total=100, fp16=False).apply(0, 10, torch.tensor(1.0), torch.tensor(0.0))
    assert math.isclose((layer.weight.detach() - before).abs().max().item(), 0.001)


def test_l1_and_l2_pull_towards_zero():
    from slipstream.train.update import Update

    job = mlp_job(**{"train.l1": 0.01, "train.l2": 0.1, "train.optimizer": {"name": "sgd", "lr": 1.0}})
    layer = linear()
    layer.weight.grad.zero_()
    before = layer.weight.detach().clone()
    Update(job.train, alone(layer, job), total=100, fp16=False).apply(0, 10, torch.tensor(1.0), torch.tensor(0.0))
    torch.testing.assert_close(layer.weight.detach(), before - 0.01 * before.sign() - 0.1 * before)


def test_masked_tokens_are_hidden_as_the_paper_says(tmp_path):
    import numpy as np

    from slipstream.data.base import IGNORED, Batch
    from slipstream.train.tasks import hide_tokens

    job = decoder_job(
        Path(write_documents(tmp_path / "d.jsonl")),
        **{
            "model": {"huggingface": {"model_type": "bert"}},
            "data.pack": True,
            "train.task": {"kind": "masked-token", "mask": 0.15},
        },
    )
    tokens = torch.randint(3, 300, (64, 200))
    positions = np.arange(64)
    hidden = hide_tokens(Batch(tokens, tokens), positions, job, 300, mask_id=1)
    chosen = hidden.targets != IGNORED
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (hidden.inputs[~chosen] == tokens[~chosen]).all()
    assert (hidden.inputs[chosen] == 1).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (hidden.inputs[chosen] == tokens[chosen]).float().mean().item() == pytest.approx(0.1, abs=0.03)
    part = hide_tokens(Batch(tokens[20:30], tokens[20:30]), positions[20:30], job, 300, mask_id=1)
    assert torch.equal(part.inputs, hidden.inputs[20:30]), "what is hidden belongs to the sample"
