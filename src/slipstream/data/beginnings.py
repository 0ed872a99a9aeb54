"""Where documents begin in the sequences that they are packed into."""

import numpy as np


def beginnings(documents: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """The place in its sequence at which each token's document begins [sequences, length]; 0 where that was before it.

    Sequences begin at `starts` in the row of all tokens, and documents at `documents`, which never falls: of a mapped
    file only what lies in the sequences, and on the way there, is read.
    """
    first = np.searchsorted(documents, starts, side="right")
    counts = np.searchsorted(documents, starts + length, side="left") - first
    sequence = np.repeat(np.arange(len(starts)), counts)
    before = np.cumsum(counts) - counts
    number = np.arange(len(sequence)) + np.repeat(first - before, counts)
    places = documents[number] - starts[sequence]
    made = np.zeros((len(starts), length), np.int64)
    made[sequence, places] = places
    filled: np.ndarray = np.maximum.accumulate(made, axis=1)
    return filled
