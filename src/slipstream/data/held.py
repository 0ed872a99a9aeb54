"""The row of all items of a prepared dataset that is far away, encrypted or not. Pages are fetched and opened side by
side, before they are used. This machine's disk keeps them as they are there: encrypted ones encrypted."""

import hashlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from slipstream.data.guards import CHECKSUMS, SPARE, Guard
from slipstream.data.manifest import MANIFEST, Manifest, parse_manifest
from slipstream.data.order import RUN, WINDOW
from slipstream.data.page_cache import Fetched, PageCache
from slipstream.data.page_memory import PageMemory
from slipstream.data.paged import Paged, Source
from slipstream.data.pages import between
from slipstream.data.storage import Storage
from slipstream.data.windows import address_of, copy_rows
from slipstream.runs.cache import cache_folder

_HELD = 2 * WINDOW * (RUN + 2)
"""Pages in memory: those of a window, whose runs may begin inside a page, and of the next one."""

_FETCHED = 4
"""Runs that are fetched side by side."""


class HeldShards:
    """Memory holds the pages of two windows, whatever the size of the dataset."""

    near = False
    """As in `AnyShards`."""

    def __init__(self, source: Source, manifest: Manifest, cache: PageCache, guard: Guard = CHECKSUMS) -> None:
        self._source, self.manifest, self._cache = source, manifest, cache
        self._paged = Paged(source, manifest, guard)
        self._pages = self._paged.pages
        self._width = -(-(manifest.page + SPARE) // self._pages.size)
        """Tokens for which a place has room."""
        places, size = min(_HELD, 2 * len(self._pages)), self._width * self._pages.size
        self._memory = PageMemory(places, size, len(self._pages), self._load, _FETCHED)
        self._tokens = self._memory.bytes.reshape(-1).view(manifest.dtype)
        self._begin = address_of(self._tokens)

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The items at each start and those after it, a row for each."""
        needed = self._paged.needed(starts, length)
        first, last, beyond = needed
        pages = between(first, last)
        if len(pages) > _HELD // 2:  # other threads need memory too
            return self._by_halves(starts, length)
        inside, whole = self._paged.inside(starts), (first == last) & ~beyond
        with self._memory.holding(pages) as places:
            begins = places[first] * self._width + inside
            made = copy_rows(self._begin + begins * self._pages.size, whole, length, self.manifest.dtype)
            for row in np.flatnonzero(~whole).tolist():
                here = length - int(beyond[row])
                made[row, :here] = self._across(int(first[row]), int(inside[row]), here, places)
        self._paged.finish(made, needed)
        return made

    def expect(self, starts: np.ndarray, length: int) -> None:
        """These will be asked for: fetch them meanwhile."""
        first, last, _ = self._paged.needed(starts, length)
        self._memory.expect(between(first, last))

    def documents(self) -> np.ndarray:
        """Where each document begins, and last where the last one ends."""
        return self._paged.documents()

    def _by_halves(self, starts: np.ndarray, length: int) -> np.ndarray:
        if len(starts) > 1:
            half = len(starts) // 2
            return np.concatenate([self.rows(some, length) for some in (starts[:half], starts[half:])])
        half = length // 2
        return np.concatenate([self.rows(starts, half), self.rows(starts + half, length - half)], axis=1)

    def _across(self, page: int, place: int, length: int, places: np.ndarray) -> np.ndarray:
        """Tokens that begin in one page and end in another."""
        parts = []
        while length:
            _, start, end = self._pages.bounds(page)
            size = min(length, (end - start) // self._pages.size - place)
            begin = int(places[page]) * self._width + place
            parts.append(self._tokens[begin : begin + size])
            page, place, length = page + 1, 0, length - size
        return np.concatenate(parts)

    def _load(self, wanted: dict[int, memoryview]) -> Iterator[int]:
        """Put neighbouring pages into memory. The disk keeps them afterwards, when nobody is waiting for them."""
        with self._cache.locked(next(iter(wanted)) // RUN):
            missing = []
            for page, into in wanted.items():
                _, start, end = self._pages.bounds(page)
                stored = self._cache.get(page, end - start)
                if stored is not None and self._pages.open(page, stored, into):
                    yield page
                else:
                    missing.append(page)
            fetched = [self._read_pages(stretch) for stretch in self._pages.stretches(missing)]
            for page, stored in chain.from_iterable(fetched):
                if not self._pages.open(page, stored, wanted[page]):
                    raise self._pages.damage(page)
                yield page
            for pages in fetched:
                self._cache.put(pages)

    def _read_pages(self, stretch: list[int]) -> list[Fetched]:
        """Pages that follow each other, in one part."""
        bounds = [self._pages.bounds(page) for page in stretch]
        shard, begin, _ = bounds[0]
        data = self._source.read(self.manifest.shards[shard].name, begin, bounds[-1].end)
        return [
            (page, data[start - begin : end - begin]) for page, (_, start, end) in zip(stretch, bounds, strict=True)
        ]


def remote_manifest(storage: Storage, setting: str) -> Manifest:
    """Raises ValueError if there is none, or none that can be understood."""
    text = bytes(storage.read(MANIFEST)).decode("utf-8", errors="replace")
    return parse_manifest(text, f"{storage.address}/{MANIFEST}", setting)


def pages_folder(manifest: Manifest) -> Path:
    """Where pages of a dataset are kept here: the same for all who read it."""
    name = hashlib.sha256(repr(manifest).encode()).hexdigest()[:24]
    return cache_folder() / "pages" / name
