"""`data:` what is learned from. Chosen by `source` (a built-in name or a path), `prepared` or `import`."""

import re
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, WithJsonSchema, model_validator

from slipstream.job.base import Section, refuse
from slipstream.job.units import BytesOrZero, Count, Duration, Fraction, Number

_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")
BUILT_IN_SOURCES = ("python-stdlib", "digits", "mnist", "synthetic")


def absolute(path: str) -> str:
    """A path that means the same wherever the run is resumed from. Relative ones start where the command is typed."""
    if path in BUILT_IN_SOURCES:
        return path
    if _REMOTE.match(path):  # not shown: it may hold a password
        raise ValueError("must be a path, not an address; `slipstream data prepare` makes a dataset of a database")
    slash = "/" if path.endswith("/") or path in (".", "..") else ""  # says that it is a folder, also if it has a dot
    return str(Path(path).expanduser().absolute()).rstrip("/") + slash


_STORAGE = re.compile(r"(s3|gs|az|https?)://")
_NO_NAME = WithJsonSchema({"type": "string", "not": {"enum": ["digits", "mnist", "synthetic"]}})
FilePath = Annotated[str, AfterValidator(absolute)]
Source = Annotated[FilePath, _NO_NAME]
TextSource = Annotated[str, AfterValidator(lambda text: text if _STORAGE.match(text) else absolute(text)), _NO_NAME]


class DataSection(Section):
    """What every kind of data has."""

    validation: Fraction = Field(default=0.0, lt=1)
    """Part of the samples held out, chosen by the seed, for evaluation."""


class TextData(DataSection):
    """Text, tokenised once and kept in a cache: `python-stdlib`, a `.txt` or `.jsonl` file, or a folder of .txt."""

    source: TextSource
    """`python-stdlib` (the source text of Python's own library), a path to .txt or .jsonl, or a folder of .txt; also in
    object storage (s3://bucket/file.jsonl, gs://…, az://…)."""
    sequence: Count = 256
    """Tokens in a sample."""
    tokenizer: FilePath | None = None
    """Path to a `tokenizer.json`. Default: a byte-level BPE trained on this text."""
    vocabulary: Count | None = None
    """Size of the BPE trained on this text (at least 258, default 4096); not with `tokenizer`."""
    field: str | None = None
    """For .jsonl: the key that holds the text. Default: text."""
    pack: bool = True
    """Join documents into full sequences; or else one document is one sample, padded, with the padding unweighted."""

    @model_validator(mode="after")
    def _check(self) -> "TextData":
        problems = []
        if self.tokenizer and self.vocabulary:
            problems.append("vocabulary has no effect when a tokenizer is given; remove one of them")
        elif self.vocabulary and self.vocabulary < 258:
            problems.append("vocabulary must be at least 258: the 256 bytes, the end of text and the mask")
        if self.field and not re.search(r"\.(jsonl|csv|parquet)(\.gz|\.zst)?$", self.source):
            problems.append("field has an effect only with a .jsonl, .csv or .parquet source; remove it")
        refuse(problems)
        return self


class TokenData(DataSection):
    """Tokens in an `.npy` file: one row of integers, cut into sequences."""

    source: Source
    """Path to the .npy file."""
    tokens: Literal[True]
    """Says that the .npy file holds tokens, not features."""
    sequence: Count = 256
    """Tokens in a sample."""
    vocabulary: Count
    """Number of token ids."""


Address = Annotated[str, AfterValidator(lambda text: text if _REMOTE.match(text) else absolute(text))]
Weight = Annotated[Number, Field(gt=0)]
Reset = Literal["attention", "positions"]


class PreparedData(DataSection):
    """What `slipstream data prepare` has made, with a checksum for every page of it: tokens, or whole samples."""

    prepared: Address | Annotated[dict[Address, Weight], Field(min_length=2)]
    """The folder that it made; or its address in object storage: s3://bucket/folder, gs://…, az://…, https://…. Several
    are mixed by weights: {web: 0.7, code: 0.3}."""
    sequence: Count | None = None
    """Tokens in a sample; not where whole samples were prepared."""
    reset: tuple[Reset, ...] = ()
    """What begins anew with each document in a sequence. attention: a token sees only tokens of its own document.
    positions: they are counted from where its document begins in the sequence. Default: nothing."""
    cache: BytesOrZero | None = None
    """How much of this machine's disk pages of remote datasets may take; 0B for none. Default: 20GB."""
    patience: Duration | None = None
    """How long a storage that does not answer is asked again, before the run saves a checkpoint and ends with exit
    code 7. Default: 60s."""

    @property
    def weights(self) -> dict[str, float]:
        """Every dataset and how much of it there is to be."""
        return {self.prepared: 1.0} if isinstance(self.prepared, str) else self.prepared

    @model_validator(mode="after")
    def _check(self) -> "PreparedData":
        problems = []
        if not any(map(_REMOTE.match, self.weights)):
            given = [name for name in ("cache", "patience") if getattr(self, name) is not None]
            problems += [f"{name} has an effect only where the dataset is remote; remove it" for name in given]
        if self.reset and self.sequence is None:
            problems.append("reset has an effect only on tokens, which need sequence; whole samples have no documents")
        if len(set(self.reset)) < len(self.reset):
            problems.append("reset names something twice; attention and positions are enough once")
        refuse(problems)
        return self


class TableData(DataSection):
    """Rows of numbers: `.csv` and `.parquet` (extra [parquet]) with named columns, or a pair of `.npy` files."""

    source: Source
    """Path to .csv or .parquet, or to the .npy file with the inputs."""
    target: str
    """The column to predict; for .npy the path to the file with the targets."""
    inputs: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Columns to learn from. Default: all but the target."""

    @model_validator(mode="before")
    @classmethod
    def _absolute_target(cls, value: Any) -> Any:
        target = value.get("target") if isinstance(value, dict) else None
        if isinstance(target, str) and target.endswith(".npy"):
            return {**value, "target": absolute(target)}
        return value

    @model_validator(mode="after")
    def _check(self) -> "TableData":
        problems = []
        if self.inputs and self.source.endswith(".npy"):
            problems.append("inputs has no effect with .npy files, which have no column names; remove it")
        if self.inputs and self.target in self.inputs:
            problems.append(f"target {self.target!r} is also in inputs; remove it there")
        refuse(problems)
        return self


class DigitsData(DataSection):
    """scikit-learn's 1,797 real handwritten digits, 8 × 8. Needs the extra [digits]."""

    source: Literal["digits"]
    """`digits`."""


class MnistData(DataSection):
    """A folder with MNIST's IDX files (`train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, plain or .gz)."""

    source: Literal["mnist"]
    """`mnist`."""
    path: FilePath
    """The folder."""


class SyntheticData(DataSection):
    """Seeded synthetic regression: y = x·w + noise, made in memory."""

    source: Literal["synthetic"]
    """`synthetic`."""
    samples: Count = 10_000
    """How many."""
    inputs: Count = 16
    """Numbers in x."""
    outputs: Count = 1
    """Numbers in y."""
    noise: Number = Field(default=0.1, ge=0)
    """Standard deviation of the noise."""


class ImportData(DataSection):
    """The user's own map-style dataset: `len(d)`, and `d[i]` is (inputs, target) of tensors, arrays or numbers."""

    target: str = Field(alias="import", pattern=r"^[\w.]+:[\w.]+$")
    """`package.module:name` of a class or function that returns the dataset."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


SUFFIXES = {".txt": "text", ".jsonl": "text", ".csv": "table", ".parquet": "table", ".npy": "table"}


def _choose(value: Any) -> str | None:
    if isinstance(value, BaseModel):
        return next(tag for tag, section in _TAGS.items() if type(value) is section)
    if not isinstance(value, dict):
        return None
    if "import" in value:
        return "import"
    if "prepared" in value:
        return "prepared"
    source = value.get("source")
    if not isinstance(source, str):
        return None
    if source == "python-stdlib" or _REMOTE.match(source):
        return "text"
    if source in BUILT_IN_SOURCES:
        return source
    suffix = PurePath(source).suffix
    if suffix == ".npy" and "tokens" in value:
        return "tokens"
    if source.endswith("/") or source in (".", "..") or ("/" in source and not suffix):
        return "text"
    return SUFFIXES.get(suffix, source)


_TAGS: dict[str, type[DataSection]] = {
    "text": TextData,
    "tokens": TokenData,
    "prepared": PreparedData,
    "table": TableData,
    "digits": DigitsData,
    "mnist": MnistData,
    "synthetic": SyntheticData,
    "import": ImportData,
}

Data = Annotated[
    Annotated[TextData, Tag("text")]
    | Annotated[TokenData, Tag("tokens")]
    | Annotated[PreparedData, Tag("prepared")]
    | Annotated[TableData, Tag("table")]
    | Annotated[DigitsData, Tag("digits")]
    | Annotated[MnistData, Tag("mnist")]
    | Annotated[SyntheticData, Tag("synthetic")]
    | Annotated[ImportData, Tag("import")],
    Discriminator(_choose),
]


def reset_of(data: DataSection) -> tuple[Reset, ...]:
    """What begins anew with each document in a sequence."""
    return data.reset if isinstance(data, PreparedData) else ()


def of_tokens(data: DataSection) -> bool:
    """Whether samples are sequences of tokens."""
    return isinstance(data, TextData | TokenData) or (isinstance(data, PreparedData) and data.sequence is not None)
