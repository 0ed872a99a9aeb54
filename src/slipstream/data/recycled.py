"""Memory from the system, and used again: to have it cleared by the system costs as much as to decrypt into it."""

import weakref
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np


class Recycled:
    """Memory that is lent again as soon as nobody has a view of it any more."""

    def __init__(self) -> None:
        self._lent: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []
        """Memory, and the array as which it was lent last: all views of that keep it alive."""

    def take(self, size: int) -> np.ndarray:
        """So many bytes."""
        fit = next((each for each in self._lent if len(each[0]) >= size and each[1]() is None), None)
        memory = fit[0] if fit else fresh_memory(1, size)[0]
        self._lent = [each for each in self._lent if each[1]() is not None]  # what is too small goes back
        lent = np.frombuffer(memory.data, np.uint8)
        self._lent.append((memory, weakref.ref(lent)))
        return lent[:size]


def fresh_memory(places: int, size: int) -> np.ndarray:
    """So many places of so many bytes. Not by numpy, which asks the system for large pages: a virtual machine may give
    those that are free back to its host, and to have one again, 2 MiB, took 4 ms, in which ten times as much can be
    decrypted."""
    memory = mmap(-1, places * size, MAP_PRIVATE | MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8).reshape(places, size)
