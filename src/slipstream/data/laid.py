"""Rows of items in the order in which they will be asked for, laid there page by page: who asks then only looks."""

from collections.abc import Sequence
from typing import Self

import numpy as np

_MOST = np.iinfo(np.int64).max


class Laid:
    """`rows` has a row for each of `starts`: the item that it begins with, and those after it."""

    def __init__(self, starts: np.ndarray, rows: np.ndarray) -> None:
        self.starts, self.rows, self.length = starts, rows, int(rows.shape[1])
        self._order = starts.argsort()
        self._sorted = starts[self._order]
        steps = np.diff(self._sorted)
        self._step = max(1, int(steps.min(initial=_MOST)))
        self._uneven = np.concatenate(([0], np.cumsum(steps != self._step)))
        """How many, before each of the sorted starts, are farther from the next than the nearest two are."""

    @classmethod
    def nothing(cls) -> Self:
        """No rows."""
        return cls(np.empty(0, np.int64), np.empty((0, 0), np.uint8))

    def places(self, firsts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """For pages of these items [pages, 4]: the sorted rows from the first place to the last have items in the page,
        those from the second to the third all of theirs."""
        found = self._sorted.searchsorted([firsts - self.length + 1, firsts, ends - self.length + 1, ends])
        found[2] = found[2].clip(min=found[1])
        return found.T

    def lay(self, page: np.ndarray, first: int, places: Sequence[int]) -> None:
        """Copy the items of a page to the rows that they belong to; `page` is bytes, and begins with item `first`."""
        size, (low, begin, end, high) = self.rows.dtype.itemsize, places
        items = len(page) // size
        if begin < end:
            row = np.dtype((np.void, self.length * size))
            every = np.ndarray(items - self.length + 1, row, page.data, strides=(size,))
            if self._uneven[begin] == self._uneven[end - 1]:  # nearly always, and then they are copied only once
                some = every[self._sorted[begin] - first : self._sorted[end - 1] - first + 1 : self._step]
            else:
                some = every[self._sorted[begin:end] - first]
            self.rows.view(row)[self._order[begin:end], 0] = some
        for place in (*range(low, begin), *range(end, high)):
            start = int(self._sorted[place]) - first
            inside = slice(max(0, start), min(items, start + self.length))
            made = self.rows[self._order[place]]
            made[inside.start - start : inside.stop - start] = page.view(made.dtype)[inside]

    def slice(self, starts: np.ndarray) -> np.ndarray | None:
        """These rows, if they lie one after the other, as they mostly do."""
        place = self._sorted.searchsorted(starts[:1])
        if not len(starts) or place[0] == len(self._sorted):
            return None
        first = int(self._order[place[0]])
        end = first + len(starts)
        if not np.array_equal(self.starts[first:end], starts):
            return None
        some = self.rows[first:end]
        # The last ones are copied: they would keep all the memory when those of the next window are to have it.
        return some if end + len(starts) < len(self.rows) else some.copy()

    def copy(self, starts: np.ndarray, into: np.ndarray) -> int:
        """Copy these rows, up to the first that is not there. How many."""
        if not len(self.starts):
            return 0
        places = self._sorted.searchsorted(starts).clip(max=len(self._sorted) - 1)
        missing = self._sorted[places] != starts
        count = int(missing.argmax()) if missing.any() else len(starts)
        np.take(self.rows, self._order[places[:count]], axis=0, out=into[:count], mode="clip")
        return count
