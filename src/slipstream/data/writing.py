"""Writing the shards of a prepared dataset. What is whole is on record, so that a preparation that was ended goes on
where it was."""

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.data.manifest import (
    DOCUMENTS,
    MANIFEST,
    PAGE,
    PAGES,
    TOKENIZER,
    Manifest,
    Shard,
    checksum,
    write_manifest,
)
from slipstream.data.tokenizer import Ids

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a preparation has come, at the end of a shard."""

    batches: int = 0
    """Batches of text of which all tokens are in whole shards."""
    tokens_of_next: int = 0
    """Tokens of the batch after them that are, too."""
    documents: int = 0
    """Documents that have ended by then."""
    text: str = ""
    """SHA-256 of all text up to the end of that next batch."""
    shards: tuple[Shard, ...] = ()


class ShardWriter:
    """Takes batches of tokens and leaves shards of equal length."""

    def __init__(self, folder: Path, ids: Ids, identity: dict[str, Any], shard: int, page: int = PAGE) -> None:
        self._folder, self._ids, self._identity, self._page = folder, ids, identity, page
        self._each = shard // ids.dtype.itemsize
        self.progress = self._read_progress()
        self._shards = list(self.progress.shards)
        self._batches, self._documents = self.progress.batches, self.progress.documents
        self._written = sum(each.tokens for each in self._shards)
        """Tokens in whole shards."""
        self._held: list[np.ndarray] = []
        self._count = 0
        """Tokens that are held."""
        size = len(self._shards) and self._first_page_of(len(self._shards))
        self._pages = self._open(PAGES, size * 4)
        self._ends = self._open(DOCUMENTS, (1 + self._documents) * 8 if self._shards else 0)
        if not self._shards:
            self._ends.write(np.zeros(1, np.int64).tobytes())

    @property
    def tokens(self) -> int:
        """All tokens so far."""
        return self._written + self._count

    def add(self, tokens: np.ndarray, ends: np.ndarray, text: str = "") -> None:
        """A batch: its tokens, the places in it after which a document has ended, and the hash of all text so far."""
        done = self.progress.tokens_of_next if self._batches == self.progress.batches else 0
        tokens, ends = tokens[done:], ends[ends > done] - done
        start = self.tokens
        while self._count + len(tokens) >= self._each:
            take = self._each - self._count
            inside = ends[ends <= take]
            self._end_documents(inside + start)
            self._hold(tokens[:take])
            done, start = done + take, start + take
            tokens, ends = tokens[take:], ends[ends > take] - take
            self._finish_shard()
            self._record(done, text)
        self._end_documents(ends + start)
        self._hold(tokens)
        self._batches += 1

    def finish(self) -> Manifest:
        """Write the last shard and the manifest."""
        if self._count or not self._shards:
            self._finish_shard()
        for file in (self._pages, self._ends):
            _to_disk(file)
            file.close()
        manifest = Manifest(
            tokens=self._written,
            documents=self._documents,
            dtype=self._ids.dtype.newbyteorder("<").str,
            page=self._page,
            ids=self._ids,
            shards=tuple(self._shards),
            sha256={name: checksum(self._folder / name) for name in (PAGES, DOCUMENTS, TOKENIZER)},
        )
        write_manifest(manifest, self._folder)
        (self._folder / PROGRESS).unlink(missing_ok=True)
        return manifest

    def _hold(self, tokens: np.ndarray) -> None:
        self._held.append(tokens)
        self._count += len(tokens)

    def _end_documents(self, places: np.ndarray) -> None:
        self._ends.write(places.astype("<i8").tobytes())
        self._documents += len(places)

    def _finish_shard(self) -> None:
        data = np.concatenate(self._held or [np.empty(0)]).astype(self._ids.dtype.newbyteorder("<"))
        path = self._folder / f"shard-{len(self._shards):05d}.bin"
        with path.open("wb") as file:
            file.write(data.data)
            _to_disk(file)
        pages = data.view(np.uint8)
        sums = [zlib.crc32(pages[start : start + self._page].data) for start in range(0, len(pages), self._page)]
        self._pages.write(np.array(sums, dtype="<u4").tobytes())
        self._shards.append(Shard(path.name, len(data), checksum(path)))
        self._written += len(data)
        self._held, self._count = [], 0

    def _record(self, tokens_of_next: int, text: str) -> None:
        for file in (self._pages, self._ends):
            _to_disk(file)
        now = Progress(self._batches, tokens_of_next, self._documents, text, tuple(self._shards))
        draft = self._folder / f".{PROGRESS}"
        draft.write_text(json.dumps({"identity": self._identity, **asdict(now)}))
        draft.rename(self._folder / PROGRESS)

    def _read_progress(self) -> Progress:
        path = self._folder / PROGRESS
        if not path.exists():
            return Progress()
        values = json.loads(path.read_text())
        if values.pop("identity") != self._identity:
            raise ValueError(
                f"{self._folder} holds an unfinished preparation of other sources or settings; remove it, or choose "
                "another folder"
            )
        return Progress(**{**values, "shards": tuple(Shard(**shard) for shard in values["shards"])})

    def _first_page_of(self, shards: int) -> int:
        each = -(-self._each * self._ids.dtype.itemsize // self._page)
        return shards * each

    def _open(self, name: str, size: int) -> Any:
        """To go on writing after so many bytes."""
        path = self._folder / name
        path.touch()
        os.truncate(path, size)
        return path.open("ab")


def refuse_if_prepared(folder: Path) -> None:
    """A dataset is never written over."""
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is a prepared dataset already; remove it, or choose another folder")


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
