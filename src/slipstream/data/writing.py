"""Writing the shards of a prepared dataset. What is whole is on record, so that a preparation that was ended goes on
where it was."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.data.destinations import PROGRESS, Destination
from slipstream.data.guards import CHECKSUMS, Guard
from slipstream.data.holding import Holds, Ids
from slipstream.data.manifest import (
    DOCUMENTS,
    FIRSTS,
    PAGE,
    PAGES,
    TOKENIZER,
    Manifest,
    Seal,
    Shard,
    checksum,
    page_of,
)

_NO_ENDS = np.empty(0, np.int64)


@dataclass(frozen=True)
class Progress:
    """How far a preparation has come, at the end of a shard."""

    batches: int = 0
    """Batches of which all items are in whole shards."""
    items_of_next: int = 0
    """Items of the batch after them that are, too."""
    documents: int = 0
    """Documents that have ended by then."""
    text: str = ""
    """SHA-256 of all text up to the end of that next batch."""
    shards: tuple[Shard, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the files that grow with the shards."""


class ShardWriter:
    """Takes batches of items and leaves shards of equal length."""

    def __init__(
        self,
        dest: Destination,
        holds: Holds,
        identity: dict[str, Any],
        shard: int,
        page: int = PAGE,
        guard: Guard = CHECKSUMS,
    ) -> None:
        self._dest, self._folder, self._holds, self._guard = dest, dest.folder, holds, guard
        self._identity = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        """What it was is nobody's business: an unfinished dataset may be encrypted."""
        self._dtype = holds.dtype.newbyteorder("<")
        self._page = page_of(self._dtype, page)
        self._each = max(1, shard // self._dtype.itemsize)
        self.progress = self._read_progress()
        self._shards = list(self.progress.shards)
        self._batches, self._documents = self.progress.batches, self.progress.documents
        self._written = sum(each.items for each in self._shards)
        """Items in whole shards."""
        self._shard: Any = None
        """The file that grows."""
        self._seen = hashlib.sha256()
        """Of what is in it."""
        self._firsts_of_shard: list[bytes] = []
        self._held: list[np.ndarray] = []
        self._count = self._closed = 0
        """Items of the shard that grows, and those of them that are no longer held."""
        self._pages = self._open(PAGES)
        of_tokens = isinstance(holds, Ids)
        self._ends: Any = self._open(DOCUMENTS) if of_tokens else None
        self._firsts: Any = self._open(FIRSTS) if of_tokens else None
        self._ended = [] if self._shards else [np.zeros(1, np.int64)]
        """Where documents have ended since the last shard."""

    @property
    def items(self) -> int:
        """All items so far."""
        return self._written + self._count

    def add(self, items: np.ndarray, ends: np.ndarray = _NO_ENDS, text: str = "") -> None:
        """A batch: its items; of tokens the places in it after which a document has ended, and the hash of all text so
        far."""
        done = self.progress.items_of_next if self._batches == self.progress.batches else 0
        items, ends = items[done:], ends[ends > done] - done
        start = self.items
        while self._count + len(items) >= self._each:
            take = self._each - self._count
            inside = ends[ends <= take]
            self._end_documents(inside + start)
            self._hold(items[:take])
            done, start = done + take, start + take
            items, ends = items[take:], ends[ends > take] - take
            self._finish_shard()
            self._record(done, text)
        self._end_documents(ends + start)
        self._hold(items)
        self._batches += 1

    def finish(self) -> Manifest:
        """Write the last shard and the manifest."""
        if self._count or not self._shards:
            self._finish_shard()
        self._write_ended()
        for file in self._open_files():
            _to_disk(file)
            file.close()
        manifest = Manifest(
            items=self._written,
            documents=self._documents,
            page=self._page,
            holds=self._holds,
            shards=tuple(self._shards),
            sha256={name: checksum(self._folder / name) for name in self._others()},
            seal=None,
        )
        manifest = self._guard.sign(manifest)
        self._dest.finish(manifest, self._others())
        return manifest

    def _others(self) -> list[str]:
        """Files beside the shards."""
        if not isinstance(self._holds, Ids):
            return [PAGES]
        return [PAGES, DOCUMENTS, FIRSTS, *([TOKENIZER] if (self._folder / TOKENIZER).exists() else [])]

    def _hold(self, items: np.ndarray) -> None:
        """Whole pages are written at once, while others make the next: all at the end would be waited for."""
        self._held.append(items)
        self._count += len(items)
        each = self._page // self._dtype.itemsize
        if whole := (self._count - self._closed) // each * each:
            self._write_pages(whole)

    def _end_documents(self, places: np.ndarray) -> None:
        self._ended.append(places)
        self._documents += len(places)

    def _write_pages(self, items: int) -> None:
        """So many of the items that are held."""
        held = np.concatenate(self._held or [np.empty(0, self._dtype)]).astype(self._dtype, copy=False)
        data, self._held = held[:items], [held[items:]]
        self._shard = self._shard or self._shard_path().open("wb")
        raw, begin, name = data.view(np.uint8), self._closed * self._dtype.itemsize, self._shard_path().name
        for start in range(0, len(raw), self._page):
            stored, record = self._guard.close_page(name, begin + start, raw[start : start + self._page].data)
            self._shard.write(stored)
            self._seen.update(stored)
            self._pages.write(record)
        self._firsts_of_shard.append(data[:: self._page // self._dtype.itemsize].tobytes())
        self._closed += items

    def _finish_shard(self) -> None:
        self._write_pages(self._count - self._closed)
        path = self._shard_path()
        _to_disk(self._shard)
        self._shard.close()
        self._write_ended()
        if self._firsts:
            firsts = b"".join(self._firsts_of_shard)
            self._firsts.write(self._guard.close_piece(FIRSTS, self._firsts.tell(), firsts))
        self._shards.append(Shard(path.name, self._count, self._seen.hexdigest()))
        self._dest.keep(path)
        self._written += self._count
        self._shard, self._seen, self._firsts_of_shard = None, hashlib.sha256(), []
        self._held, self._count, self._closed = [], 0, 0

    def _shard_path(self) -> Path:
        return self._folder / f"shard-{len(self._shards):05d}.bin"

    def _write_ended(self) -> None:
        if self._ends and self._ended:
            data = np.concatenate(self._ended).astype("<i8").tobytes()
            self._ends.write(self._guard.close_piece(DOCUMENTS, self._ends.tell(), data))
        self._ended = []

    def _record(self, items_of_next: int, text: str) -> None:
        files = self._open_files()
        for file in files:
            _to_disk(file)
        sizes = {Path(file.name).name: file.tell() for file in files}
        now = Progress(self._batches, items_of_next, self._documents, text, tuple(self._shards), sizes)
        seal = self._guard.seal and asdict(self._guard.seal)
        draft = self._folder / f".{PROGRESS}"
        draft.write_text(json.dumps({"identity": self._identity, "seal": seal, **asdict(now)}))
        draft.rename(self._folder / PROGRESS)

    def _read_progress(self) -> Progress:
        path = self._folder / PROGRESS
        if not path.exists():
            return Progress()
        values = json.loads(path.read_text())
        values.pop("seal", None)
        if values.pop("identity") != self._identity:
            raise other_preparation(self._folder)
        return Progress(**{**values, "shards": tuple(Shard(**shard) for shard in values["shards"])})

    def _open_files(self) -> list[Any]:
        return [file for file in (self._pages, self._ends, self._firsts) if file]

    def _open(self, name: str) -> Any:
        """To go on writing after what was on record."""
        path = self._folder / name
        path.touch()
        os.truncate(path, self.progress.sizes.get(name, 0))
        return path.open("ab")


def write_tokenizer(folder: Path, tokenizer: bytes, guard: Guard) -> None:
    """Beside the shards."""
    draft = folder / f".{TOKENIZER}"
    draft.write_bytes(guard.close_piece(TOKENIZER, 0, tokenizer))
    draft.rename(folder / TOKENIZER)


def unfinished_seal(folder: Path, wanted: bool) -> Seal | None:
    """Of an encrypted preparation that goes on; None where none has begun, or nothing is to be encrypted."""
    path = folder / PROGRESS
    if not path.exists():
        return None
    seal = json.loads(path.read_text()).get("seal")
    if bool(seal) != wanted:
        raise other_preparation(folder)
    return Seal(**seal) if seal else None


def other_preparation(folder: Path) -> ValueError:
    """What to raise where a preparation cannot go on."""
    return ValueError(
        f"{folder} holds an unfinished preparation of other sources or settings; remove it, or choose another folder"
    )


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
