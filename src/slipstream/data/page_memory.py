"""Pages in memory: a fixed number of places, filled side by side. What was not used for longest goes first."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from slipstream.data.order import RUN

_AT_ONCE = 4
"""Runs that are fetched side by side."""
_MOST = RUN + 1
"""Pages that are fetched at once: a run of samples often begins and ends inside a page."""
Load = Callable[[dict[int, memoryview]], Iterator[int]]
"""Puts some neighbouring pages into memory, and says of each when it is there; it may go on after the last."""


class PageMemory:
    """Places are taken once and used again: fresh memory would cost nearly as much as decrypting a page into it."""

    def __init__(self, places: int, size: int, load: Load) -> None:
        self.bytes = np.empty((places, size), np.uint8)
        self._load = load
        self._free = list(range(places))
        self._filled: OrderedDict[int, int] = OrderedDict()
        """The place of each page."""
        self._coming: set[int] = set()
        self._failed: dict[int, BaseException] = {}
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="pages")

    @contextmanager
    def holding(self, pages: Collection[int]) -> Iterator[Mapping[int, int]]:
        """The places of these pages. Nothing moves until the end of the block, which therefore should be short."""
        assert len(pages) <= len(self.bytes)
        with self._changed:
            self.expect(pages)
            while missing := [page for page in pages if page not in self._filled]:
                self._changed.wait()
                for page in missing:
                    if error := self._failed.pop(page, None):
                        raise error
                self.expect(pages)  # again, if there was no place for all, or another thread has taken one
            yield self._filled

    def expect(self, pages: Iterable[int]) -> None:
        """These will be needed: fill places with them meanwhile, as far as there are any."""
        with self._changed:
            new = []
            for page in pages:
                if page in self._filled:
                    self._filled.move_to_end(page)
                elif page not in self._coming:
                    new.append(page)
            for neighbours in _neighbours(new[: len(self._free) + len(self._filled)]):
                self._begin(neighbours)

    def _begin(self, pages: list[int]) -> None:
        for page in pages:
            self._failed.pop(page, None)  # what has failed is tried again
        self._coming.update(pages)
        places = {page: self._free.pop() if self._free else self._filled.popitem(last=False)[1] for page in pages}
        self._pool.submit(self._fetch, places)

    def _fetch(self, places: dict[int, int]) -> None:
        missing = dict(places)
        try:
            for page in self._load({page: self.bytes[place].data for page, place in places.items()}):
                with self._changed:
                    self._coming.remove(page)
                    self._filled[page] = missing.pop(page)
                    self._changed.notify_all()
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
