"""Pages in memory: a fixed number of places, filled side by side. What was not used for longest goes first."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from slipstream.data.order import RUN
from slipstream.data.recycled import fresh_memory

_NONE = np.empty(0, np.int64)
_NOWHERE = -1
_NEVER = np.iinfo(np.int64).max
_MOST = RUN + 1
"""Pages that are fetched at once: a run of samples often begins and ends inside a page."""
Load = Callable[[dict[int, memoryview]], Iterator[int]]
"""Puts some neighbouring pages into memory, and says of each when it is there; it may go on after the last."""


class PageMemory:
    """Places are taken once and used again: fresh memory would cost nearly as much as decrypting a page into it."""

    def __init__(self, places: int, size: int, pages: int, load: Load, at_once: int) -> None:
        self.bytes = fresh_memory(places, size)
        self._load = load
        self._free = list(range(places))
        self._place = np.full(pages, _NOWHERE)
        """Of each page that is filled."""
        self._page = np.full(places, _NOWHERE)
        """The page that fills each place."""
        self._used = np.full(places, _NEVER)
        """When each place was asked for last; never, where no page fills it."""
        self._now = 0
        self._coming: set[int] = set()
        self._failed: dict[int, BaseException] = {}
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="pages")

    @contextmanager
    def holding(self, pages: np.ndarray) -> Iterator[np.ndarray]:
        """The place of each of these pages, by its number. Nothing moves until the end of the block, which therefore
        should be short."""
        assert len(pages) <= len(self.bytes)
        with self._changed:
            while len(missing := self._begin_missing(pages)):
                self._changed.wait()
                for page in missing.tolist():
                    if error := self._failed.pop(page, None):
                        raise error
            yield self._place

    def expect(self, pages: np.ndarray) -> None:
        """These will be needed: fill places with them meanwhile, as far as there are any."""
        with self._changed:
            self._begin_missing(pages)

    def _begin_missing(self, pages: np.ndarray) -> np.ndarray:
        """Those that are not there, some of them on their way; again, if there was no place for all, or another thread
        has taken one."""
        places = self._place[pages]
        here = places != _NOWHERE
        self._now += 1
        self._used[places[here]] = self._now
        if here.all():  # nearly always, and it is asked often
            return _NONE
        missing: np.ndarray = pages[~here]
        new = [page for page in missing.tolist() if page not in self._coming]
        for neighbours in _neighbours(new[: len(self.bytes) - len(self._coming)]):
            self._begin(neighbours)
        return missing

    def _begin(self, pages: list[int]) -> None:
        for page in pages:
            self._failed.pop(page, None)  # what has failed is tried again
        self._coming.update(pages)
        self._pool.submit(self._fetch, {page: self._take_place() for page in pages})

    def _take_place(self) -> int:
        if self._free:
            return self._free.pop()
        place = int(self._used.argmin())
        assert self._used[place] != _NEVER
        self._place[self._page[place]] = self._page[place] = _NOWHERE
        self._used[place] = _NEVER
        return place

    def _fill(self, page: int, place: int) -> None:
        self._coming.remove(page)
        self._place[page], self._page[place] = place, page
        self._now += 1
        self._used[place] = self._now
        self._changed.notify_all()

    def _fetch(self, places: dict[int, int]) -> None:
        missing = dict(places)
        try:
            for page in self._load({page: self.bytes[place].data for page, place in places.items()}):
                with self._changed:
                    self._fill(page, missing.pop(page))
        except BaseException as error:  # raised where a page is needed
            with self._changed:
                for page, place in missing.items():
                    self._coming.remove(page)
                    self._failed[page] = error
                    self._free.append(place)
                self._changed.notify_all()


def _neighbours(pages: list[int]) -> Iterator[list[int]]:
    """Pages that follow each other, so many at a time."""
    for _, some in groupby(enumerate(pages), lambda each: each[1] - each[0]):
        stretch = [page for _, page in some]
        yield from (stretch[at : at + _MOST] for at in range(0, len(stretch), _MOST))
