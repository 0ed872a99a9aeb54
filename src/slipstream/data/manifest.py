"""What a prepared dataset is: a folder of shards, and a manifest that says what must be in them.

manifest.json     this, written last: a folder without it is unfinished
shard-00000.bin   items (tokens, or whole samples), one after the other, in `dtype`, little-endian; every shard but the
                  last has as many
pages.bin         the CRC-32 of every page of every shard, as 32-bit numbers: a page is the first `page` bytes of a
                  shard, then the next, …; the last of a shard may be shorter
documents.bin     of tokens: where each document begins in the row of all of them, and last where the last one ends, as
                  64-bit numbers
firsts.bin        of tokens: the first of every page. The last target of a sequence is often the first token of the next
                  page, and that page is not needed for it alone
tokenizer.json    what the tokens mean, if that is known

If it is encrypted (`seal`), all is but this; pages.bin has a nonce and a tag for every page instead of a CRC-32, and
documents, firsts and tokeniser consist of pieces: length, nonce, tag, bytes (sealing.py).
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.data.files import File
from slipstream.data.holding import Holds, Ids, as_json, holds_from

FORMAT = 2
MANIFEST, PAGES, DOCUMENTS, TOKENIZER = "manifest.json", "pages.bin", "documents.bin", "tokenizer.json"
FIRSTS = "firsts.bin"
PAGE = 2**20
"""Bytes: about what is fetched and checked at once."""


@dataclass(frozen=True)
class Shard:
    """One file of items."""

    name: str
    items: int
    sha256: str


@dataclass(frozen=True)
class Seal:
    """What it takes, beside the user's key, to open an encrypted dataset."""

    dataset: str
    """A random name, part of what every page is bound to."""
    key: str
    """What the user's key is called: it tells nothing of the key."""
    wrapped: str
    """The key of the dataset, wrapped by the user's key."""
    proof: str
    """That this manifest was written by who had the key."""


@dataclass(frozen=True)
class Manifest:
    """What a prepared dataset holds."""

    items: int
    documents: int
    """Of text; samples have none."""
    page: int
    holds: Holds
    """What the items are."""
    shards: tuple[Shard, ...]
    sha256: dict[str, str]
    """Of the other files."""
    seal: Seal | None
    """None where nothing is encrypted."""

    @property
    def dtype(self) -> np.dtype:
        """One item."""
        return self.holds.dtype.newbyteorder("<")

    @property
    def ids(self) -> Ids:
        """Special ids of tokens."""
        assert isinstance(self.holds, Ids), "asked of tokens"
        return self.holds

    @property
    def each(self) -> int:
        """Items in every shard but the last."""
        return self.shards[0].items

    @property
    def pages(self) -> Iterator[tuple[Shard, int]]:
        """Every shard with the number of its first page."""
        first = 0
        for shard in self.shards:
            yield shard, first
            first += -(-shard.items * self.dtype.itemsize // self.page)


def page_of(dtype: np.dtype, page: int = PAGE) -> int:
    """Bytes of a page: as many whole items as fit, and at least one."""
    return max(1, page // dtype.itemsize) * dtype.itemsize


def manifest_values(manifest: Manifest) -> dict[str, Any]:
    """As it is written. `dtype` is there for other programs: np.memmap can take it."""
    return {"format": FORMAT, "dtype": as_json(manifest.dtype), **asdict(manifest)}


def manifest_text(manifest: Manifest) -> str:
    """As a file."""
    return json.dumps(manifest_values(manifest), indent=1) + "\n"


def read_manifest(folder: Path, setting: str) -> Manifest:
    """Raises ValueError if there is none, or none that can be understood; `setting` is what named the folder."""
    path = folder / MANIFEST
    if not path.is_file():
        if folder.is_file():
            raise ValueError(f"{setting}: {folder} is a file; a prepared dataset is a folder")
        there = "is not a prepared dataset: it has no manifest" if folder.is_dir() else "is not there"
        raise ValueError(f"{setting}: {folder} {there}; `slipstream data prepare SOURCE {folder}` makes one")
    return parse_manifest(path.read_text(encoding="utf-8", errors="replace"), str(path), setting)


def parse_manifest(text: str, where: str, setting: str) -> Manifest:
    """The manifest that was written as this text."""
    try:
        values: dict[str, Any] = json.loads(text)
        number = values.pop("format")
        if number != FORMAT:
            raise ValueError(f"it is of format {number}, and this program reads {FORMAT}")
        if missing := {field.name for field in fields(Manifest)} - set(values):
            raise ValueError(f"it does not say {', '.join(sorted(missing))}")
        shards = tuple(Shard(**shard) for shard in values["shards"])
        dtype = values.pop("dtype")
        if not isinstance(values["seal"], dict | None):
            raise ValueError("it does not say how it was encrypted")
        seal = Seal(**values["seal"]) if values["seal"] else None
        manifest = Manifest(**{**values, "holds": holds_from(values["holds"]), "shards": shards, "seal": seal})
        _check(manifest, dtype)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{setting}: the manifest {where} is damaged ({error}); prepare the dataset again") from None
    return manifest


def _check(manifest: Manifest, dtype: Any) -> None:
    items = [shard.items for shard in manifest.shards]
    if not items or sum(items) != manifest.items or set(items[:-1]) - {items[0]} or items[-1] > items[0]:
        raise ValueError("its shards do not add up to its items")
    if dtype != as_json(manifest.dtype):
        raise ValueError("its dtype is not that of what it holds")
    if manifest.page < 1 or manifest.page % manifest.dtype.itemsize:
        raise ValueError("a page of it ends inside an item")
    if manifest.seal and not all(isinstance(value, str) for value in asdict(manifest.seal).values()):
        raise ValueError("its seal is no text")


def checksum(file: File) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
