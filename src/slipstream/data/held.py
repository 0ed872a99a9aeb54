"""The row of all tokens of a prepared dataset that is far away, encrypted, or both. Pages are fetched and opened side
by side, before they are used. This machine's disk keeps those of a remote dataset as they are there: encrypted ones
encrypted."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from slipstream.data.guards import CHECKSUMS, Guard
from slipstream.data.manifest import DOCUMENTS, MANIFEST, PAGES, Manifest, parse_manifest
from slipstream.data.order import WINDOW
from slipstream.data.page_cache import PageCache
from slipstream.data.pages import Pages, checked
from slipstream.data.storage import Storage
from slipstream.runs.cache import cache_folder

_AT_ONCE = 8
"""Pages that are fetched side by side."""
_HELD = 5 * WINDOW
"""Pages in memory: those of a window, which may touch twice as many as it is long, and of the next one; and a few."""


class Source(Protocol):
    """Where files are: a `Storage` or a `Folder`."""

    @property
    def address(self) -> str: ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> memoryview: ...


class HeldShards:
    """Memory holds the pages of two windows, whatever the size of the dataset."""

    def __init__(self, source: Source, manifest: Manifest, cache: PageCache, guard: Guard = CHECKSUMS) -> None:
        self._source, self.manifest, self._cache, self._guard = source, manifest, cache, guard
        self._pages = Pages(manifest, source.address, bytes(source.read(PAGES)), guard)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pages")
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Future[np.ndarray]] = OrderedDict()

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The tokens at each start and after it."""
        first = self._pages.of(starts)
        coming = self._begin(self._needed(starts, length))
        made = np.empty((len(starts), length), dtype=self.manifest.dtype)
        inside = starts % self.manifest.each * self._pages.size % self.manifest.page // self._pages.size
        for row, (page, place) in enumerate(zip(first.tolist(), inside.tolist(), strict=True)):
            done = 0
            while done < length:
                part = coming[page].result()[place : place + length - done]
                made[row, done : done + len(part)] = part
                done, page, place = done + len(part), page + 1, 0
        return made

    def expect(self, starts: np.ndarray, length: int) -> None:
        """These will be asked for: fetch them meanwhile."""
        self._begin(self._needed(starts, length))

    def documents(self) -> np.ndarray:
        """Where each document begins, and last where the last one ends."""
        data = bytes(self._source.read(DOCUMENTS))
        return np.frombuffer(checked(data, DOCUMENTS, self.manifest, self._source.address, self._guard), "<i8")

    def _needed(self, starts: np.ndarray, length: int) -> list[int]:
        first, last = self._pages.of(starts), self._pages.of(starts + length - 1)
        steps = range(int((last - first).max()) + 1) if len(starts) else range(0)
        pages = [np.minimum(first + step, last) for step in steps]
        return [int(page) for page in np.unique(np.concatenate(pages))] if pages else []

    def _begin(self, pages: Iterable[int]) -> dict[int, "Future[np.ndarray]"]:
        with self._lock:
            wanted = {}
            for page in pages:
                known = self._held.get(page)
                if known is None or (known.done() and known.exception()):  # what has failed is tried again
                    known = self._pool.submit(self._load, page)
                self._held[page] = wanted[page] = known
                self._held.move_to_end(page)
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
        return wanted

    def _load(self, page: int) -> np.ndarray:
        with self._cache.locked(page):
            stored = self._cache.get(page)
            opened = None if stored is None else self._pages.open(page, stored)
            if opened is None:
                if stored is not None:
                    self._cache.forget(page)
                shard, start, end = self._pages.bounds(page)
                stored = self._source.read(self.manifest.shards[shard].name, start, end)
                opened = self._pages.open(page, stored)
                if opened is None:
                    raise self._pages.damage(page)
                self._cache.put(page, stored)
        return np.frombuffer(opened, dtype=self.manifest.dtype)


def remote_manifest(storage: Storage, setting: str) -> Manifest:
    """Raises ValueError if there is none, or none that can be understood."""
    text = bytes(storage.read(MANIFEST)).decode("utf-8", errors="replace")
    return parse_manifest(text, f"{storage.address}/{MANIFEST}", setting)


def pages_folder(manifest: Manifest) -> Path:
    """Where pages of a dataset are kept here: the same for all who read it."""
    name = hashlib.sha256(repr(manifest).encode()).hexdigest()[:24]
    return cache_folder() / "pages" / name
