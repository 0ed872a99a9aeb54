"""The row of all items of a prepared dataset in a folder. Every page is checked before it is used, in each epoch anew:
which also has it read from the disk by then."""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from slipstream.data.folder import Folder
from slipstream.data.manifest import DOCUMENTS, PAGES, Manifest
from slipstream.data.order import RUN, WINDOW
from slipstream.data.pages import Pages, between, check_file
from slipstream.data.windows import copy_windows

_KNOWN = 4 * WINDOW * (RUN + 2)
"""Pages of four windows: this one and the next, and what is asked for between them."""


class Shards:
    """Only where nothing is encrypted: rows are taken from the mapped files as they are."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._files, self.manifest = Folder(folder, manifest), manifest
        self._pages = Pages(manifest, str(folder), bytes(self._files.read(PAGES)))
        self._checks: OrderedDict[int, Future[None] | None] = OrderedDict()
        """Of the pages that were asked for last; None where it is known to be whole."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checks")
        self._maps: dict[int, np.ndarray] = {}

    def fill(self, starts: np.ndarray, made: np.ndarray) -> None:
        """Put the items at each start, and those after it, into a row."""
        length = made.shape[1]
        for page, check in self._check(starts, length):
            check.result()
            self._checks[page] = None
        shards, places = np.divmod(starts, self.manifest.each)
        for shard in np.unique(shards).tolist():
            items, rows = self._map(shard), np.flatnonzero(shards == shard)
            ends_here = places[rows] + length <= len(items)
            whole = rows[ends_here]
            if len(whole):
                copy_windows(items, places[whole], made, whole)
            for row in rows[~ends_here].tolist():
                made[row] = self._across(shard, int(places[row]), length)

    def expect(self, starts: np.ndarray, length: int) -> None:
        """These will be asked for: check their pages meanwhile."""
        self._check(starts, length)

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

    def _check(self, starts: np.ndarray, length: int) -> "list[tuple[int, Future[None]]]":
        """The pages that hold these items and are not known to be whole, each with its check."""
        pages = between(self._pages.of(starts), self._pages.of(starts + length - 1)).tolist()
        unknown = []
        for page in pages:
            check = self._checks.pop(page) if page in self._checks else self._pool.submit(self._compare, page)
            self._checks[page] = check
            if check:
                unknown.append((page, check))
        while len(self._checks) > max(_KNOWN, len(pages)):
            self._checks.popitem(last=False)
        return unknown

    def _compare(self, page: int) -> None:
        shard, start, end = self._pages.bounds(page)
        if not self._pages.is_whole(page, self._files.read(self.manifest.shards[shard].name, start, end)):
            raise self._pages.damage(page)

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            self._maps[shard] = self._files.map(self.manifest.shards[shard].name).view(self.manifest.dtype)
        return self._maps[shard]
