"""Prepared datasets in object storage: on a real S3 server, which may fail."""

import errno
import gzip
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jobs import merge
from program import slipstream, start, write_job
from s3 import Server, free_ports, serving
from slipstream.data import open_dataset, page_cache
from slipstream.data.destinations import InStorage
from slipstream.data.held import HeldShards, remote_manifest
from slipstream.data.holding import Ids
from slipstream.data.manifest import PAGE, TOKENIZER, read_manifest
from slipstream.data.page_cache import PageCache
from slipstream.data.pages import DamagedShard
from slipstream.data.shards import Shards
from slipstream.data.storage import Storage, StorageGone
from slipstream.data.writing import ShardWriter
from slipstream.job import Job
from slipstream.plan import make_plan
from slipstream.plan.machine import ANY_MACHINE
from slipstream.runs import Pulse
from slipstream.runs.pulse import create_pulse
from slipstream.train import batches
from slipstream.train.batches import Batches
from test_data_prepared import WORDS, contents, flip, job, prepare

TEXTS = [" ".join(WORDS[(number * step) % 12] for step in range(700)) for number in range(1800)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "data") as server:
        yield server


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    text = folder / "documents.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    done = prepare(text, folder / "dataset")
    assert done.returncode == 0, done.stderr
    return folder / "dataset"


@pytest.fixture(scope="module")
def address(server: Server, local: Path) -> str:  # noqa: ARG001
    done = prepare(local.parent / "documents.jsonl", "s3://data/corpus")
    assert done.returncode == 0, done.stderr
    return "s3://data/corpus"


def opened(address: str, cache: PageCache, patience: float = 60) -> HeldShards:
    storage = Storage(address, patience)
    return HeldShards(storage, remote_manifest(storage, "test"), cache)


def some_rows(shards: Any, seed: int = 0) -> np.ndarray:
    starts = np.random.default_rng(seed).integers(0, shards.manifest.items - 300, 200)
    rows: np.ndarray = shards.rows(starts, 300)
    return rows


def test_what_is_uploaded_is_what_would_be_in_a_folder(address: str, local: Path) -> None:
    storage = Storage(address)
    assert len(list(local.glob("shard-*.bin"))) > 2
    for name, data in contents(local).items():
        assert bytes(storage.read(name)) == data


def test_it_can_be_looked_at_and_checked_there(address: str, local: Path) -> None:
    near, far = (slipstream("data", "inspect", where, "--json", cwd=local.parent) for where in (local, address))
    assert far.returncode == 0 and far.stdout == near.stdout
    checked = slipstream("data", "verify", address, cwd=local.parent)
    assert checked.returncode == 0 and "are as they were prepared" in checked.stdout, checked.stderr


def test_a_dataset_there_is_never_written_over(address: str, local: Path) -> None:
    done = prepare(local.parent / "documents.jsonl", address)
    assert done.returncode == 2 and f"{address} is a prepared dataset already" in done.stderr


def test_text_is_read_from_there(server: Server, local: Path, tmp_path: Path) -> None:  # noqa: ARG001
    """Files like a pattern, and in a folder below another, give the bytes that the same files give here."""
    lines = (local.parent / "documents.jsonl").read_bytes().splitlines(keepends=True)
    parts = {"raw/a.jsonl": b"".join(lines[:900]), "raw/b.jsonl.gz": gzip.compress(b"".join(lines[900:]))}
    for name, data in {**parts, "raw/c.json": b"[]", "raw/below/d.jsonl": lines[0]}.items():
        Storage("s3://data").write(name, data)
    tokenizer = ("--tokenizer", str(local / TOKENIZER))
    words = ("s3://data/raw/*.jsonl*", tmp_path / "dataset", "--shard", "1", *tokenizer)
    done = slipstream("data", "prepare", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "dataset") == contents(local)
    missing = slipstream("data", "prepare", "s3://data/rew/*.jsonl", tmp_path / "other", cwd=tmp_path)
    assert missing.returncode == 2 and "there is no file like s3://data/rew/*.jsonl" in missing.stderr


def test_arrays_and_images_are_read_from_there(server: Server, tmp_path: Path) -> None:  # noqa: ARG001
    draw = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", draw.normal(size=(50, 3)).astype(np.float32))
    np.save(tmp_path / "y.npy", draw.integers(0, 4, 50))
    for kind in ("cat", "owl"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        Image.fromarray(draw.integers(0, 256, (9, 9, 3), np.uint8)).save(tmp_path / "pictures" / kind / "1.png")
    storage = Storage("s3://data/sources")
    for path in tmp_path.rglob("*.*"):
        storage.write(str(path.relative_to(tmp_path)), path)
    for source, *words in (("x.npy", "--targets", "y.npy"), ("pictures",)):
        made = []
        for root in ("", "s3://data/sources/"):
            dest = tmp_path / f"{source}-{len(root)}"
            found = [f"{root}{word}" if word.endswith(".npy") else word for word in words]
            done = slipstream("data", "prepare", f"{root}{source}", dest, *found, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            made.append(contents(dest))
        assert made[0] == made[1]


def test_a_preparation_that_was_killed_goes_on_there(server: Server, local: Path, tmp_path: Path) -> None:  # noqa: ARG001
    """What is on its way is there, but is no dataset; what was done is not done again."""
    text, storage, killed = local.parent / "documents.jsonl", Storage("s3://data/again"), 0
    options = ("--tokenizer", str(local / TOKENIZER), "--shard", "1", "--workers", "1")
    words = ("data", "prepare", str(text), "s3://data/again", *options)
    while killed < 2:
        before = len(storage.listed())
        process = start(*words, cwd=tmp_path)
        until = time.monotonic() + 120
        while len(storage.listed()) == before and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert process.poll() is None, "it must not be done yet"
        process.kill()
        process.wait()
        killed += 1
    assert not storage.find("manifest.json")
    done = slipstream(*words, cwd=tmp_path)
    assert done.returncode == 0 and "going on after" in done.stdout, done.stderr
    for name, data in contents(local).items():
        assert bytes(storage.read(name)) == data


@pytest.mark.parametrize("limit", [0, 10**9])
def test_rows_are_those_of_the_folder_cold_and_warm(address: str, local: Path, limit: int, tmp_path: Path) -> None:
    expected = some_rows(Shards(local, read_manifest(local, "test")))
    for _ in range(2):
        assert np.array_equal(some_rows(opened(address, PageCache(tmp_path / "set", limit, PAGE))), expected)
    kept = list(tmp_path.glob("set/run-*"))
    assert bool(kept) == bool(limit)
    if kept:
        flip(kept[0], 5)  # what is damaged here is fetched again, and so is what was written in part
        os.truncate(kept[-1], kept[-1].stat().st_size // 2)
        assert np.array_equal(some_rows(opened(address, PageCache(tmp_path / "set", limit, PAGE))), expected)


def test_the_cache_is_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    cache = PageCache(tmp_path / "set", limit=10 * 8 * 4096, page=4000)
    for page in range(0, 96, 2):
        cache.put([(page, memoryview(bytes([page] * 4000))), (page + 1, memoryview(bytes([page + 1] * 3000)))])
    kept = sorted(int(path.name.removeprefix("run-")) for path in tmp_path.glob("set/run-*"))
    assert len(kept) <= 10 and kept[-1] == 11
    assert cache.get(0, 4000) is None
    assert (cache.get(94, 4000), cache.get(95, 3000)) == (bytes([94] * 4000), bytes([95] * 3000))


def test_pages_are_kept_where_a_disk_takes_nothing_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, start: int, data: memoryview, direct: int) -> None:
        if direct:
            raise OSError(errno.EINVAL, "not here")
        write(path, start, data, direct)

    write = page_cache._write_at
    monkeypatch.setattr(page_cache, "_write_at", refuse)
    cache = PageCache(tmp_path / "set", limit=10**9, page=100)
    cache.put([(17, memoryview(b"some")), (18, memoryview(b"more"))])
    assert [cache.get(page, 4) for page in (16, 17, 18, 19)] == [None, b"some", b"more", None]


def test_without_a_place_for_pages_it_goes_on_and_says_so(address: str, local: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="no longer kept"):
        cache = PageCache(tmp_path / "file" / "set", limit=10**9, page=PAGE)
    expected = some_rows(Shards(local, read_manifest(local, "test")))
    assert np.array_equal(some_rows(opened(address, cache)), expected)


def test_what_has_changed_there_is_found_and_named(server: Server, local: Path) -> None:  # noqa: ARG001
    for name, data in contents(local).items():
        changed = bytearray(data)
        if name == "shard-00001.bin":
            changed[1000] ^= 1
        Storage("s3://data/changed").write(name, bytes(changed))
    with pytest.raises(DamagedShard, match=r"s3://data/changed/shard-00001.bin is damaged"):
        some_rows(opened("s3://data/changed", PageCache(Path(), 0, PAGE)))


def test_samples_are_those_of_the_folder(server: Server, tmp_path: Path) -> None:  # noqa: ARG001
    draw = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", draw.integers(0, 256, (3000, 1000), np.uint8))
    np.save(tmp_path / "y.npy", draw.integers(0, 9, 3000))
    found = []
    for dest in (str(tmp_path / "samples"), "s3://data/samples"):
        words = ("x.npy", dest, "--targets", "y.npy", "--shard", "1")
        done = slipstream("data", "prepare", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        task = {"train.task": "classification", "model": {"kind": "linear"}}
        found.append(open_dataset(Job.model_validate(merge(job(Path()), {**task, "data": {"prepared": dest}}))))
    assert found[1].facts == found[0].facts and len(found[1]) == len(found[0]) == 3000
    near, far = (each.fetch(np.random.default_rng(1).permutation(3000)[:500]) for each in found)
    assert far.inputs.equal(near.inputs) and far.targets.equal(near.targets)


def remote_job(address: str) -> dict[str, Any]:
    return merge(job(Path(address)), {"data.prepared": address})


def test_a_run_learns_the_same_from_afar(address: str, local: Path, tmp_path: Path) -> None:
    curves = []
    for name, values in (("near", job(local)), ("far", remote_job(address))):
        folder = tmp_path / name
        folder.mkdir()
        path = write_job(folder, values)
        done = slipstream("train", path, "--workers", "2", "--run-dir", "run", cwd=folder)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        curves.append([line["loss"] for line in lines])
    assert curves[0] == curves[1]
    assert (tmp_path / "far/run/export/tokenizer.json").read_bytes() == (local / TOKENIZER).read_bytes()


def test_what_is_not_there_is_said(server: Server, tmp_path: Path) -> None:  # noqa: ARG001
    done = slipstream("train", write_job(tmp_path, remote_job("s3://data/nothing")), cwd=tmp_path)
    assert done.returncode == 2 and "s3://data/nothing/manifest.json is missing" in done.stderr


def test_who_says_not_who_they_are_is_told_what_to_set(
    server: Server,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the environment says nothing, the cloud's machine is asked: here nobody answers in its place."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(StorageGone, match="who you are: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        Storage("s3://data/fine", patience=0.5).find("manifest.json")
    with pytest.raises(ValueError, match=r"az://data: .*Account.*: set AZURE_STORAGE_ACCOUNT_NAME"):
        Storage("az://data")


@pytest.fixture(scope="module")
def fine(server: Server) -> str:  # noqa: ARG001
    """A dataset of so small pages that a run asks for new ones all the time."""
    return in_storage("s3://data/fine", 2_000_000)


def in_storage(address: str, count: int) -> str:
    dest = InStorage(address)
    dest.folder.mkdir(parents=True)
    writer = ShardWriter(dest, Ids(64, None, None), {}, shard=2**18, page=2048)
    tokens = np.random.default_rng(0).integers(0, 64, count).astype(np.uint8)
    writer.add(tokens, np.array([len(tokens)]))
    writer.finish()
    return address


def test_a_run_waits_for_its_storage_or_saves_and_says_so(server: Server, fine: str, tmp_path: Path) -> None:
    """The server is gone for 20 s under two runs. The patient one waits and goes on; the other ends with a checkpoint,
    and goes on when it is resumed. Both learn the same."""
    values = merge(remote_job(fine), {
        "model": {"kind": "decoder", "layers": 1, "hidden": 16, "heads": 1}, "data.sequence": 32, "data.cache": "0B",
        "train.steps": 500, "train.samples": None, "train.batch": 64, "checkpoint.every": 100_000,
    })  # fmt: skip
    runs = {}
    for name, patience in (("patient", "10m"), ("hasty", "3s")):
        path = write_job(tmp_path, merge(values, {"data.patience": patience, "limits.step": "20m"}), f"{name}.yaml")
        runs[name] = start("train", path, "--workers", "2", "--run-dir", name, cwd=tmp_path)
    for name, running in runs.items():
        wait_for_steps(running, tmp_path / name / "metrics.jsonl", 10)
    server.kill()
    killed = time.monotonic()
    try:
        output, _ = runs["hasty"].communicate(timeout=180)
        assert runs["hasty"].returncode == 7, output
        assert "StorageGone: s3://data/fine/shard-" in output and "`slipstream resume` goes on" in output
        done = steps_of(tmp_path / "hasty/metrics.jsonl")
        assert [path.name for path in (tmp_path / "hasty/checkpoints").iterdir()] == [f"step-{done:08d}"]
        refused = slipstream("train", tmp_path / "hasty.yaml", cwd=tmp_path)
        assert refused.returncode == 7
        assert "does not answer: s3://data/fine/manifest.json cannot be read" in refused.stderr
        time.sleep(max(0.0, killed + 20 - time.monotonic()))
    finally:
        server.start()
    resumed = slipstream("resume", "hasty", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    output, _ = runs["patient"].communicate(timeout=180)
    assert runs["patient"].returncode == 0, output
    curves = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in runs
    ]
    assert len(curves[0]) == 500 and curves[0] == curves[1]


def steps_of(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_steps(running: "subprocess.Popen[str]", metrics: Path, steps: int) -> None:
    until = time.monotonic() + 120
    while steps_of(metrics) < steps:
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < until, f"no {steps} steps"
        time.sleep(0.05)


def seen_by(workers: int, address: str, folder: Path, after: int = 0, **settings: Any) -> dict[int, tuple[int, bytes]]:
    """What each position of a run gets, by the number of the sample and its tokens, over all workers."""
    changes = {"data.sequence": 64, "train.samples": None, "train.epochs": 1.3, "train.batch": 100, **settings}
    wanted = Job.model_validate(merge(remote_job(address), {"data.validation": 0.02, **changes}))
    plan, seen = make_plan(wanted, ANY_MACHINE, workers=workers), {}
    create_pulse(folder / "pulse", 1)
    for rank in range(workers):
        for share in Batches(wanted, plan, open_dataset(wanted), rank).from_sample(after, Pulse(folder / "pulse", 0)):
            for micro in share.micro_batches:
                samples = zip(micro.indices.tolist(), micro.inputs.numpy(), strict=True)
                found = [(number, tokens.tobytes()) for number, tokens in samples]
                seen |= dict(zip(micro.positions.tolist(), found, strict=True))
    return seen


def test_the_order_of_samples_is_that_of_the_job_alone(
    server: Server,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not of workers, of how much is fetched ahead, of the cache, or of where a run goes on."""
    tiny = in_storage("s3://data/tiny", 200_000)
    whole = seen_by(1, tiny, tmp_path)
    training = 3124 - round(0.02 * 3124)
    epoch = {whole[position][0] for position in range(training)}
    assert sorted(whole) == list(range(4000)) and len(epoch) == training, "each of an epoch once"
    for workers, ahead, cache in ((2, 2**21, "1GB"), (3, 1, "1GB"), (8, 2**16, "0B"), (1, 2**24, "1MB")):
        monkeypatch.setattr(batches, "_AT_ONCE", ahead)
        assert seen_by(workers, tiny, tmp_path, **{"data.cache": cache}) == whole
    for after in (100, 3500):
        rest = seen_by(3, tiny, tmp_path, after)
        assert rest == {position: sample for position, sample in whole.items() if position >= after}
