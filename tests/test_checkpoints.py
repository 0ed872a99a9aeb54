"""Checkpoints: whole or not there at all, on any disk that fails in any way."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import restored
from jobs import merge, mlp_job, resnet_job
from pool import Pool
from program import slipstream, start, write_job
from slipstream.job import dump
from slipstream.runs.checkpoints import MANIFEST, find_checkpoint, find_damage, read_progress
from slipstream.train.checkpoint import Checkpointer
from slipstream.train.world import World


@pytest.fixture
def run(pool: Pool, tmp_path: Path) -> Path:
    """A finished run with checkpoints at steps 10, 20 and 30."""
    pool.train(mlp_job(checkpoint={"every": 10, "keep": 3}), tmp_path / "run", 2)
    return tmp_path / "run"


def newest(run: Path) -> tuple[int | None, list[str]]:
    warnings: list[str] = []
    found = find_checkpoint(run / "checkpoints", warnings.append)
    return (read_progress(found).step if found else None), warnings


def test_weights_may_lie_in_memory_in_another_order(pool, tmp_path, monkeypatch):
    """Channels last, as a GPU wants them: what is read and written stays the same, and the state lies as its weight."""
    job = resnet_job(**{"train.steps": 3, "train.optimizer": {"name": "adamw", "lr": 1e-3}, "train.precision": "fp32"})
    pool.train(job, tmp_path / "run", 1)
    saved = tmp_path / "run/checkpoints/step-00000003"
    plain, before = restored.restored(job, saved, 1, 0)
    build = restored.build_to_split
    monkeypatch.setattr(restored, "build_to_split", lambda *told: build(*told).to(memory_format=torch.channels_last))
    model, update = restored.restored(job, saved, 1, 0)
    again = Checkpointer(tmp_path / "again", 1, World.of_one(torch.device("cpu")))
    again.save(read_progress(saved), model, update.optimizer)
    again.close()
    monkeypatch.undo()
    other, after = restored.restored(job, tmp_path / "again/step-00000003", 1, 0)
    for first, second, third in zip(plain.parts, model.parts, other.parts, strict=True):
        slots = before.optimizer.state[first.weight]
        assert slots.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for slot, values in {**slots, "": first.weight}.items():
            here, there = (
                (each.optimizer.state[w][slot] if slot else w)
                for each, w in ((update, second.weight), (after, third.weight))
            )
            assert torch.equal(here, values) and torch.equal(there, values)
            assert slot == "step" or here.stride() == second.weight.stride()
    assert any(not part.weight.is_contiguous() for part in model.parts)


def test_the_newest_is_chosen(run):
    assert newest(run) == (30, [])


def test_only_the_last_few_are_kept(pool, tmp_path):
    pool.train(mlp_job(checkpoint={"every": 5, "keep": 2}), tmp_path / "run", 1)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000025", "step-00000030"]


def test_one_without_a_manifest_is_unfinished_and_never_chosen(run):
    (run / "checkpoints/step-00000030" / MANIFEST).unlink()
    assert newest(run) == (20, [])


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_one_is_skipped_with_a_warning(run, damage):
    checkpoint = run / "checkpoints/step-00000030"
    file = next(path for path in checkpoint.iterdir() if path.suffix == ".distcp")
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "remove":
        file.unlink()
    else:
        (checkpoint / MANIFEST).write_text('{"progress": {')
    step, warnings = newest(run)
    assert step == 20
    assert len(warnings) == 1 and "step-00000030 is damaged" in warnings[0]


def test_resume_says_that_the_newest_was_damaged(run):
    file = next((run / "checkpoints/step-00000030").glob("*.distcp"))
    file.write_bytes(b"nothing like a checkpoint")
    (run / "result.json").unlink()
    before = (run / "metrics.jsonl").read_text().splitlines()
    done = slipstream("resume", run, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert "warning: checkpoint step-00000030 is damaged" in done.stdout.replace("\n", " ")
    assert "from step 20" in done.stdout
    after = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in after] == [json.loads(line)["loss"] for line in before]


def test_a_finished_run_is_not_resumed(run):
    done = slipstream("resume", run, cwd=run.parent)
    assert done.returncode == 2 and "is finished" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def big_job(**changes: Any) -> dict[str, Any]:
    """A checkpoint takes about 1.2 MB: two fit on the small disk, the third does not."""
    job = dump(
        mlp_job(**{"model.hidden": [300, 300], "checkpoint": {"every": 10, "keep": 5}, "train.precision": "fp32"})
    )
    return merge(job, changes)


def assert_last_checkpoint_is_whole(run: Path) -> None:
    step, _ = newest(run)
    assert step is not None and step >= 10
    assert find_damage(run / "checkpoints" / f"step-{step:08d}") is None


def test_a_full_disk_leaves_the_last_checkpoint_whole(small_disk, tmp_path):
    job = write_job(tmp_path, big_job(**{"train.steps": 60}))
    done = slipstream("train", job, "--run-dir", small_disk / "run", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "in checkpoint: " in done.stderr and "No space left on device" in done.stderr, done.stderr
    assert "what to do: the disk is full" in done.stderr, done.stderr
    assert_last_checkpoint_is_whole(small_disk / "run")


def test_a_folder_that_turns_read_only_leaves_the_last_checkpoint_whole(small_disk, tmp_path):
    job = write_job(tmp_path, big_job(**{"train.steps": 5000, "checkpoint.keep": 1}))
    folder = small_disk / "run/checkpoints"
    program = start("train", job, "--run-dir", small_disk / "run", cwd=tmp_path)
    while not list(folder.glob(f"*/{MANIFEST}")) and program.poll() is None:
        time.sleep(0.05)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        until = time.monotonic() + 20
        while subprocess.run(["mount", "-o", "remount,ro,bind", folder]).returncode and time.monotonic() < until:
            time.sleep(0.01)  # busy: a checkpoint is being written
        output = program.communicate(timeout=60)[0]
        assert program.returncode == 3 and "Read-only file system" in output, output
        assert "what to do: the run folder cannot be written" in output, output
        assert_last_checkpoint_is_whole(small_disk / "run")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    job = write_job(tmp_path, dump(mlp_job()))
    done = slipstream("train", job, "--run-dir", tmp_path / "file" / "run", cwd=tmp_path)
    assert done.returncode == 2 and "cannot be written" in done.stderr and "Traceback" not in done.stderr


def test_an_existing_run_is_never_overwritten(run, tmp_path):
    before = (run / "metrics.jsonl").read_bytes()
    job = write_job(tmp_path, dump(mlp_job()))
    done = slipstream("train", job, "--run-dir", run, cwd=tmp_path)
    assert done.returncode == 2 and "already holds a run" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_an_unfinished_write_is_cleaned_up(run, pool):
    """What a crash left half written does not stay for ever."""
    shutil.copytree(run / "checkpoints/step-00000020", run / "checkpoints/step-00000025")
    (run / "checkpoints/step-00000025" / MANIFEST).unlink()
    shutil.rmtree(run / "checkpoints/step-00000030")
    (run / "result.json").unlink()
    pool.resume(run, 2)
    assert not (run / "checkpoints/step-00000025").exists()
