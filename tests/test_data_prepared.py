"""Prepared datasets: the same bytes however they were made, and nothing that has changed reaches a model."""

import csv
import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import merge
from program import SLIPSTREAM, slipstream, write_job
from slipstream.data import open_dataset, windows
from slipstream.data.destinations import InFolder, claim
from slipstream.data.manifest import DOCUMENTS, MANIFEST, PAGES, TOKENIZER, read_manifest
from slipstream.data.pages import DamagedShard
from slipstream.data.prepared import Prepared
from slipstream.data.shards import Shards
from slipstream.data.tokenizer import Ids
from slipstream.data.writing import PROGRESS, ShardWriter
from slipstream.job import Job

DOCUMENTS_WRITTEN = 2600
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that a small tokeniser knows, for some shards."""
    draw, path = random.Random(3), tmp_path_factory.mktemp("text") / "documents.jsonl"
    with path.open("w") as file:
        for _ in range(DOCUMENTS_WRITTEN):
            file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(1, 800)))}) + "\n")
    return path


def prepare(text: Path, dest: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
    return slipstream("data", "prepare", text, dest, "--vocabulary", "300", "--shard", "1", *words, cwd=text.parent)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def dataset(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("prepared") / "dataset"
    done = prepare(text, dest, "--workers", "1")
    assert done.returncode == 0, done.stderr
    return dest


@pytest.fixture
def copied(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "dataset"))


def test_the_same_bytes_for_any_number_of_processes(text: Path, dataset: Path, tmp_path: Path) -> None:
    assert len(list(dataset.glob("shard-*.bin"))) > 2
    done = prepare(text, tmp_path / "dataset", "--workers", "3")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "dataset") == contents(dataset)


def test_all_text_is_there_in_its_order(text: Path, dataset: Path) -> None:
    from tokenizers import Tokenizer

    shards = Shards(dataset, read_manifest(dataset, "test"))
    offsets = shards.documents()
    tokens = np.concatenate([np.fromfile(path, "<u2") for path in sorted(dataset.glob("shard-*.bin"))])
    assert offsets[-1] == len(tokens) == shards.manifest.items
    tokenizer = Tokenizer.from_file(str(dataset / TOKENIZER))
    lines = text.read_text().splitlines()
    assert len(offsets) - 1 == len(lines) == shards.manifest.documents
    for number in (0, 1, DOCUMENTS_WRITTEN - 1):
        found = tokenizer.decode(tokens[offsets[number] : offsets[number + 1]].tolist())
        assert found == json.loads(lines[number])["text"]


def write_as(kind: str, texts: list[str], folder: Path) -> str:
    """The same documents in another kind of file; the source to name."""
    path = folder / f"documents{kind}"
    if kind == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": texts, "number": list(range(len(texts)))}), path)
    elif kind.startswith(".csv"):
        table = io.StringIO()
        csv.writer(table).writerows([["number", "text"], *enumerate(texts)])
        path.write_bytes(pack(kind, table.getvalue()))
    else:
        path.write_bytes(pack(kind, "".join(json.dumps({"text": text}) + "\n" for text in texts)))
    return str(path)


def pack(kind: str, text: str) -> bytes:
    if kind.endswith(".gz"):
        return gzip.compress(text.encode())
    if kind.endswith(".zst"):
        from backports import zstd

        return zstd.compress(text.encode())
    return text.encode()


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".csv", ".csv.gz", ".parquet"])
def test_the_same_bytes_from_any_kind_of_file(kind: str, tmp_path: Path) -> None:
    texts = [f"{word} {number}, of\nmany" for number, word in enumerate(WORDS * 20)]
    made = {}
    for each in (".jsonl", kind):
        folder = tmp_path / each
        folder.mkdir()
        source = write_as(each, texts, folder)
        done = slipstream("data", "prepare", source, folder / "dataset", "--vocabulary", "280", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        made[each] = contents(folder / "dataset")
    assert made[kind] == made[".jsonl"]


def test_several_sources_come_one_after_the_other(tmp_path: Path) -> None:
    for number, name in enumerate(("b.jsonl", "a.jsonl", "c.jsonl.gz")):
        (tmp_path / name).write_bytes(pack(name, json.dumps({"text": WORDS[number]}) + "\n"))
    (tmp_path / "last.txt").write_text("omega")
    words = ("last.txt", "dataset", "--vocabulary", "270")
    done = slipstream("data", "prepare", "[abc].jsonl*", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    from tokenizers import Tokenizer

    tokens = np.fromfile(tmp_path / "dataset/shard-00000.bin", "<u2").tolist()
    text = Tokenizer.from_file(str(tmp_path / "dataset" / TOKENIZER)).decode(tokens, skip_special_tokens=False)
    assert text.split("<|endoftext|>") == ["beta", "alpha", "gamma", "omega", ""]
    none = slipstream("data", "prepare", "*.parquet", "other", cwd=tmp_path)
    assert none.returncode == 2 and "no file is named like" in none.stderr


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = write_as(".csv", ["a"], tmp_path)
    done = slipstream("data", "prepare", source, "dataset", "--field", "txet", cwd=tmp_path)
    assert done.returncode == 2 and "there is no column 'txet'" in done.stderr and "'text'" in done.stderr
    packed = Path(write_as(".jsonl.gz", [random.Random(number).random().hex() for number in range(99)], tmp_path))
    os.truncate(packed, packed.stat().st_size // 2)
    done = slipstream("data", "prepare", "documents.jsonl.gz", "dataset", cwd=tmp_path)
    assert done.returncode == 2 and "cut off or damaged" in done.stderr


def test_a_killed_preparation_goes_on(text: Path, dataset: Path, tmp_path: Path) -> None:
    dest, killed = tmp_path / "dataset", 0
    for _ in range(30):
        command = [SLIPSTREAM, "data", "prepare", str(text), str(dest), "--vocabulary", "300", "--shard", "1"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
        before, until = len(list(dest.glob("shard-*.bin"))), time.monotonic() + 120
        while process.poll() is None and len(list(dest.glob("shard-*.bin"))) == before and time.monotonic() < until:
            time.sleep(0.01)
        if process.poll() is not None:
            assert process.returncode == 0, process.stderr and process.stderr.read()
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        killed += 1
        if (dest / MANIFEST).exists():  # it was quicker
            for name in (PROGRESS, ".lock"):
                (dest / name).unlink(missing_ok=True)
            break
    assert killed >= 2 and contents(dest) == contents(dataset)
    again = prepare(text, dest)
    assert again.returncode == 2 and "is a prepared dataset already" in again.stderr


def test_two_preparations_of_one_folder(text: Path, dataset: Path, tmp_path: Path) -> None:
    """The second is refused and leaves what the first has written; when that has ended, it goes on."""
    dest = tmp_path / "dataset"
    dest.mkdir()
    with claim(dest):
        (dest / TOKENIZER).write_bytes(b"of the first")
        done = prepare(text, dest)
        assert done.returncode == 2 and "is being prepared by another process" in " ".join(done.stderr.split())
        assert contents(dest) == {".lock": b"", TOKENIZER: b"of the first"}
    (dest / TOKENIZER).unlink()
    assert prepare(text, dest).returncode == 0
    assert contents(dest) == contents(dataset)


def test_a_preparation_that_is_stopped_says_that_it_goes_on(text: Path, tmp_path: Path) -> None:
    """It is stopped as soon as it holds its folder, with so much to do that it cannot be done before it hears of it."""
    dest, much = tmp_path / "dataset", tmp_path / "much.jsonl"
    much.write_text(10 * text.read_text())
    command = [SLIPSTREAM, "data", "prepare", str(much), str(dest), "--vocabulary", "300", "--shard", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (dest / ".lock").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on after the last whole shard" in said


def test_an_unfinished_preparation_of_something_else_is_not_gone_on_with(text: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dataset"
    dest.mkdir()
    (dest / "progress.json").write_text(json.dumps({"identity": {}, "shards": []}))
    done = prepare(text, dest)
    assert done.returncode == 2 and "unfinished preparation of other sources" in " ".join(done.stderr.split())


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 400),
    shard=st.integers(1, 60),
    page=st.integers(1, 40),
    batches=st.lists(st.integers(0, 150), max_size=8),
    length=st.integers(1, 30),
)
def test_rows_are_those_of_the_whole(
    tokens: int, shard: int, page: int, batches: list[int], length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the sizes of shards, pages and batches, and also where a row begins in one shard and ends in another."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / TOKENIZER).touch()
    whole = np.random.default_rng(tokens).integers(0, 1000, tokens).astype(np.uint16)
    writer = ShardWriter(InFolder(folder), Ids(1000, None, None), {}, shard=2 * shard, page=2 * page)
    for part in np.split(whole, np.minimum(np.cumsum(batches), tokens)):
        writer.add(part, np.array([len(part)] if len(part) else [], np.int64))
    shards = Shards(folder, writer.finish())
    assert shards.documents()[-1] == tokens
    if length <= tokens:
        starts = np.random.default_rng(0).integers(0, tokens - length + 1, 20)
        expected = np.stack([whole[start : start + length] for start in starts])
        assert np.array_equal(shards.rows(starts, length), expected)


@pytest.mark.parametrize("most", [2**62, 4000])
def test_rows_come_from_any_arrays_however_far_apart(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_MOST", most)  # where numpy cannot count all memory between them
    arrays = [np.arange(100, dtype=np.uint16) + 100 * number for number in range(5)]
    which, places = np.array([4, 0, 2, 2, 3]), np.array([0, 90, 17, 18, 5])
    addresses = np.array([windows.address_of(arrays[number]) for number in which]) + places * 2
    rows = windows.copy_rows(addresses, np.array([True, False, True, True, True]), 20, np.dtype(np.uint16))
    expected = np.stack([arrays[number][place : place + 20] for number, place in ((4, 0), (2, 17), (2, 18), (3, 5))])
    assert np.array_equal(rows[[0, 2, 3, 4]], expected)
    assert windows.copy_rows(addresses[:0], np.empty(0, bool), 20, np.dtype(np.uint16)).shape == (0, 20)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def swap(folder: Path, first: str, second: str) -> None:
    (folder / first).rename(folder / "other")
    (folder / second).rename(folder / first)
    (folder / "other").rename(folder / second)


def of_another_dataset(folder: Path) -> None:
    values = json.loads((folder / MANIFEST).read_text())
    values["sha256"] = dict.fromkeys(values["sha256"], "0" * 64)
    (folder / MANIFEST).write_text(json.dumps(values))


FAULTS: dict[str, tuple[Any, str]] = {
    "flipped": (lambda folder: flip(folder / "shard-00001.bin", 700_001), "shard-00001.bin is damaged"),
    "truncated": (lambda folder: os.truncate(folder / "shard-00001.bin", 5000), "shard-00001.bin has 5,000 bytes"),
    "missing": (lambda folder: (folder / "shard-00001.bin").unlink(), "shard-00001.bin is missing"),
    "swapped": (lambda folder: swap(folder, "shard-00000.bin", "shard-00001.bin"), "shard-0000"),
    "checksums": (lambda folder: flip(folder / PAGES, 0), "pages.bin is damaged"),
    "documents": (lambda folder: flip(folder / DOCUMENTS, 9), "documents.bin is damaged"),
    "manifest": (of_another_dataset, "is damaged, or of another dataset"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_has_changed_is_found_and_named(fault: str, copied: Path) -> None:
    damage, words = FAULTS[fault]
    damage(copied)
    done = slipstream("data", "verify", copied, cwd=copied.parent)
    assert done.returncode == 1 and words in done.stderr, done.stderr
    if fault == "documents":
        return  # not needed to train on packed sequences
    with pytest.raises(DamagedShard, match=words):
        dataset = Prepared(Shards(copied, read_manifest(copied, "test")), sequence=64, shift=1)
        dataset.fetch(np.arange(len(dataset)))


def test_a_damaged_shard_never_reaches_the_model(copied: Path, tmp_path: Path) -> None:
    flip(copied / "shard-00000.bin", 10)
    done = slipstream("train", write_job(tmp_path, job(copied)), cwd=tmp_path)
    assert done.returncode == 3 and "shard-00000.bin is damaged" in " ".join(done.stderr.split()), done.stderr


def job(dataset: Path) -> dict[str, Any]:
    return {
        "name": "prepared",
        "model": {"kind": "decoder", "layers": 1, "hidden": 16, "heads": 2},
        "data": {"prepared": str(dataset), "sequence": 512, "validation": 0.05},
        "train": {"samples": 72, "batch": 12, "optimizer": {"name": "adamw", "lr": 1e-3}, "precision": "fp64"},
    }


@pytest.fixture(scope="module")
def second(text: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other text, by the same tokeniser."""
    folder = tmp_path_factory.mktemp("second")
    lines = text.read_text().splitlines()[:600]
    (folder / "some.jsonl").write_text("\n".join(lines) + "\n")
    words = ("--tokenizer", str(dataset / TOKENIZER), "--shard", "1")
    done = slipstream("data", "prepare", "some.jsonl", "dataset", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "dataset"


def test_a_mix_has_the_samples_of_both(dataset: Path, second: Path) -> None:
    mixed, *alone = (
        open_dataset(Job.model_validate(merge(job(dataset), {"data.prepared": prepared})))
        for prepared in ({str(dataset): 3, str(second): 1}, str(dataset), str(second))
    )
    assert len(mixed) == sum(map(len, alone))
    numbers = np.random.default_rng(0).permutation(len(mixed))[:300]
    batch = mixed.fetch(numbers)
    for row, number in enumerate(numbers.tolist()):
        part, place = (0, number) if number < len(alone[0]) else (1, number - len(alone[0]))
        one = alone[part].fetch(np.array([place]))
        assert batch.inputs[row].equal(one.inputs[0]) and batch.targets[row].equal(one.targets[0])


def test_datasets_of_two_tokenisers_are_not_mixed(text: Path, dataset: Path, tmp_path: Path) -> None:
    done = slipstream("data", "prepare", text, "other", "--vocabulary", "310", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    mix = merge(job(dataset), {"data.prepared": {str(dataset): 1, "other": 1}})
    done = slipstream("train", write_job(tmp_path, mix), cwd=tmp_path)
    assert done.returncode == 2 and "cannot be mixed" in done.stderr and "--tokenizer" in done.stderr


def test_a_run_learns_from_a_mix_the_same_on_any_number_of_workers(dataset: Path, second: Path, tmp_path: Path) -> None:
    curves = []
    for workers in ("1", "3"):
        folder = tmp_path / workers
        folder.mkdir()
        path = write_job(folder, merge(job(dataset), {"data.prepared": {str(dataset): 0.7, str(second): 0.3}}))
        done = slipstream("train", path, "--workers", workers, "--run-dir", "run", cwd=folder)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        curves.append([line["loss"] for line in lines] + [lines[-1]["val_loss"]])
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)
    assert (tmp_path / "1/run/export/tokenizer.json").read_bytes() == (dataset / TOKENIZER).read_bytes()


def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    done = slipstream("train", write_job(tmp_path, job(tmp_path)), cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a prepared dataset" in done.stderr and "slipstream data prepare" in done.stderr


def test_it_is_shown(dataset: Path) -> None:
    done = slipstream("data", "inspect", dataset, "--json", cwd=dataset.parent)
    shown = json.loads(done.stdout)
    assert shown["documents"] == DOCUMENTS_WRITTEN and shown["items"] == sum(
        shard["items"] for shard in shown["shards"]
    )
    assert f"{shown['items']:,}" in slipstream("data", "inspect", dataset, cwd=dataset.parent).stdout


def test_what_was_there_is_left_alone(text: Path, tmp_path: Path) -> None:
    """Whatever becomes of a preparation: a folder of other files is refused, and a refusal takes back only its own."""
    for name in ("notes.md", "config.json", "weights.bin"):
        folder = tmp_path / name / "dest"
        folder.mkdir(parents=True)
        (folder / name).write_text("mine")
        done = prepare(text, folder)
        assert done.returncode == 2 and f"holds other files, such as {name}" in done.stderr
        assert contents(folder) == {name: b"mine"}
    (tmp_path / "bad.jsonl").write_text("no json\n")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/tokenizer.json").write_bytes(b"{}")
    for dest in ("kept", "new"):
        assert prepare(tmp_path / "bad.jsonl", tmp_path / dest).returncode == 2
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["tokenizer.json"]
    assert not (tmp_path / "new").exists()
