"""The row of all items of a prepared dataset in a folder. Every page is checked before it is used."""

from pathlib import Path

import numpy as np

from slipstream.data.folder import Folder
from slipstream.data.manifest import DOCUMENTS, PAGES, Manifest
from slipstream.data.pages import Pages, check_file


class Shards:
    """Only where nothing is encrypted: rows are taken from the mapped files as they are."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._files, self.manifest = Folder(folder, manifest), manifest
        self._pages = Pages(manifest, str(folder), bytes(self._files.read(PAGES)))
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
        data = self._files.map_file(DOCUMENTS)
        check_file(data, DOCUMENTS, self.manifest, self._files.address)
        return np.frombuffer(data, "<i8")

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
                    stored = self._files.read(self.manifest.shards[shard].name, start, end)
                    if not self._pages.is_whole(page, stored):
                        raise self._pages.damage(page)
                    self._checked[page] = True

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            self._maps[shard] = self._files.map(self.manifest.shards[shard].name).view(self.manifest.dtype)
        return self._maps[shard]
