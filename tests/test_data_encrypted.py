"""Encrypted datasets: nothing can be read without the key, and nothing that has changed reaches a model."""

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import merge
from program import SLIPSTREAM, slipstream, write_job
from s3 import Server
from slipstream.data import tokenizer_json
from slipstream.data.destinations import InFolder
from slipstream.data.folder import Folder
from slipstream.data.held import HeldShards
from slipstream.data.keys import KEY, KEY_FILE, KEY_SERVICE, new_key
from slipstream.data.manifest import DOCUMENTS, MANIFEST, PAGES, TOKENIZER, read_manifest
from slipstream.data.opened import OpenedShards
from slipstream.data.page_cache import PageCache
from slipstream.data.pages import DamagedShard
from slipstream.data.prepared import open_prepared
from slipstream.data.sealing import guard_of, guard_to_write
from slipstream.data.tokenizer import Ids
from slipstream.data.writing import PROGRESS, ShardWriter
from slipstream.job import Job
from test_data_prepared import WORDS, contents, flip, job, prepare, swap
from transit import TOKEN, Transit

OURS, OTHER = new_key(), new_key()
NO_CACHE = PageCache(Path(), 0, page=1)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (KEY_FILE, KEY_SERVICE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(KEY, OURS)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    texts = [" ".join(WORDS[(number * step) % 12] for step in range(700)) for number in range(1000)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def made(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same text plain and encrypted."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, OURS)
        for name, words in (("plain", ()), ("sealed", ("--encrypt",))):
            done = prepare(text, folder / name, "--workers", "1", *words)
            assert done.returncode == 0, done.stderr
    return {name: folder / name for name in ("plain", "sealed")}


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["sealed"], tmp_path / "dataset"))


def parsed(dataset: Path | str) -> Job:
    return Job.model_validate(merge(job(Path("x")), {"data.prepared": str(dataset)}))


def samples(dataset: Path | str) -> np.ndarray:
    wanted = parsed(dataset)
    opened = open_prepared(wanted.data, wanted)  # type: ignore[arg-type]
    return opened.fetch(np.random.default_rng(0).permutation(len(opened))).inputs.numpy()


def opened(folder: Path) -> OpenedShards:
    manifest = read_manifest(folder, "test")
    return OpenedShards(folder, manifest, guard_of(manifest, str(folder)))


def held(folder: Path) -> HeldShards:
    """As it would be read from object storage."""
    manifest = read_manifest(folder, "test")
    return HeldShards(Folder(folder, manifest), manifest, NO_CACHE, guard_of(manifest, str(folder)))


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 900), shard=st.integers(60, 300), page=st.integers(1, 64), length=st.integers(1, 400),
    batches=st.lists(st.integers(0, 200), max_size=5),
)  # fmt: skip
def test_any_tokens_come_back(
    tokens: int, shard: int, page: int, length: int, batches: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the sizes of shards, pages and batches, also where a row begins in one page and ends in another."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / TOKENIZER).touch()
    whole = np.random.default_rng(tokens).integers(0, 1000, tokens).astype(np.uint16)
    guard = guard_to_write(folder, encrypt=True)
    writer = ShardWriter(InFolder(folder), Ids(1000, None, None), {}, shard=2 * shard, page=2 * page, guard=guard)
    ends = np.minimum(np.cumsum(batches), tokens)
    for part in np.split(whole, ends):
        writer.add(part, np.array([len(part)] if len(part) else [], np.int64))
    writer.finish()
    for shards in (opened(folder), held(folder)):
        assert shards.documents().tolist() == sorted({0, *ends.tolist(), tokens})
        if length <= tokens:
            starts = np.random.default_rng(0).integers(0, tokens - length + 1, 20)
            assert np.array_equal(shards.rows(starts, length), _rows(whole, starts, length))


def _rows(whole: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return np.stack([whole[start : start + length] for start in starts])


@settings(max_examples=40, deadline=None)
@given(
    page=st.integers(4, 200), length=st.integers(1, 90), step=st.integers(1, 30), window=st.integers(1, 200),
    batch=st.integers(1, 30), workers=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_windows_are_as_if_read_one_row_at_a_time(
    page: int, length: int, step: int, window: int, batch: int, workers: int, seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Batches that lie in one window, in two, or in none; a worker's part of each; samples to judge on in between; and
    what the loop still has stays as it was."""
    folder = tmp_path_factory.mktemp("windows")
    (folder / TOKENIZER).touch()
    whole = np.random.default_rng(seed).integers(0, 2**16, 2000).astype(np.uint16)
    guard = guard_to_write(folder, encrypt=True)
    writer = ShardWriter(InFolder(folder), Ids(2**16, None, None), {}, shard=600, page=2 * page, guard=guard)
    writer.add(whole, np.array([len(whole)]))
    writer.finish()
    shards = opened(folder)
    order = np.random.default_rng(seed).permutation((len(whole) - length) // step) * step
    kept = []
    for at in range(0, len(order), batch):
        if at // window != (at - batch) // window:
            first = at // window * window
            shards.expect(order[first : first + window], length)
            shards.expect(order[first + window : first + 2 * window], length)
        mine = order[at : at + batch][seed % workers :: workers]
        kept.append((shards.rows(mine, length), _rows(whole, mine, length) if len(mine) else np.empty((0, length))))
        if at // batch % 5 == 1:
            held_out = order[(at * 7) % len(order) :][:3]
            assert np.array_equal(shards.rows(held_out, length), _rows(whole, held_out, length))
    for found, expected in kept:
        assert np.array_equal(found, expected)


def test_samples_and_tokeniser_are_those_of_the_plain_one(made: dict[str, Path]) -> None:
    assert np.array_equal(samples(made["sealed"]), samples(made["plain"]))
    assert tokenizer_json(parsed(made["sealed"])) == (made["plain"] / TOKENIZER).read_bytes()


def reveals(data: bytes, plain: dict[str, bytes]) -> bool:
    """Whether there is any of the text, or of the plain files, in these bytes."""
    pieces = [plain[name][at : at + 24] for name in (TOKENIZER, DOCUMENTS) for at in range(0, len(plain[name]), 4096)]
    pieces += [plain["shard-00000.bin"][at : at + 24] for at in range(0, 2**20, 4096)]
    return any(piece in data for piece in (*pieces, b"alpha", b"merges", OURS.encode(), base64.b64decode(OURS)))


def test_nothing_of_it_can_be_read_in_the_files(made: dict[str, Path]) -> None:
    plain = contents(made["plain"])
    assert reveals(plain[TOKENIZER], plain) and reveals(plain["shard-00000.bin"], plain)
    sealed = contents(made["sealed"])
    assert set(sealed) == set(plain)
    for name, data in sealed.items():
        assert not reveals(data, plain), name
        assert not name.startswith("shard") or len(np.unique(np.frombuffer(data, np.uint8))) == 256


def test_without_the_key_it_is_refused_and_with_another_named(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_job(tmp_path, job(made["sealed"]))
    monkeypatch.delenv(KEY)
    for words in (("train", path), ("data", "verify", made["sealed"])):
        done = slipstream(*words, cwd=tmp_path)
        assert done.returncode == 2 and "is encrypted, and needs a key: set SLIPSTREAM_DATA_KEY" in done.stderr
    shown = slipstream("data", "inspect", made["sealed"], cwd=tmp_path).stdout
    ours = read_manifest(made["sealed"], "test").seal
    assert ours is not None and f"for key {ours.key}" in shown and "1,000" in shown
    monkeypatch.setenv(KEY, OTHER)
    done = slipstream("train", path, cwd=tmp_path)
    assert done.returncode == 2 and f"{made['sealed']} was encrypted for key {ours.key}, and" in done.stderr
    assert "SLIPSTREAM_DATA_KEY is key " in done.stderr and OTHER not in done.stderr
    refused = slipstream("data", "prepare", "x.txt", "new", "--encrypt", cwd=tmp_path)
    assert refused.returncode == 2 and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        (KEY, "short", "neither base64 nor hex"),
        (KEY, base64.b64encode(bytes(16)).decode(), "holds 16 bytes instead of 32"),
        (KEY_FILE, "nowhere", "nowhere cannot be read"),
        (KEY_SERVICE, "aws", "must be vault:NAME"),
        (KEY_SERVICE, "vault:mine", "needs VAULT_ADDR and VAULT_TOKEN"),
    ],
)
def test_a_key_that_is_none_is_refused(
    variable: str, value: str, words: str, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=words) as caught:
        opened(made["sealed"])
    assert variable == KEY_FILE or value not in str(caught.value) or value.startswith("vault")


def swap_pages(folder: Path) -> None:
    """The first page of one shard and of the next, with their nonces and tags."""
    for name, size, far in (("shard-00000.bin", 2**20, "shard-00001.bin"), (PAGES, 28, PAGES)):
        first, second = bytearray((folder / name).read_bytes()), bytearray((folder / far).read_bytes())
        if name == PAGES:
            first[:size], first[size : 2 * size] = first[size : 2 * size], first[:size]
        else:
            first[:size], second[:size] = second[:size], first[:size]
            (folder / far).write_bytes(second)
        (folder / name).write_bytes(first)


def claim(folder: Path, **values: Any) -> None:
    known = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**known, **values}))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (lambda folder: flip(folder / "shard-00001.bin", 70_001), "shard-00001.bin is damaged"),
    "truncated": (lambda folder: os.truncate(folder / "shard-00001.bin", 5000), "shard-00001.bin has 5,000 bytes"),
    "missing": (lambda folder: (folder / "shard-00001.bin").unlink(), "shard-00001.bin is missing"),
    "swapped shards": (lambda folder: swap(folder, "shard-00000.bin", "shard-00001.bin"), "shard-0000"),
    "tag": (lambda folder: flip(folder / PAGES, 20), "pages.bin is damaged"),
    "manifest": (lambda folder: claim(folder, documents=5), "manifest.json is damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_has_changed_is_found_and_named(fault: str, copied: Path) -> None:
    damage, words = FAULTS[fault]
    damage(copied)
    done = slipstream("data", "verify", copied, cwd=copied.parent)
    assert done.returncode in (1, 2) and words in done.stderr, done.stderr
    with pytest.raises(ValueError, match=words):
        samples(copied)


def test_a_page_opens_only_in_its_own_place(copied: Path) -> None:
    """Also for one who moves nonces and tags along, if the manifest did not tell."""
    before = read_manifest(copied, "test")
    guard = guard_of(before, str(copied))
    stored, records = (copied / "shard-00000.bin").read_bytes(), (copied / PAGES).read_bytes()
    page, into = stored[: before.page], memoryview(bytearray(before.page + 16))
    assert guard.open_page("shard-00000.bin", 0, page, records[:28], into)
    assert not guard.open_page("shard-00001.bin", 0, page, records[:28], into)
    assert not guard.open_page("shard-00000.bin", before.page, page, records[:28], into)
    swap_pages(copied)
    manifest = read_manifest(copied, "test")
    with pytest.raises(DamagedShard, match=r"pages.bin is damaged"):
        HeldShards(Folder(copied, manifest), manifest, NO_CACHE, guard)


def test_a_damaged_shard_never_reaches_the_model(copied: Path, tmp_path: Path) -> None:
    flip(copied / "shard-00000.bin", 10)
    done = slipstream("train", write_job(tmp_path, job(copied)), cwd=tmp_path)
    assert done.returncode == 3 and "shard-00000.bin is damaged" in " ".join(done.stderr.split()), done.stderr


def test_masked_tokens_are_learned_from_plain_and_encrypted_alike(made: dict[str, Path], tmp_path: Path) -> None:
    bert = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes = {
        "model": {"huggingface": {**bert, "intermediate_size": 16}}, "data.sequence": 64, "train.samples": 24,
        "train.task": "masked-token",
    }  # fmt: skip
    lines = []
    for dataset in made.values():
        values = merge(job(dataset), changes)
        done = slipstream("train", write_job(tmp_path, values), "--run-dir", dataset.name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines.append([json.loads(line)["loss"] for line in (tmp_path / dataset.name / "metrics.jsonl").open()])
    assert lines[0] == lines[1] and len(lines[0]) == 2


def test_tokens_without_a_tokeniser_cannot_be_masked(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(3000, dtype=np.uint16) % 100)
    done = slipstream("data", "prepare", "tokens.npy", "dataset", "--vocabulary", "100", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = {"huggingface": {"model_type": "bert", "hidden_size": 16}}
    values = {"model": model, "train.task": "masked-token", "data.sequence": 64}
    wanted = Job.model_validate(merge(job(tmp_path / "dataset"), values))
    with pytest.raises(ValueError, match=r"needs a tokeniser that has a mask token, and .* was prepared without one"):
        open_prepared(wanted.data, wanted)  # type: ignore[arg-type]


def test_a_manifest_that_does_not_say_how_it_was_encrypted_is_refused(copied: Path) -> None:
    values = json.loads((copied / MANIFEST).read_text())
    (copied / MANIFEST).write_text(json.dumps({**values, "seal": "x"}))
    with pytest.raises(ValueError, match=r"manifest.json is damaged \(it does not say how it was encrypted\)"):
        read_manifest(copied, "test")


def test_a_run_learns_from_it_and_leaves_no_key(made: dict[str, Path], tmp_path: Path) -> None:
    done = slipstream("train", write_job(tmp_path, job(made["sealed"])), "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or OURS.encode() not in path.read_bytes(), path
    assert (tmp_path / "run/export/tokenizer.json").read_bytes() == (made["plain"] / TOKENIZER).read_bytes()


def test_a_killed_preparation_goes_on_under_the_same_key(text: Path, made: dict[str, Path], tmp_path: Path) -> None:
    dest = tmp_path / "dataset"
    command = [SLIPSTREAM, "data", "prepare", text, dest, "--vocabulary", "300", "--shard", "1", "--workers", "1"]
    process = subprocess.Popen([*map(str, command), "--encrypt"], stdout=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 60
    while not (dest / PROGRESS).exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (dest / MANIFEST).exists(), "it was too quick to be killed"
    assert not any(reveals(data, contents(made["plain"])) for data in contents(dest).values())
    plain = prepare(text, dest)
    assert plain.returncode == 2 and "unfinished preparation of other sources or settings" in plain.stderr
    done = prepare(text, dest, "--workers", "1", "--encrypt")
    assert done.returncode == 0 and "going on after" in done.stdout, done.stderr
    assert np.array_equal(samples(dest), samples(made["plain"]))
    assert opened(dest).documents().tobytes() == (made["plain"] / DOCUMENTS).read_bytes()
    nonces = np.frombuffer((dest / PAGES).read_bytes(), np.uint8).reshape(-1, 28)[:, :12]
    assert len(np.unique(nonces, axis=0)) == len(nonces)


def test_the_key_may_be_in_a_file(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(base64.b64decode(OURS).hex() + "\n")
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    with pytest.raises(ValueError, match="are both set"):
        opened(copied)
    monkeypatch.delenv(KEY)
    assert opened(copied).documents()[0] == 0
    made = slipstream("data", "new-key", cwd=tmp_path).stdout
    assert len(base64.b64decode(made)) == 32


@pytest.fixture
def transit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transit]:
    service = Transit("mine", "theirs")
    monkeypatch.delenv(KEY)
    for name, value in ((KEY_SERVICE, "vault:mine"), ("VAULT_ADDR", service.address), ("VAULT_TOKEN", TOKEN)):
        monkeypatch.setenv(name, value)
    yield service
    service.close()


def test_the_key_may_stay_in_a_service(
    transit: Transit, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("alpha beta")
    done = slipstream("data", "prepare", "a.txt", "dataset", "--vocabulary", "270", "--encrypt", cwd=tmp_path)
    assert done.returncode == 0 and "key vault:mine" in done.stdout, done.stderr
    assert slipstream("data", "verify", "dataset", cwd=tmp_path).returncode == 0
    dataset = tmp_path / "dataset"
    assert not any(TOKEN.encode() in data for data in contents(dataset).values())
    with pytest.raises(ValueError, match=r"was encrypted for key .* is key vault:mine"):
        opened(made["sealed"])
    for name, value, words in (
        (KEY_SERVICE, "vault:theirs", "was encrypted for key vault:mine, and .* is key vault:theirs"),
        ("VAULT_TOKEN", "wrong", "decrypt/mine answered 403: permission denied"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=words):
            patch.setenv(name, value)
            opened(dataset)
    transit.close()
    with pytest.raises(ValueError, match="does not answer"):
        opened(dataset)


def test_in_object_storage_and_on_disk_pages_are_encrypted(
    text: Path, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        server.make_bucket("data")
        for name, value in {**server.environment, "SLIPSTREAM_CACHE": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        done = prepare(text, "s3://data/sealed", "--encrypt")
        assert done.returncode == 0, done.stderr
        for _ in range(2):
            assert np.array_equal(samples("s3://data/sealed"), samples(made["plain"]))
        plain = contents(made["plain"])
        assert tokenizer_json(parsed("s3://data/sealed")) == plain[TOKENIZER]
        kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size]
        assert kept and not any(reveals(path.read_bytes(), plain) for path in kept)
        flip(next(path for path in kept if path.name.startswith("run-")), 5)  # what was damaged here is fetched again
        assert np.array_equal(samples("s3://data/sealed"), samples(made["plain"]))
    finally:
        server.kill()
