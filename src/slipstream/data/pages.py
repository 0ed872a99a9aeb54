"""Pages of a prepared dataset: which items are in which, and whether what is there is what was prepared."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from slipstream.data.guards import CHECKSUMS, Bytes, Guard
from slipstream.data.manifest import PAGES, Manifest


class DamagedShard(ValueError):
    """What is in a file of the dataset is not what the manifest says."""


class Bounds(NamedTuple):
    """Where a page lies."""

    shard: int
    start: int
    """Bytes, in the shard."""
    end: int


class Pages:
    """Pages are counted over all shards; none reaches from one into the next."""

    def __init__(self, manifest: Manifest, where: str, records: bytes, guard: Guard = CHECKSUMS) -> None:
        self.manifest, self._where, self._guard = manifest, where, guard
        self.size = manifest.dtype.itemsize
        """Bytes of an item."""
        self._records = checked(records, PAGES, manifest, where)
        self._firsts = [first for _, first in manifest.pages]
        self._first = np.array(self._firsts)

    def __len__(self) -> int:
        return len(self._records) // self._guard.record

    def of(self, places: np.ndarray) -> np.ndarray:
        """The page of each of these items."""
        shards = places // self.manifest.each
        inside = places - shards * self.manifest.each  # several times as quick as numpy's divmod
        found: np.ndarray = self._first[shards] + inside * self.size // self.manifest.page
        return found

    def bounds(self, page: int) -> Bounds:
        """Where a page lies."""
        shard = bisect_right(self._firsts, page) - 1
        start = (page - self._firsts[shard]) * self.manifest.page
        return Bounds(shard, start, min(start + self.manifest.page, self.manifest.shards[shard].items * self.size))

    def items(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first item of each of these pages, and the one after its last."""
        shards = self._first.searchsorted(pages, side="right") - 1
        each, most = self.manifest.page // self.size, np.array([shard.items for shard in self.manifest.shards])
        inside = (pages - self._first[shards]) * each
        begin = shards * self.manifest.each
        return begin + inside, begin + np.minimum(inside + each, most[shards])

    def open(self, page: int, stored: Bytes, into: memoryview) -> bool:
        """Put the tokens of a page that is stored as these bytes into memory; False if it is not what was prepared."""
        shard, start, end = self.bounds(page)
        name = self.manifest.shards[shard].name
        return len(stored) == end - start and self._guard.open_page(name, start, stored, self._record(page), into)

    def is_whole(self, page: int, stored: Bytes) -> bool:
        """Whether these are the bytes of a page that is not encrypted."""
        _, start, end = self.bounds(page)
        return len(stored) == end - start and CHECKSUMS.is_whole(stored, self._record(page))

    def _record(self, page: int) -> bytes:
        size = self._guard.record
        return self._records[page * size : (page + 1) * size]

    def stretches(self, pages: Sequence[int]) -> Iterator[list[int]]:
        """Sorted pages, cut where one is left out or a shard ends."""
        kinds = [(page - place, self.bounds(page).shard) for place, page in enumerate(pages)]
        for _, some in groupby(zip(kinds, pages, strict=True), lambda each: each[0]):
            yield [page for _, page in some]

    def damage(self, page: int) -> DamagedShard:
        """What to raise where they are not."""
        shard, start, end = self.bounds(page)
        return DamagedShard(
            f"{self._where}/{self.manifest.shards[shard].name} is damaged: bytes {start:,} to {end:,} are not what was "
            "prepared; copy the file again, or prepare the dataset again"
        )


def between(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """All pages from each first to its last, each once."""
    found = [first]
    while (longer := first < last).any():
        first, last = first[longer] + 1, last[longer]
        found.append(first)
    return distinct(np.concatenate(found))


def distinct(values: np.ndarray) -> np.ndarray:
    """Each once, sorted. They lie near enough to each other to tick them off; numpy's own `unique` takes many times as
    long, and first imports for a hundredth of a second."""
    low = int(values.min(initial=np.iinfo(np.int64).max))
    seen = np.zeros(max(0, int(values.max(initial=-1)) + 1 - low), dtype=bool)
    seen[values - low] = True
    return np.flatnonzero(seen) + low


def checked(data: bytes, name: str, manifest: Manifest, where: str, guard: Guard = CHECKSUMS) -> bytes:
    """What is in a file beside the shards, if it is what was prepared."""
    check_file(data, name, manifest, where)
    opened = guard.open_file(name, data)
    if opened is None:
        raise _damaged_file(name, where)
    return opened


def check_file(data: Bytes, name: str, manifest: Manifest, where: str) -> None:
    """Raises DamagedShard if these are not the bytes that were stored."""
    if hashlib.sha256(data).hexdigest() != manifest.sha256[name]:
        raise _damaged_file(name, where)


def _damaged_file(name: str, where: str) -> DamagedShard:
    return DamagedShard(
        f"{where}/{name} is damaged, or of another dataset; copy it again, or prepare the dataset again"
    )
