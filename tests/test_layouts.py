"""One curve on every layout: loss, norm and final weights beside one worker's, with clipping, decay and dropout on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import mistakes
from jobs import decoder_job, mlp_job, resnet_job
from pool import Pool, forget_after
from slipstream.job import Job, dump
from slipstream.plan import Layout, make_plan
from slipstream.plan.machine import Machine
from slipstream.train.parallel.context import tokens_of
from slipstream.train.parallel.pipeline import balance

AXES = ("replicate", "shard", "tensor", "pipeline", "context")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model.kv_heads": 2, "model.tied": False},
    "gpt2": {
        "model.positions": "learned", "model.norm": "layer", "model.activation": "gelu", "model.bias": True,
        "model.kv_heads": None, "model.tied": True,
    },
}  # fmt: skip
LAYOUTS = [
    # each axis alone
    ("llama", "shard=2"),
    ("llama", "shard=2,sharded=gradients,recompute=full"),
    ("gpt2", "shard=2,sharded=optimizer,micro_batch=2"),
    ("gpt2", "shard=3"),
    ("llama", "tensor=2,recompute=full"),
    ("gpt2", "tensor=2"),
    ("gpt2", "tensor=4"),
    ("llama", "pipeline=2,schedule=gpipe,micro_batch=2"),
    ("gpt2", "pipeline=2,schedule=1f1b,micro_batch=2"),
    ("llama", "pipeline=2,schedule=interleaved"),
    ("gpt2", "pipeline=2,schedule=interleaved,micro_batch=2,recompute=full"),
    ("llama", "pipeline=2,schedule=zero-bubble"),
    ("gpt2", "pipeline=2,schedule=zero-bubble,micro_batch=2"),
    ("llama", "pipeline=4,micro_batch=8"),  # one micro-batch: plain layer parallelism
    ("llama", "context=2,recompute=selective"),
    ("gpt2", "context=2,micro_batch=4"),
    ("llama", "context=4"),
    # pairs
    ("llama", "replicate=2,shard=2"),
    ("gpt2", "replicate=2,shard=2,sharded=optimizer"),
    ("llama", "replicate=2,tensor=2"),
    ("gpt2", "replicate=2,pipeline=2"),
    ("gpt2", "replicate=2,context=2"),
    ("llama", "shard=2,tensor=2"),
    ("gpt2", "shard=2,tensor=2,sharded=optimizer"),
    ("gpt2", "shard=2,pipeline=2"),
    ("llama", "shard=2,pipeline=2,schedule=interleaved,micro_batch=1"),
    ("gpt2", "shard=2,pipeline=2,sharded=optimizer,schedule=zero-bubble"),
    ("llama", "shard=2,context=2"),
    ("gpt2", "tensor=2,pipeline=2"),
    ("gpt2", "tensor=2,context=2"),
    ("llama", "pipeline=2,context=2"),
    # triples
    ("gpt2", "shard=2,tensor=2,pipeline=2"),
    ("llama", "replicate=2,shard=2,context=2"),
    ("llama", "tensor=2,pipeline=2,context=2"),
]


@pytest.fixture(scope="session")
def references() -> dict[str, Path]:
    return {}


def read_layout(text: str) -> dict[str, Any]:
    pairs = (pair.split("=") for pair in text.split(","))
    return {key: int(value) if value.isdigit() else value for key, value in pairs}


def workers(layout: dict[str, Any]) -> int:
    return int(torch.tensor([layout.get(axis, 1) for axis in AXES]).prod())


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


def deviation(run: Path, reference: Path, keys: tuple[str, ...] = ("loss", "grad_norm", "val_loss")) -> float:
    """The largest relative difference of loss, gradient norm and final weights."""
    import json

    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run, reference)
    )
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    curve = max(
        abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, theirs, strict=True) for key in keys if key in b
    )
    mine, whole = (load_file(folder / "export/model.safetensors") for folder in (run, reference))
    assert mine.keys() == whole.keys()
    weights = max(
        float((mine[name] - whole[name]).double().norm() / whole[name].double().norm().clamp(min=1e-3))
        for name in whole
    )
    return max(curve, weights)


def reference(name: str, job: Job, pool: Pool, folder: Path, known: dict[str, Path]) -> Path:
    """The run of one worker, trained once per test session."""
    if name not in known:
        known[name] = folder / f"reference-{name}"
        lines = pool.train(job, known[name], 1)
        assert lines[-1]["loss"] < lines[0]["loss"], "it must learn, or equality would say little"
        assert any(line["grad_norm"] > 0.5 for line in lines if "grad_norm" in line) or "clip" not in name
    return known[name]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=lambda value: value.replace(",", " "))
def test_in_fp64(family, layout, pool, documents, tmp_path, references):
    count = workers(read_layout(layout))
    small = {"model.layers": 2} if count == 8 else {}  # eight processes on two cores take their time
    expected = reference(f"{family}{len(small)}", job_of(family, documents, **small), pool, tmp_path, references)
    pool.train(job_of(family, documents, layout=read_layout(layout), **small), tmp_path / "run", count)
    assert deviation(tmp_path / "run", expected) < 1e-8


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", "shard=2"), ("gpt2", "tensor=2"), ("llama", "pipeline=2"), ("gpt2", "context=2")],
    ids=lambda value: value,
)
def test_in_fp32(family, layout, pool, documents, tmp_path, references):
    changes = {"train.precision": "fp32"}
    expected = reference(f"{family}-fp32", job_of(family, documents, **changes), pool, tmp_path, references)
    job = job_of(family, documents, layout=read_layout(layout), **changes)
    pool.train(job, tmp_path / "run", workers(read_layout(layout)))
    assert deviation(tmp_path / "run", expected, keys=("loss",)) < 1e-4


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
@pytest.mark.parametrize("layout", ["shard=2,tensor=2", "shard=2,sharded=optimizer,pipeline=2"])
def test_trust_ratios_are_those_of_whole_tensors(layout, optimizer, pool, documents, tmp_path, references):
    changes = {"train.optimizer": {"name": optimizer, "lr": 0.01}, "train.l2": 0.01, "train.l1": 1e-4}
    expected = reference(f"gpt2-{optimizer}", job_of("gpt2", documents, **changes), pool, tmp_path, references)
    pool.train(job_of("gpt2", documents, layout=read_layout(layout), **changes), tmp_path / "run", 4)
    assert deviation(tmp_path / "run", expected) < 1e-8


@pytest.mark.parametrize("layout", ["shard=2", "shard=2,sharded=optimizer", "replicate=2,shard=2"])
@pytest.mark.parametrize("model", ["mlp", "resnet"])
def test_other_models(model, layout, pool, tmp_path, references):
    build = {"mlp": mlp_job, "resnet": resnet_job}[model]
    changes = {"train.steps": 30 if model == "mlp" else 6, "train.clip": {"norm": 1.0}}
    expected = reference(f"{model}-other", build(**changes), pool, tmp_path, references)
    pool.train(build(layout=read_layout(layout), **changes), tmp_path / "run", workers(read_layout(layout)))
    assert deviation(tmp_path / "run", expected) < 1e-8


OWN = {
    "name": "own",
    "seed": 4,
    "model": {
        "import": "faults:Tower",
        "split": {
            "before": ["enter"],
            "blocks": "layers",
            "after": ["leave"],
            "tensor": {"layers.*.up": "column", "layers.*.down": "row"},
        },
    },
    "data": {"source": "synthetic", "samples": 200, "inputs": 8, "validation": 0.1},
    "train": {
        "steps": 20,
        "batch": 12,
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1},
        "clip": {"norm": 1.0},
        "precision": "fp64",
        "evaluate": {"every": 20},
    },
    "checkpoint": {"every": 20},
}


@pytest.mark.parametrize(
    "layout", ["shard=2", "tensor=2", "pipeline=2,micro_batch=3", "tensor=2,pipeline=2", "shard=2,recompute=full"]
)
def test_a_users_own_model(layout, pool, tmp_path, references):
    expected = reference("own", Job.model_validate(OWN), pool, tmp_path, references)
    job = Job.model_validate({**OWN, "layout": read_layout(layout)})
    pool.train(job, tmp_path / "run", workers(read_layout(layout)))
    assert deviation(tmp_path / "run", expected) < 1e-8


@pytest.mark.parametrize("layout", ["tensor=2", "shard=2,tensor=2"])
def test_a_hugging_face_model(layout, pool, documents, tmp_path, references):
    """It is split by the tensor plan that it carries."""
    config = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48,
    }  # fmt: skip
    values = dump(job_of("llama", documents)) | {"model": {"huggingface": config}, "layout": {}}
    expected = reference("hf", Job.model_validate(values), pool, tmp_path, references)
    job = Job.model_validate({**values, "layout": read_layout(layout)})
    pool.train(job, tmp_path / "run", workers(read_layout(layout)))
    assert deviation(tmp_path / "run", expected) < 1e-8


@pytest.mark.parametrize("mistake", mistakes.LAYOUT_OF)
def test_a_typical_mistake_would_be_seen(mistake, pool, documents, tmp_path, references):
    """The matrix is worth something only if it can fail."""
    layout = mistakes.LAYOUT_OF[mistake]
    expected = reference("gpt20", job_of("gpt2", documents), pool, tmp_path, references)
    job = job_of("gpt2", documents, layout=read_layout(layout))
    pool.train(job, tmp_path / "run", workers(read_layout(layout)), around=f"mistakes:{mistake}")
    assert deviation(tmp_path / "run", expected) > 1e-6


PAIRS = [
    ("replicate=2", "shard=2"),
    ("shard=2", "tensor=2"),
    ("tensor=2", "pipeline=2"),
    ("pipeline=2", "context=2"),
    ("context=2", "replicate=2"),
    ("shard=2,sharded=optimizer", "pipeline=2,schedule=interleaved"),
    ("pipeline=2,schedule=zero-bubble", "shard=3"),
    ("shard=2,tensor=2", "replicate=2,pipeline=2"),
    ("tensor=2,pipeline=2", "shard=2,sharded=optimizer"),
    ("shard=3", "tensor=2,context=2"),
    ("replicate=2,shard=2", "tensor=4"),
    ("context=4", "shard=2,pipeline=2"),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_checkpoint_of_any_layout_loads_on_any_other(before, after, pool, documents, tmp_path, references):
    """The optimiser's state too: the steps after it are those of the undisturbed run."""
    changes = {"train.steps": 4, "train.evaluate": {"every": 4, "samples": 8}, "checkpoint": {"every": 2, "keep": 2}}
    expected = reference("gpt2-short", job_of("gpt2", documents, **changes), pool, tmp_path, references)
    folder = tmp_path / "run"
    pool.train(job_of("gpt2", documents, layout=read_layout(before), **changes), folder, workers(read_layout(before)))
    forget_after(folder, 2)
    pool.resume(folder, workers(read_layout(after)), layout=read_layout(after))
    assert deviation(folder, expected) < 1e-9


MACHINE = Machine("test", cores=8, memory=2**34, gpus=(), bf16=False)


@pytest.mark.parametrize(
    ("layout", "count", "words"),
    [
        ("tensor=3", 3, ["layout.tensor (3) must divide model.kv_heads (2)", "nearest layouts that fit"]),
        ("pipeline=8", 8, ["8 stages", "model.layers is 4"]),
        ("pipeline=4,schedule=interleaved", 4, ["8 stages (interleaved)"]),
        ("shard=16", 16, ["16 workers cannot share a batch of 8"]),
        ("tensor=2", 3, ["has 2 workers, and 3 are asked for"]),
        ("context=5", 5, ["data.sequence (24) must be a multiple of 10"]),
        ("pipeline=2,micro_batch=3", 2, ["equal micro-batches", "train.batch (8)"]),
        ("pipeline=2,micro_batch=8,schedule=zero-bubble", 2, ["a multiple of 2 micro-batches, and there are 1"]),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_those_that_do(layout, count, words, documents):
    with pytest.raises(ValueError, match=r"layout|workers") as refused:
        make_plan(job_of("llama", documents, layout=read_layout(layout)), MACHINE, count)
    for word in words:
        assert word in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("pipeline=2,shard=2,schedule=zero-bubble", "wrong gradients"),
        ("sharded=optimizer", "no effect without shard"),
        ("schedule=gpipe", "no effect without pipeline"),
        ("offload=optimizer", "no effect on a CPU"),
    ],
)
def test_a_choice_that_is_wrong_or_without_effect_is_refused(layout, words, documents):
    with pytest.raises(ValueError, match=words):
        make_plan(job_of("llama", documents, layout=read_layout(layout)), MACHINE)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=9), st.data())
def test_stages_are_balanced_as_well_as_can_be(costs, data):
    from itertools import combinations, pairwise

    stages = data.draw(st.integers(1, len(costs)))
    cuts = balance(costs, stages)
    assert [piece for cut in cuts for piece in cut] == list(range(len(costs)))
    assert all(len(cut) for cut in cuts)
    dearest = max(sum(costs[piece] for piece in cut) for cut in cuts)
    every = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1))
    best = min(max(sum(costs[first:last]) for first, last in pairwise(ends)) for ends in every)
    assert dearest == pytest.approx(best)


@given(st.integers(1, 8), st.integers(1, 5))
def test_every_token_has_one_worker_and_all_have_the_same_to_do(count, part):
    length = 2 * count * part
    held = [tokens_of(index, count, length) for index in range(count)]
    assert sorted(torch.cat(held).tolist()) == list(range(length))
    assert len({int((tokens + 1).sum()) for tokens in held}) == 1, "a token attends to itself and all before it"


@given(st.tuples(*[st.integers(1, 3)] * 5))
def test_every_rank_has_its_own_place(sizes):
    layout = Layout(**dict(zip(AXES, sizes, strict=True)), micro_batch=1)
    places = [layout.place(rank) for rank in range(layout.workers)]
    assert len(set(places)) == layout.workers
    assert [layout.rank(place) for place in places] == list(range(layout.workers))
