"""The row of all items of an encrypted dataset in a folder. When the first sample of a window is asked for, all its
pages are opened, by this thread and another, and their rows laid as they will be asked for. Only those that the loop
begins with are opened before: what is computed beside it is taken from it, as it uses all processors, and memory for
two windows would have to be had from the system (docs/benchmarks.md)."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import PAGESIZE
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from slipstream.data.folder import Folder
from slipstream.data.guards import SPARE, Guard
from slipstream.data.laid import Laid
from slipstream.data.manifest import Manifest
from slipstream.data.order import RUN, WINDOW
from slipstream.data.paged import Needed, Paged
from slipstream.data.pages import between, distinct
from slipstream.data.recycled import Recycled, fresh_memory

_MOST = 2 * WINDOW * RUN
"""Pages that rows may fill: those of a window are half as many, if they are shorter than a page."""
_EXPECTED = 32
"""So much is remembered of what is expected: somebody may never ask for it."""
_FIRST = 2
"""Of what is expected before anything is in use, so much is begun: a first batch, and the window that it is from."""
_Page = tuple[int, int, list[int]]
"""Its number, its first item, and the places of its rows."""


class _Laying(NamedTuple):
    """Rows that are being laid."""

    laid: Laid
    needed: Needed
    waiting: deque[_Page]
    """Pages that nobody has begun."""
    other: "Future[None]"
    """What the other thread does for it."""


class OpenedShards:
    """Memory holds the rows of a window, whatever the size of the dataset."""

    near = True
    """As in `AnyShards`."""

    def __init__(self, folder: Path, manifest: Manifest, guard: Guard) -> None:
        self._files, self.manifest = Folder(folder, manifest), manifest
        self._paged = Paged(self._files, manifest, guard)
        self._pages = self._paged.pages
        self._work = fresh_memory(2, manifest.page + SPARE)
        """Room for a page, for each of the two threads."""
        self._laid = Laid.nothing()
        """What is in use."""
        self._begun: deque[_Laying] = deque()
        self._expected: deque[tuple[np.ndarray, int]] = deque(maxlen=_EXPECTED)
        """What comes after these, in its order: starts of rows that will be asked for together, and their length."""
        self._changing = Lock()
        """Samples to judge on are fetched while others are fetched ahead."""
        self._other = ThreadPoolExecutor(1, thread_name_prefix="pages")
        self._hurry = False
        """Whether that thread is needed for what is asked for now."""
        self._memory = Recycled()

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The items at each start and those after it, a row for each."""
        with self._changing:
            found = self._laid.slice(starts) if self._laid.length == length else None
            return self._collect(starts, length) if found is None else found

    def expect(self, starts: np.ndarray, length: int) -> None:
        """These will be asked for: have their pages read from the disk meanwhile."""
        with self._changing:
            known = (self._laid.starts, *self._coming())
            if not len(starts) or any(starts[0] in some and starts[-1] in some for some in known):
                return
            room = self._room(length)
            self._expected.extend((starts[at : at + room], length) for at in range(0, len(starts), room))
            if not self._laid.length and len(self._begun) < _FIRST:
                self._begun.append(self._begin(*self._expected.popleft()))
            else:
                self._read_ahead()

    def documents(self) -> np.ndarray:
        """Where each document begins, and last where the last one ends."""
        return self._paged.documents()

    def _collect(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Rows of a window that ends and of the next one; or any others."""
        made, done = np.empty((len(starts), length), self.manifest.dtype), 0
        while done < len(starts):
            if self._laid.length == length:
                done += self._laid.copy(starts[done:], made[done:])
            if done < len(starts) and not self._turn_to(starts[done]):
                some = starts[done : done + self._room(length)]
                done += self._finish(self._begin(some, length)).copy(some, made[done:])
        return made

    def _turn_to(self, start: int) -> bool:
        """Have what is expected with this start in use, if anything is."""
        place = next((place for place, starts in enumerate(self._coming()) if start in starts), None)
        if place is None:
            return False
        for _ in range(place):  # was not asked for
            if self._begun:
                self._begun.popleft().waiting.clear()
            else:
                self._expected.popleft()
        self._laid = Laid.nothing()  # so that its memory can be used again
        self._laid = self._finish(self._next())
        self._read_ahead()
        return True

    def _coming(self) -> Iterator[np.ndarray]:
        """Starts of what is expected, in their order."""
        yield from (each.laid.starts for each in self._begun)
        yield from (starts for starts, _ in self._expected)

    def _next(self) -> _Laying:
        return self._begun.popleft() if self._begun else self._begin(*self._expected.popleft())

    def _room(self, length: int) -> int:
        """How many rows may be laid at once."""
        return max(1, _MOST * self.manifest.page // (length * self._pages.size))

    def _begin(self, starts: np.ndarray, length: int) -> _Laying:
        """Have the other thread lay these rows."""
        memory = self._memory.take(len(starts) * length * self._pages.size)
        laid = Laid(starts, memory.view(self.manifest.dtype).reshape(-1, length))
        needed = self._paged.needed(starts, length)
        pages = between(needed.first, needed.last)
        firsts, ends = self._pages.items(pages)
        waiting = deque(zip(pages.tolist(), firsts.tolist(), laid.places(firsts, ends).tolist(), strict=True))
        self._hurry = True
        return _Laying(laid, needed, waiting, self._other.submit(self._open, waiting, laid, self._work[1]))

    def _finish(self, laying: _Laying) -> Laid:
        """Open what the other thread has not begun, and wait for the rest."""
        try:
            self._open(laying.waiting, laying.laid, self._work[0])
        finally:
            if not laying.other.cancel():  # or it is still at something else
                laying.other.result()
        self._paged.finish(laying.laid.rows, laying.needed)
        return laying.laid

    def _open(self, waiting: deque[_Page], laid: Laid, work: np.ndarray) -> None:
        """Page after page, until none is waiting."""
        for page, first, places in _taken(waiting):
            shard, start, end = self._pages.bounds(page)
            stored = self._files.read(self.manifest.shards[shard].name, start, end)
            if not self._pages.open(page, stored, work.data):
                waiting.clear()
                raise self._pages.damage(page)
            laid.lay(work[: end - start], first, places)

    def _read_ahead(self) -> None:
        """Have what is expected read from the disk, while the other thread has nothing to open."""
        self._hurry = False
        self._other.submit(self._touch, [starts for starts, _ in self._expected])

    def _touch(self, expected: list[np.ndarray]) -> None:
        for starts in expected:
            for stretch in self._pages.stretches(distinct(self._pages.of(starts)).tolist()):
                if self._hurry:
                    return
                shard, start, _ = self._pages.bounds(stretch[0])
                end = self._pages.bounds(stretch[-1]).end
                stored = self._files.read(self.manifest.shards[shard].name, start, end)
                np.frombuffer(stored, np.uint8)[::PAGESIZE].max()


def _taken(waiting: deque[_Page]) -> Iterator[_Page]:
    """One after the other, until none is left by the other thread."""
    while True:
        try:
            page = waiting.popleft()
        except IndexError:
            return
        yield page
