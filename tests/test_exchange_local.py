"""Local steps: equal to all-reduce where they should be, resumed bit for bit in the middle of anything, on any number
of workers, and no worse in the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from faults import my_rank
from jobs import decoder_job, mlp_job, resnet_job
from pool import Pool, forget_after
from program import slipstream, start, write_job
from restored import restored
from slipstream.data.storage import StorageGone
from slipstream.job import Job, JobError, check_job, dump
from slipstream.plan import Machine, make_plan, this_machine
from slipstream.runs import read_lines
from slipstream.train.batches import Batches, Share
from slipstream.train.exchange.local import Local
from slipstream.train.worker import Worker
from test_kill import kill, wait_for_progress

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
DILOCO = {**NESTEROV, "momentum": 0.5}
TOPK = {"name": "topk", "part": 0.1, "warmup": 0}
EVERYTHING = {"kind": "local", "every": 4, "overlap": 2, "outer": NESTEROV, "codec": TOPK, "bucket": "20KB"}


def local_job(documents: Path, exchange: dict[str, Any] = EVERYTHING, **changes: Any) -> Job:
    settings = {"train.steps": 11, "train.precision": "fp32", "train.evaluate.every": 5}
    return decoder_job(documents, exchange=exchange, **{**settings, "checkpoint": {"every": 1, "keep": 20}, **changes})


def exact(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    keys = ("step", "samples", "loss", "lr", "val_loss", "grad_norm", "sent", "compression", "skipped")
    return [tuple(line.get(key) for key in keys) for line in lines]


@pytest.mark.parametrize("workers", [2, 3])
def test_after_every_step_and_all_the_way_it_is_all_reduce(workers: int, pool: Pool, tmp_path: Path) -> None:
    """Batches of 12 and 14 are shared out unevenly among three."""
    settings = {"train.optimizer": {"name": "sgd", "lr": 0.02}, "train.steps": 8, "train.evaluate.every": 4}
    settings |= {"train.batch": 14, "train.l1": 1e-4}
    alike = pool.train(mlp_job(**settings), tmp_path / "alike", workers)
    apart = pool.train(mlp_job(**settings, exchange={"kind": "local", "every": 1}), tmp_path / "apart", workers)
    for key in ("loss", "val_loss"):
        values, others = ([line[key] for line in lines if key in line] for lines in (apart, alike))
        assert values == pytest.approx(others, rel=1e-9, abs=0)


def test_a_resume_is_bit_for_bit_in_the_middle_of_anything(pool: Pool, documents: Path, tmp_path: Path) -> None:
    """Step 10 has an exchange under way, 7 is in the middle of a round, 4 has just sent, 3 is before the first."""
    whole = pool.train(local_job(documents), tmp_path / "run", 2)
    assert [line["step"] for line in whole if line["sent"]] == [6, 10, 11]
    assert "compression" not in whole[0] and whole[5]["compression"] > 4 * 10
    for step in (10, 7, 4, 3):
        forget_after(tmp_path / "run", step)
        assert exact(pool.resume(tmp_path / "run", 2)) == exact(whole), f"from step {step}"


def test_running_statistics_are_each_workers_own(pool: Pool, tmp_path: Path) -> None:
    """Batch norm: between exchanges by itself, then averaged."""
    exchange = {"kind": "local", "every": 4, "overlap": 1}
    settings = {"train.steps": 7, "train.precision": "fp32", "train.evaluate.every": 3}
    job = resnet_job(exchange=exchange, checkpoint={"every": 1, "keep": 9}, **settings)
    whole = pool.train(job, tmp_path / "run", 2)
    own, agreed = (values(tmp_path / "run/checkpoints/step-00000006", start) for start in ("own/model/", "model/"))
    name = next(name for name in own if name.endswith("running_mean"))
    assert not torch.equal(own[name][0], own[name][1])
    ended = values(tmp_path / "run/checkpoints/step-00000007", "own/model/")
    assert all(torch.equal(ended[name][0], ended[name][1]) for name in ended), "a run ends in agreement"
    assert agreed.keys() > own.keys(), "a count of batches is the same with all"
    for step in (6, 4):
        forget_after(tmp_path / "run", step)
        assert exact(pool.resume(tmp_path / "run", 2)) == exact(whole)


def test_killed_and_resumed_through_the_program(documents: Path, tmp_path: Path) -> None:
    model = {"import": "faults:SlowDecoder", "args": {"seconds": 0.03}}
    exchange = {**EVERYTHING, "every": 5, "codec": {"name": "int8", "feedback": True}}
    written = dump(local_job(documents, exchange)) | {"model": model, "layout": {"replicate": 2}}
    written["train"] |= {"steps": 40, "task": "next-token"}
    written["checkpoint"] = {"every": 3}
    job = write_job(tmp_path, written)
    done = slipstream("train", job, "--run-dir", "whole", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    program = start("train", job, "--run-dir", "torn", cwd=tmp_path)
    while program.poll() is None and not list((tmp_path / "torn").glob("checkpoints/*/manifest.json")):
        wait_for_progress(tmp_path / "torn", program)
    assert program.poll() is None
    kill(program, "workers", None)  # type: ignore[arg-type]
    program.communicate(timeout=30)
    assert slipstream("resume", "torn", cwd=tmp_path).returncode == 0
    torn, whole = (list(read_lines(tmp_path / run / "metrics.jsonl")) for run in ("torn", "whole"))
    assert exact(torn) == exact(whole)
    agreed = load_file(tmp_path / "whole/export/model.safetensors")
    saved = values(tmp_path / "whole/checkpoints/step-00000040", "model/")
    assert all(torch.equal(agreed[name], saved[name]) for name in agreed)


# --- other numbers of workers ----------------------------------------------------------------------------------------


def values(checkpoint: Path, start: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin so, without that."""
    reader = FileSystemReader(checkpoint)
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.zeros(saved[key].size, dtype=saved[key].properties.dtype) for key in saved if key.startswith(start)
    }
    load_state(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(start): tensor for key, tensor in state.items()}


def test_other_numbers_of_workers_go_on_from_the_mean(pool: Pool, documents: Path, tmp_path: Path) -> None:
    exchange = {**EVERYTHING, "codec": None}
    job = local_job(documents, exchange)
    pool.train(job, tmp_path / "run", 2)
    checkpoint = tmp_path / "run/checkpoints/step-00000009"  # with an exchange under way
    own, agreed = values(checkpoint, "own/model/"), values(checkpoint, "model/")
    moments, mean = values(checkpoint, "own/optimizer/"), values(checkpoint, "outer/mean/")
    for workers in (1, 3):
        model, update = restored(job, checkpoint, workers, workers - 1)
        for part in model.parts:
            assert torch.allclose(part.weight, own[part.name].mean(0), rtol=1e-6, atol=1e-9)
            for slot, tensor in update.optimizer.state[part.weight].items():
                assert torch.allclose(tensor, moments[f"{part.name}/{slot}"].mean(0), rtol=1e-6, atol=1e-12)
            if isinstance(model.exchange, Local):
                held = model.exchange.held()[part.weight]
                assert torch.equal(held.anchor, agreed[part.name]) and held.change is not None
                assert torch.equal(held.mean, mean[part.name]) and torch.equal(held.change, held.mean)
    forget_after(tmp_path / "run", 9)
    for workers in (3, 1, 2):
        assert len(pool.resume(tmp_path / "run", workers)) == 11
        forget_after(tmp_path / "run", 10)


def test_what_codes_left_out_is_not_lost_on_one_worker(pool: Pool, documents: Path, tmp_path: Path) -> None:
    job = local_job(documents, **{"train.steps": 6})
    pool.train(job, tmp_path / "run", 2)
    checkpoint = tmp_path / "run/checkpoints/step-00000006"
    own = values(checkpoint, "own/model/")
    left = {name.split("/")[0]: rows for name, rows in values(checkpoint, "exchange/").items() if "/change" in name}
    assert left and any(rows.any() for rows in left.values())
    model, _ = restored(job, checkpoint, 1, 0)
    for part in model.parts:
        expected = own[part.name].mean(0) - (left[part.name].sum(0) if part.name in left else 0)
        assert torch.allclose(part.weight, expected, rtol=1e-6, atol=1e-8) and part.weight.grad is None


# --- steps that do not count -----------------------------------------------------------------------------------------


@contextmanager
def one_loss_not_finite() -> Iterator[None]:
    """In the workers: in the third step, on the second one."""
    forward_backward, steps = Worker.forward_backward, count(1)

    def broken(self: Worker, share: Share, scale: float) -> torch.Tensor:
        bad = next(steps) == 3 and my_rank() == 1
        return forward_backward(self, share, float("nan") if bad else scale) * (float("nan") if bad else 1)

    with patch.object(Worker, "forward_backward", broken):
        yield


def test_a_worker_skips_by_itself(pool: Pool, documents: Path, tmp_path: Path) -> None:
    job = local_job(documents, **{"train.on_nonfinite": "skip", "train.steps": 6})
    lines = pool.train(job, tmp_path / "run", 2, "test_exchange_local:one_loss_not_finite")
    assert [line["loss"] is None for line in lines] == [False, False, True, False, False, False]
    steps = values(tmp_path / "run/checkpoints/step-00000006", "own/optimizer/")
    counts = next(tensor for name, tensor in steps.items() if name.endswith("/step"))
    assert counts.tolist() == [6, 5]


@contextmanager
def one_without_samples() -> Iterator[None]:
    """In the workers: from the seventh step on, on the second one."""
    from_sample = Batches.from_sample

    def lost(self: Batches, *words: Any) -> Iterator[Share]:
        for number, share in enumerate(from_sample(self, *words), 1):
            if number == 7 and my_rank() == 1:
                self.lost = StorageGone("it is gone")
            yield share

    with patch.object(Batches, "from_sample", lost):
        yield


def test_steps_without_samples_leave_no_trace(pool: Pool, documents: Path, tmp_path: Path) -> None:
    """The others have gone on for some steps before they hear of it: the run goes back to its last checkpoint."""
    job = local_job(documents, checkpoint={"every": 4, "keep": 9}, **{"train.evaluate.every": 11})
    whole = pool.train(job, tmp_path / "whole", 2)
    with pytest.raises(AssertionError, match=r"it is gone|another worker could not have its samples"):
        pool.train(job, tmp_path / "torn", 2, "test_exchange_local:one_without_samples")
    assert [path.name for path in (tmp_path / "torn/checkpoints").iterdir()] == ["step-00000004"]
    assert exact(pool.resume(tmp_path / "torn", 2)) == exact(whole)


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        ({"kind": "locale"}, ["exchange.kind", "did you mean 'local'", "allreduce"]),
        ({"every": 4}, ["exchange.every", "belongs to local"]),
        ({"kind": "local", "every": 4, "overlap": 5}, ["exchange.overlap", "at most every (4)"]),
        ({"kind": "local", "outer": {"nesterov": True}}, ["exchange.outer", "no effect without momentum"]),
        ({"kind": "local", "outer": {"momentum": 1}}, ["exchange.outer.momentum", "less than 1"]),
        ("local", ["exchange", "needs a mapping", "kind: allreduce, local or server"]),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(exchange: Any, words: list[str]) -> None:
    with pytest.raises(JobError) as refused:
        check_job({**dump(mlp_job()), "exchange": exchange})
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("layout", [{"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"shard": 2, "sharded": "optimizer"}])
def test_workers_that_share_out_the_weights_are_refused(layout: dict[str, Any], documents: Path) -> None:
    job = local_job(documents, layout=layout)
    with pytest.raises(
        ValueError, match=r"exchange.kind local is for workers that hold the whole model .* use layout.replicate"
    ):
        make_plan(job, this_machine(), 2)


def test_fp16_is_refused_and_one_worker_needs_no_exchange(pool: Pool, documents: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="use bf16 or fp32"):
        check_job(dump(local_job(documents)) | {"train": {**dump(local_job(documents))["train"], "precision": "fp16"}})
    old = Machine("any", cores=8, memory=10**12, gpus=("V100", "V100"), bf16=False)
    with pytest.raises(ValueError, match="use bf16 or fp32"):
        make_plan(local_job(documents, {"kind": "local"}, **{"train.precision": "auto"}), old, 2)
    lines = pool.train(local_job(documents, **{"train.steps": 2}), tmp_path / "run", 1)
    assert len(lines) == 2 and "sent" not in lines[0]


# --- and in the end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "exchange"),
    [
        ({"name": "nesterov", "lr": 0.05}, {"every": 8}),
        ({"name": "adam", "lr": 3e-3}, {"every": 4, "outer": {"lr": 1.4}}),
        ({"name": "adam", "lr": 3e-3}, {"every": 16, "overlap": 2, "outer": DILOCO, "codec": "int8"}),
    ],
    ids=str,
)
def test_it_ends_as_well(
    optimizer: dict[str, Any], exchange: dict[str, Any], pool: Pool, tmp_path: Path, references: dict[str, Any]
) -> None:
    """With what docs/exchange.md recommends."""
    changes = {"model": {"kind": "mlp", "hidden": [64]}, "data": {"source": "digits", "validation": "20%"}}
    changes |= {"train.steps": 300, "train.batch": 32, "train.l1": 0.0, "train.precision": "fp32"}
    changes |= {"train.optimizer": optimizer}
    changes |= {"train.schedule": {"decay": "cosine"}, "train.evaluate.every": 300, "checkpoint.every": 300}
    if optimizer["name"] not in references:
        references[optimizer["name"]] = pool.train(mlp_job(**changes), tmp_path / "plain", 2)[-1]["val_loss"]
    ended = pool.train(mlp_job(**changes, exchange={"kind": "local", **exchange}), tmp_path / "run", 2)[-1]["val_loss"]
    assert ended < 1.02 * references[optimizer["name"]]
