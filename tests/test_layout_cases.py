"""Layouts beyond the matrix: other models and optimisers, planted mistakes, checkpoints, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mistakes
from jobs import mlp_job, resnet_job
from layouts import deviation, job_of, read_layout, reference, workers
from pool import forget_after
from slipstream.job import Job, dump
from slipstream.plan import Layout, make_plan
from slipstream.plan.layout import SPOKEN
from slipstream.plan.machine import Machine
from slipstream.plan.stages import balance
from slipstream.train.parallel.context import tokens_of


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
@pytest.mark.parametrize("layout", ["shard=2,tensor=2", "shard=2,sharded=optimizer,pipeline=2"])
def test_trust_ratios_are_those_of_whole_tensors(layout, optimizer, pool, documents, tmp_path, references):
    changes = {"train.optimizer": {"name": optimizer, "lr": 0.01}, "train.l2": 0.01, "train.l1": 1e-4, "train.steps": 8}
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
    expected = reference("gpt2", job_of("gpt2", documents), pool, tmp_path, references)
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
    layout = Layout(**dict(zip(SPOKEN, sizes, strict=True)), micro_batch=1)
    places = [layout.place(rank) for rank in range(layout.workers)]
    assert len(set(places)) == layout.workers
    assert [layout.rank(place) for place in places] == list(range(layout.workers))
