"""Documents packed into sequences: where each begins is known, and attention and positions can begin anew there."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from jobs import merge, write_documents
from layouts import FAMILIES, deviation, read_layout, workers
from pool import Pool, forget_after
from program import slipstream, write_job
from slipstream.data import open_dataset
from slipstream.data.beginnings import beginnings
from slipstream.data.destinations import InFolder
from slipstream.data.keys import KEY, new_key
from slipstream.data.manifest import DOCUMENTS
from slipstream.data.mixing import Mixed
from slipstream.data.pages import DamagedShard
from slipstream.data.prepared import Prepared
from slipstream.data.sealing import guard_to_write
from slipstream.data.shards import Shards
from slipstream.data.tokenizer import Ids
from slipstream.data.writing import ShardWriter
from slipstream.job import Job
from slipstream.job.models import DecoderModel
from slipstream.train.models.decoder import Decoder
from slipstream.train.models.dropout import SampleKeys
from slipstream.train.models.packed import Packed, pack, reset_with_documents
from test_data_encrypted import opened
from test_data_prepared import flip

BOTH = ("attention", "positions")


def naive(lengths: list[int], start: int, length: int) -> list[int]:
    """For every token of a sequence the place of the first token there that is of the same document."""
    documents = [number for number, size in enumerate(lengths) for _ in range(size)][start : start + length]
    return [documents.index(document) for document in documents]


@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=20), length=st.integers(1, 30), data=st.data())
def test_beginnings_are_those_of_the_documents(lengths: list[int], length: int, data: st.DataObject) -> None:
    length = min(length, sum(lengths))
    starts = data.draw(st.lists(st.integers(0, sum(lengths) - length), max_size=8))
    found = beginnings(np.cumsum([0, *lengths]), np.array(starts, np.int64), length)
    assert found.tolist() == [naive(lengths, start, length) for start in starts]


def write_tokens(folder: Path, lengths: list[int], shard: int, encrypt: bool) -> Prepared:
    guard = guard_to_write(folder, encrypt)
    writer = ShardWriter(InFolder(folder), Ids(1000, None, None), {}, shard=2 * shard, page=6, guard=guard)
    writer.add(np.zeros(sum(lengths), np.uint16), np.cumsum(lengths))
    manifest = writer.finish()
    shards = opened(folder) if encrypt else Shards(folder, manifest)
    return Prepared(shards, sequence=7, shift=1, documents=True)


@settings(deadline=None, max_examples=10)
@given(
    sets=st.tuples(*[st.lists(st.integers(1, 25), min_size=8, max_size=20)] * 2),
    shard=st.integers(50, 200),
)
def test_samples_bring_their_beginnings_along(
    sets: tuple[list[int], ...], shard: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Wherever shards end, in any order, mapped or decrypted, and in a mix."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, new_key())
        folders = [tmp_path_factory.mktemp("tokens") for _ in sets]
        parts = [write_tokens(folder, sets[n], shard, encrypt=n == 1) for n, folder in enumerate(folders)]
    mixed = Mixed(parts, [1, 1])
    numbers = np.random.default_rng(shard).permutation(len(mixed))
    found = mixed.fetch(numbers).begins
    assert found is not None and found.dtype == torch.int64
    for row, number in zip(found.tolist(), numbers.tolist(), strict=True):
        part, inside = (0, number) if number < len(parts[0]) else (1, number - len(parts[0]))
        assert row == naive(sets[part], inside * 7, 7)


LENGTHS = (5, 1, 9, 2)
FAMILY = {
    "rotary": DecoderModel(layers=2, hidden=32, heads=4, kv_heads=2),
    "learned": DecoderModel(layers=2, hidden=32, heads=4, positions="learned", norm="layer", activation="gelu"),
}


def begins_of(*sequences: tuple[int, ...]) -> Tensor:
    return torch.tensor([[sum(sizes[:n]) for n, size in enumerate(sizes) for _ in range(size)] for sizes in sequences])


@pytest.mark.parametrize("positions", FAMILY)
def test_a_packed_document_is_as_if_it_were_alone(positions: str) -> None:
    torch.manual_seed(0)
    model, keys = Decoder(FAMILY[positions], 50, 32).double(), SampleKeys()
    packings = LENGTHS, LENGTHS[::-1]
    inputs, begins = torch.randint(50, (2, 17)), begins_of(*packings)
    alone = [
        torch.cat([model(piece[None])[0] for piece in row.split(sizes)])
        for row, sizes in zip(inputs, packings, strict=True)
    ]
    joined = model(inputs)
    reset_with_documents(model, BOTH, keys)
    assert torch.equal(model(inputs), joined)  # what is written from a prompt has no documents
    made: dict[tuple[str, ...], Tensor] = {}
    for reset in ((), ("attention",), ("positions",), BOTH):
        other = Decoder(FAMILY[positions], 50, 32).double()
        other.load_state_dict(model.state_dict())
        reset_with_documents(other, reset, keys)  # type: ignore[arg-type]
        with keys.of(torch.arange(2), pack(begins, other, reset, torch.float64)):  # type: ignore[arg-type]
            made[reset] = other(inputs)
    torch.testing.assert_close(made[BOTH], torch.stack(alone), rtol=1e-12, atol=1e-12)
    assert torch.equal(made[()], joined)
    assert apart(made[()], made[("attention",)]) and apart(made[()], made[("positions",)])
    assert apart(made[("positions",)], made[BOTH])
    # Rotary positions tell distances alone, which are the same inside a document wherever counting begins.
    assert apart(made[("attention",)], made[BOTH]) == (positions == "learned")


def apart(one: Tensor, other: Tensor) -> bool:
    return float((one - other).detach().abs().max()) > 1e-6


def test_one_block_is_compiled_for_all_documents() -> None:
    """With flex attention, as on a GPU; on a CPU it has no backward."""
    from slipstream.train.kernels.document_attention import block_mask

    model, keys = Decoder(FAMILY["rotary"], 64, 300), SampleKeys()
    plain = Decoder(FAMILY["rotary"], 64, 300)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        reset_with_documents(each, BOTH, keys)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=counter, dynamic=False, fullgraph=True)
    rotation = model.rotation
    assert rotation is not None
    for sizes in ((100, 1, 199), (290, 10), (3, 150, 147)):
        begins, inputs = begins_of(sizes, sizes[::-1]), torch.randint(64, (2, 300))
        with torch.no_grad(), keys.of(torch.arange(2), Packed(begins, block_mask(begins))):
            rotation.prepare(300, model.embed(inputs))
            made = model(inputs)
        with torch.no_grad(), keys.of(torch.arange(2), pack(begins, plain, BOTH, torch.float32)):
            torch.testing.assert_close(made, plain(inputs), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    source = write_documents(folder / "documents.jsonl", 400)
    done = slipstream("data", "prepare", source, "dataset", "--vocabulary", "300", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "dataset"


def job(dataset: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "name": "packed",
        "seed": 7,
        "model": {"kind": "decoder", "layers": 2, "hidden": 32, "heads": 4, "dropout": 0.1},
        "data": {"prepared": str(dataset), "sequence": 32, "validation": 0.1, "reset": list(BOTH)},
        "train": {
            "steps": 12,
            "batch": 8,
            "optimizer": {"name": "adamw", "lr": 3e-3},
            "clip": {"norm": 1.0},
            "precision": "fp64",
            "evaluate": {"every": 6, "samples": 8, "batch": 8},
        },
        "checkpoint": {"every": 5},
        "layout": {"replicate": 1},
    }
    return merge(base, changes)


@pytest.mark.parametrize(
    ("family", "reset", "layout"),
    [
        ("llama", BOTH, "replicate=2,micro_batch=2"),
        ("gpt2", BOTH, "tensor=2"),
        ("llama", BOTH, "shard=2,tensor=2,recompute=selective"),
        ("llama", BOTH, "pipeline=2,micro_batch=2,recompute=full"),
        ("gpt2", BOTH, "pipeline=2,micro_batch=2,schedule=zero-bubble,layers=4"),
        ("gpt2", ("positions",), "context=2,tensor=2"),
        ("llama", ("positions",), "context=2,pipeline=2,recompute=full"),
    ],
    ids=str,
)
def test_one_curve_on_every_layout(
    family: str,
    reset: tuple[str, ...],
    layout: str,
    dataset: Path,
    pool: Pool,
    tmp_path: Path,
    references: dict[str, Path],
) -> None:
    split = read_layout(layout)
    layers = split.pop("layers", 2)
    changes = FAMILIES[family] | {"data.reset": list(reset), "model.layers": layers}
    name = f"packed {family} {reset} {layers}"
    if name not in references:
        references[name] = tmp_path / "reference"
        pool.train(Job.model_validate(job(dataset, **changes)), references[name], 1)
    pool.train(Job.model_validate(job(dataset, **changes, layout=split)), tmp_path / "run", workers(split))
    assert deviation(tmp_path / "run", references[name]) < 1e-8


def curve(run: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line.get(key) for key in ("step", "loss", "grad_norm", "val_loss")) for line in lines]


def test_a_run_goes_on_to_the_bit(dataset: Path, tmp_path: Path) -> None:
    done = slipstream("train", write_job(tmp_path, job(dataset)), "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = curve(tmp_path / "run")
    assert len(whole) == 12 and whole[-1][1] < whole[0][1]
    forget_after(tmp_path / "run", 5)
    done = slipstream("resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path / "run") == whole


def test_what_is_reset_matters(dataset: Path, pool: Pool, tmp_path: Path) -> None:
    losses = set()
    for number, reset in enumerate(([], ["attention"], ["positions"], list(BOTH))):
        changes = {"data.reset": reset, "model.positions": "learned", "train.steps": 1, "train.evaluate.every": 1}
        (line,) = pool.train(Job.model_validate(job(dataset, **changes)), tmp_path / str(number), 1)
        losses |= {line["loss"], line["val_loss"]}
    assert len(losses) == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.reset": ["atention"]}, "did you mean 'attention'?"),
        ({"data.reset": ["attention", "attention"]}, "names something twice"),
        ({"data.sequence": None, "train.task": "classification", "model": "mlp"}, "reset has an effect only on tokens"),
        ({"model": {"huggingface": {"model_type": "gpt2"}}}, "data.reset is for model.kind decoder"),
        ({"layout": {"context": 2}}, "take attention out of data.reset"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(
    changes: dict[str, Any], words: str, dataset: Path, tmp_path: Path
) -> None:
    done = slipstream("train", write_job(tmp_path, job(dataset, **changes)), cwd=tmp_path)
    assert done.returncode == 2 and words in " ".join(done.stderr.split()), done.stderr


def test_one_document_has_no_boundary(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(2000) % 50)
    done = slipstream("data", "prepare", "tokens.npy", "dataset", "--vocabulary", "50", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = slipstream("train", write_job(tmp_path, job(tmp_path / "dataset")), cwd=tmp_path)
    assert done.returncode == 2 and "all tokens are one document" in " ".join(done.stderr.split()), done.stderr


def test_beginnings_that_have_changed_are_found(dataset: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(dataset, tmp_path / "dataset"))
    flip(copied / DOCUMENTS, 9)
    with pytest.raises(DamagedShard, match=r"documents\.bin is damaged"):
        open_dataset(Job.model_validate(job(copied)))
    open_dataset(Job.model_validate(job(copied, **{"data.reset": []})))  # not needed there
