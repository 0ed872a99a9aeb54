"""Rows cut out of memory."""

import ctypes

import numpy as np

_MEMORY = ctypes.c_char * 2**47
"""As far as the memory of a process reaches."""
_MOST = 2**62
"""Bytes of an array that numpy can count."""


def address_of(items: np.ndarray) -> int:
    """Where an array lies in memory."""
    return int(items.__array_interface__["data"][0])


def copy_rows(addresses: np.ndarray, whole: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
    """A row for each address, of the items that lie there and after it. Those that are not `whole` there, which are
    few, are left for the caller to fill."""
    if not whole.any():
        return np.empty((len(addresses), length), dtype)
    # All in one call, which is the quickest: in place of the others, one that is whole.
    return _copied(np.where(whole, addresses, addresses[whole.argmax()]), length, dtype)


def _copied(addresses: np.ndarray, length: int, dtype: np.dtype) -> np.ndarray:
    """All in one call, and every item once, whichever arrays they belong to: the memory from the first to the last
    counts as one array, in which a row is one element of many bytes. What lies between rows is never touched."""
    if not len(addresses):
        return np.empty((0, length), dtype)
    row, low = np.dtype((np.void, length * dtype.itemsize)), int(addresses.min())
    span = int(addresses.max()) - low + 1
    if span * row.itemsize > _MOST:  # one row alone never is
        half = len(addresses) // 2
        return np.concatenate([_copied(some, length, dtype) for some in (addresses[:half], addresses[half:])])
    rows = np.ndarray(span, row, memoryview(_MEMORY.from_address(low)), strides=1)
    made: np.ndarray = rows[addresses - low].view(dtype).reshape(-1, length)
    return made
