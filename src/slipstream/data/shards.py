"""The row of all items of a prepared dataset in a folder. Every page is checked before it is used, in each epoch anew:
which also has it read from the disk by then."""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np

from slipstream.data.folder import Folder
from slipstream.data.manifest import DOCUMENTS, PAGES, Manifest
from slipstream.data.order import RUN, WINDOW
from slipstream.data.pages import Pages, between, check_file, distinct
from slipstream.data.windows import address_of, copy_rows

_KNOWN = 4 * WINDOW * (RUN + 2)
"""Pages of four windows: this one and the next, and what is asked for between them."""


class Shards:
    """Only where nothing is encrypted: rows are taken from the mapped files as they are."""

    near = True
    """As in `AnyShards`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._files, self.manifest = Folder(folder, manifest), manifest
        self._pages = Pages(manifest, str(folder), bytes(self._files.read(PAGES)))
        self._checks: OrderedDict[int, Future[None]] = OrderedDict()
        """Of the pages that were asked for last."""
        self._whole = np.zeros(len(self._pages), dtype=bool)
        """Those of them that are what was prepared."""
        self._changing = Lock()
        """Samples to judge on are fetched while others are fetched ahead."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checks")
        self._maps: dict[int, np.ndarray] = {}
        self._items = np.array([shard.items for shard in manifest.shards])
        self._addresses = np.zeros(len(manifest.shards), np.int64)
        """Of those that are mapped."""

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The items at each start and those after it, a row for each."""
        assert starts.min(initial=0) >= 0 and starts.max(initial=0) <= self.manifest.items - length, "in memory, too"
        if not self._are_whole(starts, length):
            for check in self._check(starts, length):
                check.result()
        shards = starts // self.manifest.each
        places = starts - shards * self.manifest.each
        inside = places + length <= self._items[shards]
        made = copy_rows(self._begins(shards) + places * self._pages.size, inside, length, self.manifest.dtype)
        for row in np.flatnonzero(~inside).tolist():
            made[row] = self._across(int(shards[row]), int(places[row]), length)
        return made

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

    def _are_whole(self, starts: np.ndarray, length: int) -> bool:
        """Whether all pages that hold these items are known to be; nearly always they are, and it is asked often."""
        first, last = self._pages.of(starts), self._pages.of(starts + length - 1)
        return bool((self._whole[first] & self._whole[last] & (last - first < 2)).all())

    def _check(self, starts: np.ndarray, length: int) -> "list[Future[None]]":
        """Of the pages that hold these items; one that was checked is not checked again while it is remembered."""
        pages = between(self._pages.of(starts), self._pages.of(starts + length - 1)).tolist()
        with self._changing:
            for page in pages:
                self._checks[page] = self._checks.get(page) or self._pool.submit(self._compare, page)
                self._checks.move_to_end(page)
            while len(self._checks) > max(_KNOWN, len(pages)):
                page, _ = self._checks.popitem(last=False)
                self._whole[page] = False
            return [self._checks[page] for page in pages]

    def _compare(self, page: int) -> None:
        shard, start, end = self._pages.bounds(page)
        if not self._pages.is_whole(page, self._files.read(self.manifest.shards[shard].name, start, end)):
            raise self._pages.damage(page)
        self._whole[page] = True

    def _begins(self, shards: np.ndarray) -> np.ndarray:
        """Where in memory these shards begin."""
        begins: np.ndarray = self._addresses[shards]
        if not begins.all():
            for shard in distinct(shards[begins == 0]).tolist():
                self._addresses[shard] = address_of(self._map(shard))
            begins = self._addresses[shards]
        return begins

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            self._maps[shard] = self._files.map(self.manifest.shards[shard].name).view(self.manifest.dtype)
        return self._maps[shard]
