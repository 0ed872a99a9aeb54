"""Every source but text: what it gives, and what it says when it cannot."""

import gzip
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.data import Dataset, Facts, open_dataset, prepare
from slipstream.data.importing import import_target
from slipstream.job import Job


def make_job(data: dict[str, Any], task: str | None = None, seed: int = 0) -> Job:
    on_tokens = "tokens" in data
    model = {"kind": "decoder", "layers": 1, "hidden": 8, "heads": 1} if on_tokens else {"import": "some.where:Model"}
    train = {"steps": 1, "batch": 1, "optimizer": {"name": "sgd", "lr": 0.1}, **({"task": task} if task else {})}
    return Job.model_validate({"name": "test", "seed": seed, "model": model, "data": data, "train": train})


def opened(data: dict[str, Any], task: str | None = None, seed: int = 0) -> Dataset:
    job = make_job(data, task, seed)
    prepare(job, notify=lambda line: pytest.fail(f"nothing to do, but: {line}"))
    return open_dataset(job)


def refused(data: dict[str, Any], task: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        opened(data, task)
    return str(caught.value).replace(f"{Path.cwd()}/", "")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "int64", ">u4"])
def test_tokens_are_cut_into_sequences(dtype: str) -> None:
    np.save("t.npy", np.arange(101, dtype=dtype))
    dataset = opened({"source": "t.npy", "tokens": True, "sequence": 10, "vocabulary": 101})
    assert dataset.facts == Facts(inputs=(10,), outputs=101, tokens=True)
    assert len(dataset) == 10
    batch = dataset.fetch(np.array([9, 0]))
    assert batch.inputs.tolist() == [list(range(90, 100)), list(range(10))]
    assert batch.targets.tolist() == [list(range(91, 101)), list(range(1, 11))]
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64


def test_the_last_sequence_needs_the_token_after_it() -> None:
    np.save("t.npy", np.arange(100))
    assert len(opened({"source": "t.npy", "tokens": True, "sequence": 10, "vocabulary": 100})) == 9


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (np.arange(50), "the largest token in t.npy is 49 (at place 49), outside 0 to 39"),
        (np.arange(40) - 3, "the smallest token in t.npy is -3 (at place 0)"),
        (np.arange(4), "t.npy has 4 tokens, fewer than one sequence of 8 and the token after it"),
        (np.zeros((4, 4), dtype=int), "holds 4 × 4 int64; tokens are one row of integers"),
        (np.zeros(40), "tokens are one row of integers"),
        (np.array(["a", "b"]), "not real numbers"),
        (np.array([{}, None]), "is not an .npy file of numbers"),
    ],
)
def test_bad_tokens(tokens: np.ndarray, expected: str) -> None:
    np.save("t.npy", tokens)
    assert expected in refused({"source": "t.npy", "tokens": True, "sequence": 8, "vocabulary": 40})


# --- tables ----------------------------------------------------------------------------------------------------------


def test_csv_regression() -> None:
    Path("t.csv").write_text('\ufeffa,"b",y\n1,2,3\n\n4.5,-5,6e1\n', encoding="utf-8")
    dataset = opened({"source": "t.csv", "target": "y"}, "regression")
    assert dataset.facts == Facts(inputs=(2,), outputs=1, tokens=False)
    batch = dataset.fetch(np.array([1, 0]))
    assert batch.inputs.tolist() == [[4.5, -5], [1, 2]]
    assert batch.targets.tolist() == [[60], [3]]
    assert batch.inputs.dtype == batch.targets.dtype == torch.float32


def test_csv_classification_with_chosen_columns() -> None:
    Path("t.csv").write_text("name,a,b,kind\nx,1,2,0\ny,3,4,2\n", encoding="utf-8")
    dataset = opened({"source": "t.csv", "target": "kind", "inputs": ["b"]}, "classification")
    assert dataset.facts == Facts(inputs=(1,), outputs=3, tokens=False)
    batch = dataset.fetch(np.array([0, 1]))
    assert batch.inputs.tolist() == [[2], [4]]
    assert batch.targets.tolist() == [0, 2]
    assert batch.targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,y\n1,2\n3,four\n", "t.csv:3: column 'y': 'four' is not a number"),
        ("a,y\n1,2\n,4\n", "t.csv:3: column 'a': there is no value"),
        ("a,y\n1,2,3\n", "t.csv:2: has 3 values, but the header names 2 columns"),
        ("a,Y1\n1,2\n", "data.target: there is no column 'y' in t.csv; it has a, Y1"),
        ("a,yy\n1,2\n", "data.target: there is no column 'y' in t.csv (did you mean 'yy'?)"),
        ("a,a,y\n1,2,3\n", "t.csv: 2 columns are named 'a'"),
        ("y\n1\n", "no column besides the target 'y'"),
        ("a,y\n", "t.csv has no rows"),
        ("", "there is no column 'y'"),
        ("a,y\n1,2\nnan,4\n", "no finite number in row 2, column 'a'"),
        ("a,y\n1,2\n3,0.5\n", "data.target: y is 0.5 in row 2; classes are whole numbers from 0"),
        ("a,y\n1,-1\n", "data.target: y is -1 in row 1"),
    ],
)
def test_bad_csv(text: str, expected: str) -> None:
    Path("t.csv").write_text(text, encoding="utf-8")
    assert expected in refused({"source": "t.csv", "target": "y"}, "classification")


def test_unknown_input_column() -> None:
    Path("t.csv").write_text("height,width,y\n1,2,3\n", encoding="utf-8")
    message = refused({"source": "t.csv", "target": "y", "inputs": ["heigth"]}, "regression")
    assert message == "data.inputs: there is no column 'heigth' in t.csv (did you mean 'height'?)"


def test_a_table_has_no_tokens() -> None:
    Path("t.csv").write_text("a,y\n1,2\n", encoding="utf-8")
    assert "train.task next-token needs tokens" in refused({"source": "t.csv", "target": "y"}, "next-token")


def test_parquet() -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"name": ["x", "y"], "a": [1, 2], "b": [True, False], "y": [0.5, 1.5]})
    parquet.write_table(table, "t.parquet")
    data = {"source": "t.parquet", "target": "y", "inputs": ["a", "b"]}
    batch = opened(data, "regression").fetch(np.array([0, 1]))
    assert batch.inputs.tolist() == [[1, 1], [2, 0]]
    assert batch.targets.tolist() == [[0.5], [1.5]]
    assert "column 'name' holds string, not numbers" in refused(data | {"inputs": ["name"]}, "regression")
    assert "did you mean 'name'?" in refused(data | {"inputs": ["nama"]}, "regression")
    parquet.write_table(pa.table({"a": [1, None], "y": [1, 2]}), "t.parquet")
    assert "no finite number in row 2, column 'a'" in refused(data | {"inputs": ["a"]}, "regression")
    Path("t.parquet").write_bytes(b"nonsense")
    assert "cannot be read as parquet" in refused(data, "regression")


def test_parquet_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = refused({"source": "t.parquet", "target": "y"}, "regression")
    assert message == 'data.source t.parquet needs pyarrow: pip install "slipstream[parquet]"'


def test_npy_pair() -> None:
    np.save("x.npy", np.arange(24, dtype=np.uint8).reshape(4, 1, 2, 3))
    np.save("y.npy", np.array([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    data = {"source": "x.npy", "target": "y.npy"}
    dataset = opened(data, "regression")
    assert dataset.facts == Facts(inputs=(1, 2, 3), outputs=2, tokens=False)
    assert dataset.fetch(np.array([2])).targets.tolist() == [[5, 6]]
    assert dataset.fetch(np.array([2])).inputs.dtype == torch.uint8  # the worker makes numbers of bytes
    np.save("x.npy", np.arange(24, dtype=np.int16).reshape(4, 1, 2, 3))
    assert opened(data, "regression").fetch(np.array([2])).inputs.dtype == torch.float32
    assert "shape (4, 2); a class is one number" in refused(data, "classification")
    np.save("y.npy", np.array([0, 1, 1]))
    assert "y.npy has 3 rows, but x.npy has 4" in refused(data, "classification")
    np.save("y.npy", np.array([0, 1, 1, 2]))
    assert opened(data, "classification").facts.outputs == 3


# --- images ----------------------------------------------------------------------------------------------------------


def test_digits() -> None:
    pytest.importorskip("sklearn")
    dataset = opened({"source": "digits"})
    assert (len(dataset), dataset.facts) == (1797, Facts(inputs=(1, 8, 8), outputs=10, tokens=False))
    batch = dataset.fetch(np.arange(1797))
    assert (batch.inputs.min(), batch.inputs.max()) == (0, 1)
    assert batch.targets[:5].tolist() == [0, 1, 2, 3, 4]


def test_digits_without_sklearn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert refused({"source": "digits"}) == 'data.source digits needs scikit-learn: pip install "slipstream[digits]"'


def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


PIXELS = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
MNIST = {"source": "mnist", "path": "m"}


@pytest.mark.parametrize("packed", [False, True])
def test_mnist(packed: bool) -> None:
    write_mnist(idx(PIXELS), idx(np.array([2, 0, 1], dtype=np.uint8)), packed)
    dataset = opened(MNIST)
    assert (len(dataset), dataset.facts) == (3, Facts(inputs=(1, 4, 5), outputs=3, tokens=False))
    batch = dataset.fetch(np.array([1]))
    assert batch.targets.tolist() == [0]
    assert torch.equal(batch.inputs[0, 0], torch.from_numpy(PIXELS[1].astype(np.float32) / np.float32(255)))


def write_mnist(images: bytes, labels: bytes, packed: bool = False) -> None:
    Path("m").mkdir(exist_ok=True)
    for name, content in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        Path("m", name + ".gz" * packed).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (idx(PIXELS)[:-1], "train-images-idx3-ubyte has 75 bytes instead of 76"),
        (idx(PIXELS)[:9], "train-images-idx3-ubyte has 9 bytes instead of at least 16"),
        (b"", "train-images-idx3-ubyte has 0 bytes"),
        (b"\x89PNG" + bytes(100), "train-images-idx3-ubyte is not an IDX file"),
        (idx(PIXELS[:2]), "has 2 images, but"),
    ],
)
def test_bad_mnist(images: bytes, expected: str) -> None:
    write_mnist(images, idx(np.zeros(3, dtype=np.uint8)))
    assert expected in refused(MNIST)


def test_mnist_cut_off_in_the_archive() -> None:
    write_mnist(idx(PIXELS), idx(np.zeros(3, dtype=np.uint8)), packed=True)
    path = Path("m/train-images-idx3-ubyte.gz")
    path.write_bytes(path.read_bytes()[:-12])
    assert "train-images-idx3-ubyte.gz is cut off or damaged" in refused(MNIST)


def test_mnist_missing() -> None:
    assert "data.path: there is no m in" in refused(MNIST)
    Path("m").mkdir()
    assert "neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz" in refused(MNIST)


# --- synthetic -------------------------------------------------------------------------------------------------------


def test_synthetic_is_linear_and_seeded() -> None:
    data = {"source": "synthetic", "samples": 500, "inputs": 3, "outputs": 2, "noise": 0.01}
    dataset = opened(data, seed=5)
    assert (len(dataset), dataset.facts) == (500, Facts(inputs=(3,), outputs=2, tokens=False))
    batch, again, other = (opened(data, seed=seed).fetch(np.arange(500)) for seed in (5, 5, 6))
    assert torch.equal(batch.targets, again.targets)
    assert not torch.equal(batch.targets, other.targets)
    weights = torch.linalg.lstsq(batch.inputs, batch.targets).solution
    assert 0.008 < (batch.targets - batch.inputs @ weights).std() < 0.012
    assert batch.targets.dtype == torch.float32


# --- imported --------------------------------------------------------------------------------------------------------

OWN = """
import numpy as np, torch
class Pairs:
    def __init__(self, samples, outputs=None):
        self.samples = samples
        if outputs is not None: self.classes = outputs
    def __len__(self): return len(self.samples)
    def __getitem__(self, i): return self.samples[i]
class Nothing: pass
def images(n=4): return Pairs([(np.ones((1, 2, 2), dtype=np.uint8) * i, i % 2) for i in range(n)], ("cat", "dog"))
def uncounted(): return Pairs([([1.0], 0)])
def points(n=4): return Pairs([(torch.tensor([i, i + 1.5], dtype=torch.float64), float(i)) for i in range(n)])
def tokens(): return Pairs([(np.arange(5, dtype=np.int32), torch.arange(1, 6))], 9)
def uneven(): return Pairs([([1.0], 0), ([1.0, 2.0], 0)], 2)
def beyond(): return Pairs([([1.0], 0), ([1.0], 7)], 2)
def fractions(): return Pairs([([1.0], 0.5)], 2)
def lone(): return Pairs([[1.0]])
def objects(): return Pairs([(object(), 1)], 2)
def empty(): return Pairs([])
def raising(): raise RuntimeError("no disk")
number = 3
"""


@pytest.fixture
def own(here: Path, request: pytest.FixtureRequest) -> str:
    """The user's module, with a name of its own for each test, since Python keeps modules."""
    name = "own_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
    (here / f"{name}.py").write_text(OWN, encoding="utf-8")
    return name


def test_imported_classes(own: str) -> None:
    dataset = opened({"import": f"{own}:images", "args": {"n": 6}}, "classification")
    assert (len(dataset), dataset.facts) == (6, Facts(inputs=(1, 2, 2), outputs=2, tokens=False))
    batch = dataset.fetch(np.array([3, 2]))
    assert batch.inputs[:, 0, 0, 0].tolist() == [3, 2]
    assert (batch.inputs.dtype, batch.targets.dtype, batch.targets.tolist()) == (torch.float32, torch.int64, [1, 0])


def test_imported_numbers(own: str) -> None:
    dataset = opened({"import": f"{own}:points"}, "regression")
    assert dataset.facts == Facts(inputs=(2,), outputs=1, tokens=False)
    batch = dataset.fetch(np.array([2, 1]))
    assert (batch.inputs.dtype, batch.targets.dtype, batch.targets.tolist()) == (
        torch.float32,
        torch.float32,
        [[2], [1]],
    )


def test_imported_tokens(own: str) -> None:
    dataset = opened({"import": f"{own}:tokens"}, "next-token")
    assert dataset.facts == Facts(inputs=(5,), outputs=9, tokens=True)
    batch = dataset.fetch(np.array([0]))
    assert (batch.inputs.dtype, batch.inputs.tolist(), batch.targets.tolist()) == (
        torch.int64, [[0, 1, 2, 3, 4]], [[1, 2, 3, 4, 5]],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("imags", "has no 'imags' (did you mean 'images'?)"),
        ("number", "is a int; it must be a class or a function"),
        ("raising", "raising() raised RuntimeError: no disk"),
        ("Nothing", "a Nothing has no __len__"),
        ("empty", "the dataset is empty"),
        ("uncounted", "classification needs the number of classes"),
        ("fractions", "sample 0: target: torch.float32 found, but token ids and classes are whole numbers"),
        ("lone", "sample 0 is a list of length 1; it must be a pair (inputs, target)"),
        ("objects", "sample 0: inputs: a object is not a tensor, an array or a number"),
    ],
)
def test_bad_import(own: str, name: str, expected: str) -> None:
    message = refused({"import": f"{own}:{name}"}, "regression" if name == "lone" else "classification")
    assert message.startswith(f"data.import: {own}:{name}")
    assert expected in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uneven", "sample 1 has shapes (2,) and (), but sample 0 has (1,) and ()"),
        ("beyond", "sample 1 has the target 7, outside 0 to 1"),
    ],
)
def test_bad_samples_are_named(own: str, name: str, expected: str) -> None:
    dataset = opened({"import": f"{own}:{name}"}, "classification")
    with pytest.raises(ValueError) as caught:
        dataset.fetch(np.array([0, 1]))
    assert expected in str(caught.value)


def test_import_target(here: Path) -> None:
    (here / "halfway.py").write_text("import not_installed_anywhere", encoding="utf-8")
    (here / "broken.py").write_text("1 / 0", encoding="utf-8")
    assert import_target("pathlib:Path.cwd", "x")() == here
    for spec, expected in {
        "halfwai:x": "model.import: halfwai:x: there is no module 'halfwai' (did you mean 'halfway'?)",
        "email.nothing:x": "there is no module 'email.nothing'",
        "halfway:x": "halfway needs the module 'not_installed_anywhere'; install it",
        "broken:x": "importing broken raised ZeroDivisionError: division by zero",
        "pathlib:Path.cwdd": "Path has no 'cwdd' (did you mean 'cwd'?)",
    }.items():
        with pytest.raises(ValueError) as caught:
            import_target(spec, "model.import")
        assert expected in str(caught.value)


# --- before anything is launched -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"source": "tabel.csv", "target": "y"}, "data.source: there is no tabel.csv in"),
        ({"source": "tabel.csv", "target": "y"}, "(did you mean 'table.csv'?)"),
        ({"source": "no/such/x.csv", "target": "y"}, "data.source: there is no no/such/x.csv, nor a folder no/such"),
        ({"source": "folder.csv", "target": "y"}, "folder.csv is a folder; give the path of a file"),
        ({"source": "x.npy", "target": "z.npy"}, "data.target: there is no z.npy"),
        ({"import": "no_such_module:x"}, "data.import: no_such_module:x: there is no module 'no_such_module'"),
    ],
)
def test_what_is_missing_is_refused_by_prepare(data: dict[str, Any], expected: str) -> None:
    Path("table.csv").touch()
    Path("x.npy").touch()
    Path("folder.csv").mkdir()
    with pytest.raises(ValueError) as caught:
        prepare(make_job(data, "regression"), notify=print)
    assert expected in str(caught.value).replace(f"{Path.cwd()}/", "")


def test_prepare_never_imports_torch(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(here / "cache"))
    (here / "own_torch.py").write_text("import torch", encoding="utf-8")
    (here / "a.txt").write_text("some words to read " * 100, encoding="utf-8")
    program = """
import sys
from slipstream.data import prepare
from slipstream.job import Job
train = {"steps": 1, "batch": 1, "optimizer": {"name": "sgd", "lr": 0.1}, "task": "next-token"}
for data in ({"source": "a.txt", "sequence": 4}, {"source": "synthetic"}, {"import": "own_torch:x"}):
    job = Job.model_validate({"name": "x", "model": {"import": "own_torch:y"}, "data": data, "train": train})
    prepare(job, print)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
