"""The row of all items of a prepared dataset in a folder. Every page is checked before it is used."""

from pathlib import Path

import numpy as np

from slipstream.data.manifest import DOCUMENTS, PAGES, Manifest
from slipstream.data.pages import DamagedShard, Pages, checked


class Shards:
    """Mapped into memory: workers of one machine share them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self.manifest = folder, manifest
        self._pages = Pages(manifest, str(folder), self._read(PAGES))
        self._checked = np.zeros(len(self._pages), dtype=bool)
        self._maps: dict[int, np.ndarray] = {}

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The items at each start and after it."""
        self._check(starts, length)
        made = np.empty((len(starts), length), dtype=self.manifest.dtype)
        for row, start in enumerate(starts.tolist()):
            shard, place = divmod(start, self.manifest.each)
            items = self._map(shard)[place : place + length]
            made[row] = items if len(items) == length else self._across(shard, place, length)
        return made

    def expect(self, starts: np.ndarray, length: int) -> None:
        """These will be asked for: nothing to do, they are here."""

    def documents(self) -> np.ndarray:
        """Where each document begins, and last where the last one ends."""
        return np.frombuffer(checked(self._read(DOCUMENTS), DOCUMENTS, self.manifest, str(self._folder)), "<i8")

    def _across(self, shard: int, place: int, length: int) -> np.ndarray:
        """Items that begin in one shard and end in another."""
        parts = []
        while length:
            parts.append(self._map(shard)[place : place + length])
            shard, place, length = shard + 1, 0, length - len(parts[-1])
        return np.concatenate(parts)

    def _check(self, starts: np.ndarray, length: int) -> None:
        """Compare the pages that hold these items with their checksums, those that were not yet."""
        first, last = self._pages.of(starts), self._pages.of(starts + length - 1)
        if (last - first <= 1).all() and self._checked[first].all() and self._checked[last].all():
            return
        for low, high in zip(first.tolist(), last.tolist(), strict=True):
            for page in range(low, high + 1):
                if not self._checked[page]:
                    shard, start, end = self._pages.bounds(page)
                    if not self._pages.is_whole(page, self._map(shard).view(np.uint8)[start:end].data):
                        raise self._pages.damage(page)
                    self._checked[page] = True

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            entry, path = self.manifest.shards[shard], self._folder / self.manifest.shards[shard].name
            expected = entry.items * self._pages.size
            if not path.is_file():
                raise DamagedShard(f"{path} is missing; copy it again, or prepare the dataset again")
            if path.stat().st_size != expected:
                raise DamagedShard(
                    f"{path} has {path.stat().st_size:,} bytes instead of {expected:,}; copy it again, or prepare the "
                    "dataset again"
                )
            self._maps[shard] = np.memmap(path, dtype=self.manifest.dtype, mode="r").view(np.ndarray)
        return self._maps[shard]

    def _read(self, name: str) -> bytes:
        path = self._folder / name
        if not path.is_file():
            raise DamagedShard(f"{path} is missing; copy it again, or prepare the dataset again")
        return path.read_bytes()
