"""The row of all tokens of a prepared dataset, over its shards. Every page is checked before it is used."""

import zlib
from pathlib import Path

import numpy as np

from slipstream.data.manifest import DOCUMENTS, PAGES, Manifest, checksum


class DamagedShard(ValueError):
    """What is in a file of the dataset is not what the manifest says."""


class Shards:
    """Shards that lie in a folder, mapped into memory: workers of one machine share them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self.manifest = folder, manifest
        self._size = np.dtype(manifest.dtype).itemsize
        self._sums = self._small(PAGES, np.uint32)
        self._checked = np.zeros(len(self._sums), dtype=bool)
        self._first_page = np.array([first for _, first in manifest.pages])
        self._maps: dict[int, np.ndarray] = {}

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The tokens at each start and after it."""
        self._check(starts, length)
        made = np.empty((len(starts), length), dtype=self.manifest.dtype)
        for row, start in enumerate(starts.tolist()):
            shard, place = divmod(start, self.manifest.each)
            tokens = self._map(shard)[place : place + length]
            made[row] = tokens if len(tokens) == length else self._across(shard, place, length)
        return made

    def documents(self) -> np.ndarray:
        """Where each document begins, and last where the last one ends."""
        return self._small(DOCUMENTS, np.int64)

    def _across(self, shard: int, place: int, length: int) -> np.ndarray:
        """Tokens that begin in one shard and end in another."""
        parts = []
        while length:
            parts.append(self._map(shard)[place : place + length])
            shard, place, length = shard + 1, 0, length - len(parts[-1])
        return np.concatenate(parts)

    def _check(self, starts: np.ndarray, length: int) -> None:
        """Compare the pages that hold these tokens with their checksums, those that were not yet."""
        first, last = self._page_of(starts), self._page_of(starts + length - 1)
        if (last - first <= 1).all() and self._checked[first].all() and self._checked[last].all():
            return
        for low, high in zip(first.tolist(), last.tolist(), strict=True):
            for page in range(low, high + 1):
                if not self._checked[page]:
                    self._check_page(page)

    def _page_of(self, places: np.ndarray) -> np.ndarray:
        """Numbers of the pages that tokens are in; pages are counted over all shards."""
        shards, inside = np.divmod(places, self.manifest.each)
        found: np.ndarray = self._first_page[shards] + inside * self._size // self.manifest.page
        return found

    def _check_page(self, number: int) -> None:
        shard = int(np.searchsorted(self._first_page, number, side="right")) - 1
        start = (number - int(self._first_page[shard])) * self.manifest.page
        data = self._map(shard).view(np.uint8)[start : start + self.manifest.page]
        if zlib.crc32(data.data) != self._sums[number]:
            raise DamagedShard(
                f"{self._folder / self.manifest.shards[shard].name} is damaged: bytes {start:,} to "
                f"{start + len(data):,} are not what was prepared; copy the file again, or prepare the dataset again"
            )
        self._checked[number] = True

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            entry = self.manifest.shards[shard]
            path = self._folder / entry.name
            if not path.is_file():
                raise DamagedShard(f"{path} is missing; copy it again, or prepare the dataset again")
            if path.stat().st_size != entry.tokens * self._size:
                raise DamagedShard(
                    f"{path} has {path.stat().st_size:,} bytes instead of {entry.tokens * self._size:,}; copy it "
                    "again, or prepare the dataset again"
                )
            self._maps[shard] = np.memmap(path, dtype=self.manifest.dtype, mode="r").view(np.ndarray)
        return self._maps[shard]

    def _small(self, name: str, dtype: type) -> np.ndarray:
        path = self._folder / name
        if not path.is_file():
            raise DamagedShard(f"{path} is missing; copy it again, or prepare the dataset again")
        if checksum(path) != self.manifest.sha256[name]:
            raise DamagedShard(f"{path} is damaged, or of another dataset; copy it again, or prepare the dataset again")
        return np.fromfile(path, dtype=dtype)
