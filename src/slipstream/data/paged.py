"""What is known of a dataset without opening any of its pages; and what all ways to read its items have in common."""

from typing import NamedTuple, Protocol

import numpy as np

from slipstream.data.guards import Guard
from slipstream.data.manifest import DOCUMENTS, FIRSTS, PAGES, Manifest
from slipstream.data.pages import Pages, checked


class Source(Protocol):
    """Where files are: a `Storage` or a `Folder`."""

    @property
    def address(self) -> str: ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> memoryview: ...


class AnyShards(Protocol):
    """The row of all items of a dataset, wherever it is: `Shards`, `OpenedShards` or `HeldShards`."""

    near: bool
    """Whether rows take next to nothing, nearly always: to have another thread make them would take longer."""
    manifest: Manifest

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The items at each start and those after it, a row for each."""
        ...

    def expect(self, starts: np.ndarray, length: int) -> None:
        """These will be asked for."""
        ...

    def documents(self) -> np.ndarray:
        """Where each document begins, and last where the last one ends."""
        ...


class Needed(NamedTuple):
    """Of each row its first page and its last, and whether its last item is the first of one more page. Those items are
    known beforehand, so that no page is opened for one alone."""

    first: np.ndarray
    last: np.ndarray
    beyond: np.ndarray


class Paged:
    """The pages, and what is kept beside them."""

    def __init__(self, source: Source, manifest: Manifest, guard: Guard) -> None:
        self._source, self._manifest, self._guard = source, manifest, guard
        self.pages = Pages(manifest, source.address, bytes(source.read(PAGES)), guard)
        tokens = FIRSTS in manifest.sha256
        self._firsts = np.frombuffer(self._read(FIRSTS) if tokens else b"", manifest.dtype)

    def needed(self, starts: np.ndarray, length: int) -> Needed:
        """Of the rows of this length that begin at these items."""
        first, ends = self.pages.of(starts), starts + length - 1
        last = self.pages.of(ends)
        beyond = (first < last) & (self.inside(ends) == 0) if len(self._firsts) else first < first
        return Needed(first, last - beyond, beyond)

    def inside(self, items: np.ndarray) -> np.ndarray:
        """Where in its page each of these items is."""
        found: np.ndarray = items % self._manifest.each * self.pages.size % self._manifest.page // self.pages.size
        return found

    def finish(self, rows: np.ndarray, needed: Needed) -> None:
        """Give those rows that reach one item beyond a page their last."""
        if needed.beyond.any():
            rows[needed.beyond, -1] = self._firsts[needed.last[needed.beyond] + 1]

    def documents(self) -> np.ndarray:
        """Where each document begins, and last where the last one ends."""
        return np.frombuffer(self._read(DOCUMENTS), "<i8")

    def _read(self, name: str) -> bytes:
        data = bytes(self._source.read(name))
        return checked(data, name, self._manifest, self._source.address, self._guard)
