"""The row of all items of a prepared dataset in a folder. Every page is checked before it is used."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from slipstream.data.folder import Folder
from slipstream.data.manifest import DOCUMENTS, PAGES, Manifest
from slipstream.data.pages import Pages, between, check_file


class Shards:
    """Only where nothing is encrypted: rows are taken from the mapped files as they are."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._files, self.manifest = Folder(folder, manifest), manifest
        self._pages = Pages(manifest, str(folder), bytes(self._files.read(PAGES)))
        self._whole = np.zeros(len(self._pages), dtype=bool)
        """Pages that were compared with their checksums."""
        self._checks: dict[int, Future[None]] = {}
        """Of pages that are being compared, or were found to be damaged."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checks")
        self._maps: dict[int, np.ndarray] = {}

    def fill(self, starts: np.ndarray, made: np.ndarray) -> None:
        """Put the items at each start, and those after it, into a row."""
        length = made.shape[1]
        for page in self._unchecked(starts, length):
            self._check(page).result()
        shards, places = np.divmod(starts, self.manifest.each)
        for shard in np.unique(shards).tolist():
            items, rows = self._map(shard), np.flatnonzero(shards == shard)
            ends_here = places[rows] + length <= len(items)
            whole = rows[ends_here]
            if len(whole):
                made[whole] = sliding_window_view(items, length)[places[whole]]
            for row in rows[~ends_here].tolist():
                made[row] = self._across(shard, int(places[row]), length)

    def expect(self, starts: np.ndarray, length: int) -> None:
        """These will be asked for: check their pages meanwhile."""
        for page in self._unchecked(starts, length):
            self._check(page)

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

    def _unchecked(self, starts: np.ndarray, length: int) -> list[int]:
        """The pages that hold these items and were not compared yet."""
        pages = between(self._pages.of(starts), self._pages.of(starts + length - 1))
        found: list[int] = pages[~self._whole[pages]].tolist()
        return found

    def _check(self, page: int) -> "Future[None]":
        return self._checks.get(page) or self._checks.setdefault(page, self._pool.submit(self._compare, page))

    def _compare(self, page: int) -> None:
        shard, start, end = self._pages.bounds(page)
        if not self._pages.is_whole(page, self._files.read(self.manifest.shards[shard].name, start, end)):
            raise self._pages.damage(page)
        self._whole[page] = True
        self._checks.pop(page, None)

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            self._maps[shard] = self._files.map(self.manifest.shards[shard].name).view(self.manifest.dtype)
        return self._maps[shard]
