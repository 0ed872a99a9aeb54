"""Training with each codec: resumed bit for bit, on any number of workers, with what was not sent yet."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from jobs import decoder_job, mlp_job
from pool import Pool, forget_after
from program import slipstream, write_job
from restored import restored
from slipstream.job import Job, JobError, check_job, dump
from slipstream.plan import Layout, make_plan, this_machine
from slipstream.runs import read_lines
from slipstream.train.batches import Share
from slipstream.train.worker import Worker

CODECS: list[Any] = [
    "fp16", "bf16", "int8", "onebit", "topk", "randomk", "powersgd",
    {"name": "int8", "feedback": True}, {"name": "powersgd", "warm": False}, {"name": "randomk", "feedback": False},
]  # fmt: skip


def coded_job(documents: Path, codec: Any, **changes: Any) -> Job:
    settings = {"train.steps": 8, "train.precision": "fp32", "checkpoint": {"every": 4, "keep": 3}}
    named = {"name": codec} if isinstance(codec, str) else codec
    few_buckets = {"bucket": "20KB", "codec": named and {"warmup": 0, **named}}
    return decoder_job(documents, exchange=few_buckets, **{**settings, **changes})


def exact(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(key) for key in ("step", "samples", "loss", "lr", "val_loss", "grad_norm", "sent"))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_resume_is_bit_for_bit(codec: Any, pool: Pool, documents: Path, tmp_path: Path) -> None:
    whole = pool.train(coded_job(documents, codec), tmp_path / "run", 2)
    assert whole[-1]["loss"] < whole[0]["loss"] and whole[-1]["compression"] > 1.8
    forget_after(tmp_path / "run", 4)
    resumed = pool.resume(tmp_path / "run", 2)
    assert [exact(line) for line in resumed] == [exact(line) for line in whole]


def test_until_the_warmup_ends_gradients_travel_as_they_are(pool: Pool, documents: Path, tmp_path: Path) -> None:
    settings = {"name": "onebit", "warmup": "40%"}
    whole = pool.train(coded_job(documents, settings), tmp_path / "run", 2)
    plain = pool.train(coded_job(documents, None), tmp_path / "plain", 2)
    assert [line["compression"] > 1 for line in whole] == 4 * [False] + 4 * [True]  # 25.6 of 64 samples
    assert [exact(line) for line in whole[:4]] == [exact(line) for line in plain[:4]]
    forget_after(tmp_path / "run", 4)
    assert [exact(line) for line in pool.resume(tmp_path / "run", 2)] == [exact(line) for line in whole]


def test_through_the_program(documents: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, dump(coded_job(documents, {"name": "topk", "part": 0.1})))
    done = slipstream("train", job, "--workers", "2", "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "times fewer than gradients as they are" in done.stdout.replace("\n", " ")
    assert re.search(r"exchange +allreduce, .*codec topk", done.stdout)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["sent"] > 0 and result["compression"] > 10
    whole = list(read_lines(tmp_path / "run/metrics.jsonl"))
    forget_after(tmp_path / "run", 4)
    assert slipstream("resume", "run", cwd=tmp_path).returncode == 0
    assert [exact(line) for line in read_lines(tmp_path / "run/metrics.jsonl")] == [exact(line) for line in whole]


def test_plain_sums_say_their_bytes_and_one_worker_has_none(pool: Pool, tmp_path: Path) -> None:
    job = mlp_job(**{"train.steps": 2, "train.precision": "fp32"})
    two, one = (pool.train(job, tmp_path / str(workers), workers)[-1] for workers in (2, 1))
    assert two["compression"] == 1.0 and two["sent"] > 0
    assert "sent" not in one


def test_the_same_job_runs_on_one_worker(pool: Pool, documents: Path, tmp_path: Path) -> None:
    assert len(pool.train(coded_job(documents, "powersgd", **{"train.steps": 2}), tmp_path / "run", 1)) == 2


# --- what was not sent yet, on other numbers of workers --------------------------------------------------------------


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_on_other_numbers_of_workers_nothing_is_lost(codec: str, pool: Pool, documents: Path, tmp_path: Path) -> None:
    job = coded_job(documents, codec)
    pool.train(job, tmp_path / "run", 2)
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    expected = unsent(checkpoint)
    assert sum(float(memory.abs().sum()) for memory in expected.values()) > 0
    for workers in (1, 2, 3):
        found = [to_send(job, checkpoint, workers, rank) for rank in range(workers)]
        for name, memory in expected.items():
            assert torch.allclose(sum(each[name] for each in found), memory, rtol=1e-6, atol=1e-9), name  # type: ignore[arg-type]
    forget_after(tmp_path / "run", 4)
    assert len(pool.resume(tmp_path / "run", 3)) == 8
    forget_after(tmp_path / "run", 4)
    assert len(pool.resume(tmp_path / "run", 1)) == 8


def unsent(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The sum of all workers' memories, by parameter."""
    reader = FileSystemReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.zeros(saved[key].size) for key in saved if key.startswith("exchange/") and key.endswith("/memory")
    }
    load_state(state, storage_reader=reader, no_dist=True)
    return {key.split("/")[1]: memory.sum(0) for key, memory in state.items()}


def to_send(job: Job, checkpoint: Path, workers: int, rank: int) -> dict[str, torch.Tensor]:
    """What one of so many workers has to send beside its gradients, once it has read a checkpoint."""
    model, _ = restored(job, checkpoint, workers, rank)
    memories = {kept.parameter: kept.tensor for kept in model.exchange.kept() if kept.slot == "memory"}
    return {
        each.name: memories.get(each.parameter, each.parameter.grad)  # type: ignore[misc]
        for each in model.summed()
        if each.parameter in memories or each.parameter.grad is not None
    }


@contextmanager
def third_loss_not_finite() -> Iterator[None]:
    """In the workers."""
    forward_backward, steps = Worker.forward_backward, count(1)

    def broken(self: Worker, share: Share, scale: float) -> torch.Tensor:
        bad = next(steps) == 3
        return forward_backward(self, share, float("nan") if bad else scale) * (float("nan") if bad else 1)

    with patch.object(Worker, "forward_backward", broken):
        yield


def test_a_step_that_does_not_count_leaves_no_trace(pool: Pool, documents: Path, tmp_path: Path) -> None:
    """Its loss is not finite: the memory after it must be that of before, or every later step would have the NaN."""
    around = "test_exchange_codecs:third_loss_not_finite"
    job = coded_job(documents, "onebit", **{"train.on_nonfinite": "skip"})
    lines = pool.train(job, tmp_path / "run", 2, around)
    assert [line.get("skipped", False) for line in lines] == [False, False, True] + 5 * [False]
    assert all(line["loss"] for line in lines[3:])
    assert all(memory.isfinite().all() for memory in unsent(tmp_path / "run/checkpoints/step-00000008").values())


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("int4", ["exchange.codec", "not a valid choice", "int8"]),
        ({"part": 0.1}, ["exchange.codec", "needs name", "powersgd"]),
        ({"name": "topk", "part": "50%"}, ["part", "less than 0.33"]),
        ({"name": "int8", "rank": 2}, ["rank", "belongs to powersgd"]),
        ("none", ["exchange.codec", "to have none, leave it out"]),
        ({"name": "randomk", "part": "0.0001%"}, ["part", "at least 0.001"]),
        ({"name": "onebit", "warmup": "100%"}, ["exchange.codec", "the whole run"]),
        ({"name": "onebit", "warmup": "97%"}, ["exchange.codec.warmup", "the whole run of 240 samples"]),
        ({"name": "onebit", "warmup": "240 samples"}, ["exchange.codec.warmup", "the whole run of 240 samples"]),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(codec: Any, words: list[str], documents: Path) -> None:
    values = {**dump(decoder_job(documents)), "exchange": {"codec": codec}}
    with pytest.raises(JobError) as refused:
        check_job(values)
    assert all(word in str(refused.value) for word in words)


def test_what_would_code_nothing_is_refused(documents: Path, tmp_path: Path) -> None:
    """What only the data tells, or the model."""
    values = dump(coded_job(documents, None))
    values["train"] = {**values["train"], "steps": None, "epochs": 2}
    values["exchange"]["codec"] = {"name": "int8", "warmup": "1M samples"}
    assert "exchange.codec.warmup 1000000 samples is the whole run" in refused(values, tmp_path)
    thin = dump(coded_job(documents, {"name": "powersgd", "rank": 64}))
    assert "exchange.codec.rank 64: no matrix of this model is so large" in refused(thin, tmp_path)
    few = {**dump(mlp_job()), "exchange": {"codec": {"name": "int8"}}}
    assert "exchange.codec int8: no matrix of this model has 1024 numbers" in refused(few, tmp_path)


def refused(values: dict[str, Any], folder: Path) -> str:
    """What the program says, having left nothing behind."""
    done = slipstream("train", write_job(folder, values), "--workers", "2", "--run-dir", "run", cwd=folder)
    assert done.returncode == 2 and not (folder / "run").exists(), done.stdout + done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("model", ["decoder", "mlp"])
def test_a_dry_run_refuses_what_would_code_nothing(model: str, documents: Path, tmp_path: Path) -> None:
    job = mlp_job() if model == "mlp" else decoder_job(documents)
    values = {**dump(job), "exchange": {"codec": {"name": "powersgd", "rank": 64, "warmup": 0}}}
    done = slipstream("train", write_job(tmp_path, values), "--workers", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2 and "exchange.codec.rank 64" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("exchange", [{"algorithm": "tree", "codec": "fp16"}, {"kind": "local", "algorithm": "ring"}])
def test_an_algorithm_beside_a_codec_is_refused(exchange: dict[str, Any], documents: Path) -> None:
    values = dump(decoder_job(documents))
    with pytest.raises(JobError, match=r"exchange.algorithm.*has no effect with a codec.*leave it out"):
        check_job({**values, "exchange": {"codec": "int8", **exchange}})
    assert check_job({**values, "exchange": {**exchange, "codec": None}})


def test_feedback_is_refused_where_gradients_change_their_scale(documents: Path) -> None:
    values = {**dump(decoder_job(documents, **{"train.precision": "fp16"})), "exchange": {"codec": "topk"}}
    with pytest.raises(JobError, match="use bf16 or fp32, or a codec with feedback: false"):
        check_job(values)
    assert check_job({**values, "exchange": {"codec": "int8"}})


def test_weights_that_are_shared_out_have_no_codec(documents: Path) -> None:
    def plan(**layout: Any) -> object:
        return make_plan(coded_job(documents, "int8", layout=layout), this_machine(), 2)

    with pytest.raises(ValueError, match=r"int8 does not go with layout.shard: FSDP2 .*; use layout.replicate"):
        plan(shard=2)
    assert plan(shard=2, sharded="optimizer")
    with pytest.raises(ValueError, match=r"does not go with layout\.shard"):
        make_plan(coded_job(documents, "int8"), this_machine(), layout=Layout(shard=2, micro_batch=1))


# --- beside other axes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [{"replicate": 2, "tensor": 2}, {"replicate": 2, "pipeline": 2}, {"shard": 2, "sharded": "optimizer"}],
    ids=str,
)
@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_beside_other_axes(codec: str, layout: dict[str, Any], pool: Pool, documents: Path, tmp_path: Path) -> None:
    """The weights of both ends of this decoder are one, also where they are on two stages."""
    workers = 2 * layout.get("tensor", 1) * layout.get("pipeline", 1)
    job = coded_job(documents, codec, layout=layout, **{"model.dropout": 0.0, "train.clip": None})
    whole = pool.train(job, tmp_path / "run", workers)
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    expected = unsent(checkpoint)
    alone = to_send(coded_job(documents, codec, **{"model.dropout": 0.0}), checkpoint, 1, 0)
    assert alone.keys() == expected.keys() and alone
    assert all(torch.allclose(alone[name], expected[name], rtol=1e-6, atol=1e-9) for name in alone)
    forget_after(tmp_path / "run", 4)
    assert [exact(line) for line in pool.resume(tmp_path / "run", workers)] == [exact(line) for line in whole]
