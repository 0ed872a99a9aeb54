"""Pages of a prepared dataset: which items are in which, and whether what is there is what was prepared."""

import hashlib
import zlib
from typing import NamedTuple

import numpy as np

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

    def __init__(self, manifest: Manifest, where: str, sums: bytes) -> None:
        self.manifest, self._where = manifest, where
        self.size = manifest.dtype.itemsize
        """Bytes of an item."""
        self._sums = np.frombuffer(checked(sums, PAGES, manifest, where), dtype="<u4")
        self._first = np.array([first for _, first in manifest.pages])

    def __len__(self) -> int:
        return len(self._sums)

    def of(self, places: np.ndarray) -> np.ndarray:
        """The page of each of these items."""
        shards, inside = np.divmod(places, self.manifest.each)
        found: np.ndarray = self._first[shards] + inside * self.size // self.manifest.page
        return found

    def bounds(self, page: int) -> Bounds:
        """Where a page lies."""
        shard = int(np.searchsorted(self._first, page, side="right")) - 1
        start = (page - int(self._first[shard])) * self.manifest.page
        return Bounds(shard, start, min(start + self.manifest.page, self.manifest.shards[shard].items * self.size))

    def is_whole(self, page: int, data: memoryview) -> bool:
        """Whether these are the bytes of the page."""
        _, start, end = self.bounds(page)
        return len(data) == end - start and zlib.crc32(data) == self._sums[page]

    def damage(self, page: int) -> DamagedShard:
        """What to raise where they are not."""
        shard, start, end = self.bounds(page)
        return DamagedShard(
            f"{self._where}/{self.manifest.shards[shard].name} is damaged: bytes {start:,} to {end:,} are not what was "
            "prepared; copy the file again, or prepare the dataset again"
        )


def checked(data: bytes, name: str, manifest: Manifest, where: str) -> bytes:
    """A small file of a dataset, if it is what was prepared."""
    if hashlib.sha256(data).hexdigest() != manifest.sha256[name]:
        raise DamagedShard(
            f"{where}/{name} is damaged, or of another dataset; copy it again, or prepare the dataset again"
        )
    return data
