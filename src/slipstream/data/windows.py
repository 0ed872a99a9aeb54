"""Rows cut out of one long row."""

import numpy as np


def copy_windows(items: np.ndarray, starts: np.ndarray, made: np.ndarray, rows: np.ndarray | None = None) -> None:
    """Put the items at each start, and those after it, into a row of `made`: into all its rows, or into these.

    A window counts as one element of many bytes, which numpy copies at once instead of item by item.
    """
    assert made.dtype == items.dtype, "bytes are copied"
    length = made.shape[1]
    whole = np.dtype((np.void, length * items.itemsize))
    windows = np.ndarray(len(items) - length + 1, whole, items, strides=items.itemsize)
    made.view(whole)[slice(None) if rows is None else rows, 0] = windows[starts]
