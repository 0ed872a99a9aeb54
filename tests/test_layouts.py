"""One curve on every layout: loss, norm and final weights beside one worker's, with clipping, decay and dropout on."""

import pytest

from layouts import deviation, job_of, read_layout, reference, workers

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


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=lambda value: value.replace(",", " "))
def test_in_fp64(family, layout, pool, documents, tmp_path, references):
    count = workers(read_layout(layout))
    small = {"model.layers": 2} if count == 8 else {}  # eight processes on two cores take their time
    expected = reference(f"{family}{len(small)}", job_of(family, documents, **small), pool, tmp_path, references)
    pool.train(job_of(family, documents, layout=read_layout(layout), **small), tmp_path / "run", count)
    assert deviation(tmp_path / "run", expected) < 1e-8


IN_FP32 = [(family, layout) for family, layout in LAYOUTS if workers(read_layout(layout)) <= 4]


@pytest.mark.parametrize(("family", "layout"), IN_FP32, ids=lambda value: value.replace(",", " "))
def test_in_fp32(family, layout, pool, documents, tmp_path, references):
    read = read_layout(layout)
    few = {} if read.get("pipeline", 1) * (2 if "schedule" in read else 1) > 2 else {"model.layers": 2}
    changes = {"train.precision": "fp32", "data.validation": 0, "train.evaluate": {}, **few}
    expected = reference(f"{family}-fp32{len(few)}", job_of(family, documents, **changes), pool, tmp_path, references)
    pool.train(job_of(family, documents, layout=read, **changes), tmp_path / "run", workers(read))
    assert deviation(tmp_path / "run", expected, keys=("loss",), weights=False) < 1e-4
