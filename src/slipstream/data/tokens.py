"""Tokens that the user made: one row of integers in an .npy file."""

import numpy as np

from slipstream.data.arrays import load_array
from slipstream.data.base import Dataset
from slipstream.data.checks import existing_file
from slipstream.data.sequences import pack
from slipstream.job import Job
from slipstream.job.data import TokenData


def check_tokens(data: TokenData) -> None:
    existing_file(data.source, "data.source")


def open_tokens(data: TokenData, job: Job) -> Dataset:
    path = existing_file(data.source, "data.source")
    tokens = load_array(path, "data.source")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        shape = " × ".join(map(str, tokens.shape))
        raise ValueError(f"data.source: {path} holds {shape} {tokens.dtype}; tokens are one row of integers")
    dataset = pack(tokens, job, data.sequence, data.vocabulary, data.source)
    _check_ids(tokens, data)
    return dataset


def _check_ids(tokens: np.ndarray, data: TokenData) -> None:
    """An id outside the vocabulary would crash a GPU in the middle of the run, far from its cause."""
    for bound, what in ((int(tokens.min()), "smallest"), (int(tokens.max()), "largest")):
        if not 0 <= bound < data.vocabulary:
            where = int(np.argmin(tokens) if what == "smallest" else np.argmax(tokens))
            raise ValueError(
                f"data.source: the {what} token in {data.source} is {bound} (at place {where:,}), outside "
                f"0 to {data.vocabulary - 1}; correct the file or data.vocabulary ({data.vocabulary})"
            )
