"""Prepared datasets of whole samples: what was in the files comes back, and what has changed is found."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from program import SLIPSTREAM, environment, slipstream, write_job
from slipstream.data import open_dataset
from slipstream.data.base import Dataset
from slipstream.data.destinations import InFolder
from slipstream.data.holding import Numbers, Samples
from slipstream.data.manifest import MANIFEST
from slipstream.data.pages import DamagedShard
from slipstream.data.samples import PreparedSamples
from slipstream.data.sampling import stored
from slipstream.data.shards import Shards
from slipstream.data.writing import ShardWriter
from slipstream.job import Job
from slipstream.train.batches import as_model_takes
from test_data_prepared import contents, flip

SIZE, EACH = 64, 120
CLASSES = ("cat", "dog", "owl")
SHARDS, ALONE = ("--shard", "1"), ("--workers", "1")


def prepare(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return slipstream("data", "prepare", *words, cwd=cwd)


def prepared(*words: str | Path, cwd: Path) -> Path:
    """A dataset in the folder that is named like its source."""
    dest = cwd / f"{Path(words[0]).name}.prepared"
    done = prepare(words[0], dest, *words[1:], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return dest


def opened(data: dict[str, Any], task: str = "classification", **train: Any) -> Dataset:
    model = {"kind": "linear"} if "sequence" not in data else {"kind": "decoder", "layers": 1, "hidden": 8, "heads": 1}
    train = {"task": task, "steps": 1, "batch": 1, "optimizer": {"name": "sgd", "lr": 1}, **train}
    return open_dataset(Job.model_validate({"name": "test", "model": model, "data": data, "train": train}))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of noise in three classes, all wider than high."""
    root, draw = tmp_path_factory.mktemp("images") / "pictures", np.random.default_rng(0)
    for name in CLASSES:
        for number in range(EACH):
            path = root / name / f"{number % 7}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (SIZE, SIZE + number, 3), np.uint8)).save(path)
    (root / "owl" / "notes.md").touch()
    (root / ".hidden").mkdir()
    return root


@pytest.fixture(scope="module")
def dataset(images: Path) -> Path:
    return prepared(images, "--size", str(SIZE), *ALONE, *SHARDS, cwd=images.parent)


def test_images_come_back_whatever_the_number_of_processes(images: Path, dataset: Path, tmp_path: Path) -> None:
    done = prepare(images, tmp_path / "again", "--size", str(SIZE), "--workers", "3", *SHARDS, cwd=tmp_path)
    assert done.stdout[:1].isdigit(), "progress is for a terminal"
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "again") == contents(dataset) and len(list(dataset.glob("shard-*.bin"))) > 3
    found = opened({"prepared": str(dataset)})
    batch = found.fetch(np.arange(len(found)))
    assert len(found) == 3 * EACH and np.bincount(batch.targets.numpy()).tolist() == [EACH] * 3
    files = [file for name in CLASSES for file in sorted((images / name).rglob("*.jpg"))]
    for place, number in enumerate(stored(np.arange(len(found)), len(found)).tolist()):
        image = Image.open(files[number])
        left = (image.width - SIZE) / 2
        square = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC, (left, 0, left + SIZE, SIZE))
        assert np.array_equal(batch.inputs[place].numpy(), np.asarray(square).transpose(2, 0, 1)), files[number]
        assert CLASSES[int(batch.targets[place])] == files[number].relative_to(images).parts[0]


def test_images_of_one_size_and_any_mode_need_no_size(tmp_path: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (5, 7), np.uint8)
    for name, mode in (("a", "L"), ("b", "RGBA"), ("c", "RGB")):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.fromarray(grey).convert(mode).save(tmp_path / "in" / name / "image.PNG")
    batch = opened({"prepared": str(prepared("in", *ALONE, cwd=tmp_path))}).fetch(np.arange(3))
    assert np.array_equal(batch.inputs.numpy(), np.broadcast_to(grey, (3, 3, 5, 7)))
    Image.fromarray(grey[1:]).save(tmp_path / "in/b/other.png")
    done = prepare("in", "out", *ALONE, cwd=tmp_path)
    assert done.returncode == 2 and "other.png has 7 × 4 pixels" in done.stderr and "--size" in done.stderr
    Image.fromarray(grey.astype(np.uint16)).save(tmp_path / "in/b/other.png")
    assert "more than 8 bits" in prepare("in", "out", "--size", "4", *ALONE, cwd=tmp_path).stderr


def test_images_want_a_folder_for_each_class(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "in/image.png")
    done = prepare("in", "out", "--size", "4", *ALONE, cwd=tmp_path)
    assert done.returncode == 2 and "image.png" in done.stderr and "no folder for each class" in done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_broken_image_is_named(images: Path, tmp_path: Path, workers: str) -> None:
    for number, file in enumerate(sorted((images / "dog").rglob("*.jpg"))):
        (tmp_path / "in/dog").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"in/dog/{number}.jpg").write_bytes(file.read_bytes())
    first = sorted((tmp_path / "in/dog").iterdir())[int(stored(np.arange(1), EACH)[0])]
    os.truncate(first, 1000)  # when it is found, many are still to be read
    done = prepare("in", "out", "--size", "256", "--workers", workers, cwd=tmp_path)
    assert done.returncode == 2 and f"{first.name} cannot be read as an image" in done.stderr, done.stderr


def test_a_killed_preparation_goes_on(images: Path, dataset: Path, tmp_path: Path) -> None:
    dest, killed = tmp_path / "dataset", 0
    command = [SLIPSTREAM, "data", "prepare", str(images), str(dest), "--size", str(SIZE), *ALONE, *SHARDS]
    for _ in range(2):
        before = len(list(dest.glob("shard-*.bin")))
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
        while process.poll() is None and len(list(dest.glob("shard-*.bin"))) == before:
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed and not (dest / MANIFEST).exists()
    last = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert last.returncode == 0 and "going on after" in last.stdout, last.stderr
    assert contents(dest) == contents(dataset)


@settings(deadline=None, max_examples=30)
@given(
    samples=st.integers(1, 60),
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(["|u1", "<f4", "<i2", "|b1", "<f2"]),
    target=st.sampled_from([Numbers("<i8", ()), Numbers("<f4", (2,)), Numbers("<f4", (1, 3))]),
    shard=st.integers(1, 700),
    page=st.integers(1, 300),
    batches=st.lists(st.integers(0, 40), max_size=4),
)
def test_samples_are_those_that_were_written(
    samples: int, shape: tuple[int, ...], dtype: str, target: Numbers, shard: int, page: int, batches: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Whatever their shape, and the sizes of shards, pages and batches."""
    folder, draw = tmp_path_factory.mktemp("samples"), np.random.default_rng(samples)
    holds = Samples(Numbers(dtype, shape), target, outputs=5)
    items = np.empty(samples, holds.dtype)
    items["inputs"] = draw.integers(0, 100, items["inputs"].shape)
    items["target"] = draw.integers(0, 5, items["target"].shape)
    writer = ShardWriter(InFolder(folder), holds, {}, shard, page)
    for part in np.split(items, np.minimum(np.cumsum(batches), samples)):
        writer.add(part)
    task = "classification" if holds.has_classes else "regression"
    found = PreparedSamples(Shards(folder, writer.finish()), holds, task, "test")
    order = draw.permutation(samples)
    batch = found.fetch(order)
    assert len(found) == samples and batch.inputs.shape[1:] == found.facts.inputs == shape
    assert np.array_equal(batch.inputs.numpy(), items["inputs"][order])
    assert np.array_equal(batch.targets.numpy().reshape(samples, -1), items["target"][order].reshape(samples, -1))


@pytest.mark.parametrize(
    ("inputs", "targets", "task"),
    [
        (np.arange(60, dtype=np.uint8).reshape(20, 3), np.arange(20) % 3, "classification"),
        (np.arange(60).reshape(20, 3, 1) / 7, np.arange(20, dtype=np.int8)[:, None] % 4, "classification"),
        (np.arange(20, dtype=">i2"), np.arange(40).reshape(20, 2) / 3, "regression"),
        (np.arange(20, dtype=np.float16), np.arange(20), "regression"),
    ],
)
def test_arrays_give_what_they_give_directly(
    inputs: np.ndarray, targets: np.ndarray, task: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", inputs)
    np.save(tmp_path / "y.npy", targets)
    dest = prepared("x.npy", "--targets", "y.npy", cwd=tmp_path)
    direct = opened({"source": str(tmp_path / "x.npy"), "target": str(tmp_path / "y.npy")}, task)
    found = opened({"prepared": str(dest)}, task)
    assert found.facts == direct.facts and len(found) == len(direct)
    expected, batch = direct.fetch(stored(np.arange(20), 20)), found.fetch(np.arange(20))
    for ours, theirs in ((batch.inputs, expected.inputs), (batch.targets, expected.targets)):
        assert ours.dtype == theirs.dtype and ours.equal(theirs)


def test_mnist_gives_what_it_gives_directly(tmp_path: Path) -> None:
    import gzip
    from types import SimpleNamespace

    pixels = np.random.default_rng(0).integers(0, 256, (30, 4, 5), np.uint8)
    labels = np.arange(30, dtype=np.uint8) % 7
    (tmp_path / "in").mkdir()
    for name, values in (("images-idx3", pixels), ("labels-idx1", labels)):
        head = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes()
        (tmp_path / f"in/train-{name}-ubyte.gz").write_bytes(gzip.compress(head + values.tobytes()))
    found = opened({"prepared": str(prepared("in", cwd=tmp_path))})
    direct = opened({"source": "mnist", "path": str(tmp_path / "in")})
    expected, batch = direct.fetch(stored(np.arange(30), 30)), found.fetch(np.arange(30))
    job: Any = SimpleNamespace(data=None)
    assert batch.inputs.itemsize == 1 and batch.targets.equal(expected.targets)
    seen = [
        as_model_takes(each.inputs, job, dataset.facts.white, torch.float64)
        for each, dataset in ((batch, found), (expected, direct))
    ]
    assert seen[0].equal(seen[1]) and (found.facts.inputs, found.facts.outputs) == ((1, 4, 5), 7)


def test_tokens_of_npy_files(tmp_path: Path) -> None:
    rows = [np.random.default_rng(number).integers(0, 70_000, 500 + number) for number in range(2)]
    for number, row in enumerate(rows):
        np.save(tmp_path / f"{number}.npy", row)
    done = prepare("[01].npy", "out", "--vocabulary", "70000", cwd=tmp_path)
    assert done.returncode == 0 and "1,001 tokens of 2 documents" in done.stdout, done.stderr
    found = opened({"prepared": str(tmp_path / "out"), "sequence": 1000}, "next-token")
    assert np.array_equal(found.fetch(np.array([0])).targets[0].numpy(), np.concatenate(rows)[1:])
    with pytest.raises(ValueError, match=r"train.sample needs a tokeniser, and data.prepared .* without one"):
        opened({"prepared": str(tmp_path / "out"), "sequence": 8}, "next-token", sample={"prompt": "a"})
    done = prepare("0.npy", "other", "--vocabulary", str(rows[0].max()), cwd=tmp_path)
    assert done.returncode == 2 and f"token {rows[0].argmax()} is {rows[0].max()}, outside" in done.stderr
    assert "--vocabulary" in prepare("0.npy", "other", cwd=tmp_path).stderr


def test_what_does_not_fit_is_refused(dataset: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 2)))
    np.save(tmp_path / "y.npy", np.array([0, 1, -1, 2]))
    for words, expected in {
        ("x.npy", "out", "--targets", "y.npy"): "is -1 in row 3",
        ("x.npy", "out", "--targets", "x.npy", "--size", "4"): "--size has no effect on an .npy file",
        ("x.npy", "out", "--vocabulary", "9"): "samples need --targets",
        ("no*.npy", "out", "--vocabulary", "9"): "no file is named like that",
        ("y.npy", "out", "--vocabulary", "0"): "--vocabulary is 0; ids are kept in 32 bits",
        ("y.npy", "out", "--vocabulary", str(2**32 + 1)): "ids are kept in 32 bits",
        ("x.npy", str(dataset.parent / "pictures"), "out"): "prepare them apart",
    }.items():
        done = prepare(*words, cwd=tmp_path)
        assert done.returncode == 2 and expected in done.stderr, done.stderr
    numbers = prepared("x.npy", "--targets", "x.npy", cwd=tmp_path)
    with pytest.raises(ValueError, match=r"the targets of data.prepared .* are numbers"):
        opened({"prepared": str(numbers)})
    with pytest.raises(ValueError, match="holds whole samples, not tokens"):
        opened({"prepared": str(numbers), "sequence": 4}, "next-token")
    with pytest.raises(ValueError, match=r"sequence has no effect with train.task regression"):
        opened({"prepared": str(numbers), "sequence": 4}, "regression")
    with pytest.raises(ValueError, match=r"data.sequence is needed where tokens were prepared; train.task where"):
        opened({"prepared": str(numbers)}, task=None)  # type: ignore[arg-type]


def job(dataset: Path) -> dict[str, Any]:
    return {
        "name": "images",
        "model": {"kind": "linear"},
        "data": {"prepared": str(dataset), "validation": 0.1},
        "train": {
            "task": "classification",
            "steps": 4,
            "batch": 12,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "precision": "fp64",
        },
    }


def test_a_run_learns_from_images(dataset: Path, tmp_path: Path) -> None:
    words = ("--workers", "2", "--run-dir", "run")
    done = slipstream("train", write_job(tmp_path, job(dataset)), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(np.log(3), abs=0.3)  # bytes that are not divided by 255 give over ten
    assert lines[-1]["step"] == 4 and lines[-1]["val_loss"] > 0
    assert json.loads((tmp_path / "run/export/config.json").read_text())["facts"]["white"] == 255


def test_it_is_shown_and_a_flipped_byte_is_named(dataset: Path, tmp_path: Path) -> None:
    shown = slipstream("data", "inspect", dataset, cwd=tmp_path).stdout
    assert "3 × 64 × 64 |u1" in shown and "3: cat, dog, owl" in shown and f"{3 * EACH:,}" in shown
    values = json.loads(slipstream("data", "inspect", dataset, "--json", cwd=tmp_path).stdout)
    dtype = np.dtype([(name, kind, tuple(shape)) for name, kind, shape in values["dtype"]])
    first = opened({"prepared": str(dataset)}).fetch(np.array([0]))
    item = np.memmap(dataset / "shard-00000.bin", dtype, "r")[0]
    assert np.array_equal(item["inputs"], first.inputs[0].numpy()) and item["target"] == first.targets[0]
    copied = tmp_path / "copied"
    copied.mkdir()
    for name, data in contents(dataset).items():
        (copied / name).write_bytes(data)
    assert slipstream("data", "verify", copied, cwd=tmp_path).returncode == 0
    flip(copied / "shard-00002.bin", 500_000)
    done = slipstream("data", "verify", copied, cwd=tmp_path)
    assert done.returncode == 1 and "shard-00002.bin is damaged" in done.stderr
    with pytest.raises(DamagedShard, match=r"shard-00002.bin is damaged"):
        opened({"prepared": str(copied)}).fetch(np.arange(3 * EACH))
