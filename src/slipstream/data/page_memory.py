"""Pages in memory: a fixed number of places, filled side by side. What was not used for longest goes first."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np

_AT_ONCE = 8
"""Pages that are fetched side by side."""


class PageMemory:
    """Places are taken once and used again: fresh memory would cost nearly as much as decrypting a page into it."""

    def __init__(self, places: int, size: int, fill: Callable[[int, memoryview], AbstractContextManager[None]]) -> None:
        """`fill` puts a page into memory, and may go on when the page has been handed over."""
        self.bytes = np.empty((places, size), np.uint8)
        self._fill = fill
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
            for page in new[: len(self._free) + len(self._filled)]:
                self._begin(page)

    def _begin(self, page: int) -> None:
        place = self._free.pop() if self._free else self._filled.popitem(last=False)[1]
        self._failed.pop(page, None)  # what has failed is tried again
        self._coming.add(page)
        self._pool.submit(self._load, page, place)

    def _load(self, page: int, place: int) -> None:
        error = None
        with ExitStack() as handed_over:
            try:
                handed_over.enter_context(self._fill(page, self.bytes[place].data))
            except BaseException as found:  # raised where the page is needed
                error = found
            with self._changed:
                self._coming.remove(page)
                if error:
                    self._failed[page] = error
                    self._free.append(place)
                else:
                    self._filled[page] = place
                self._changed.notify_all()
