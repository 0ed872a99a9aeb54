"""Samples that lie in two arrays, one row for each."""

from pathlib import Path

import numpy as np

from slipstream.data.base import Batch, Facts


class Arrays:
    """A dataset of two arrays with as many rows: inputs of any real type, targets as the task wants them."""

    def __init__(self, inputs: np.ndarray, targets: np.ndarray, outputs: int) -> None:
        assert len(inputs) == len(targets), "the source has checked this"
        self.facts = Facts(inputs=inputs.shape[1:], outputs=outputs, tokens=False)
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self._inputs)

    def fetch(self, indices: np.ndarray) -> Batch:
        import torch

        inputs = np.take(self._inputs, indices, axis=0)  # in a third of the time that indexing takes
        if inputs.dtype != np.uint8:  # a fourth of the memory to move; the worker makes numbers of them
            inputs = inputs.astype(np.float32, copy=False)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(self._targets[indices]))


def load_array(path: Path, setting: str) -> np.ndarray:
    """An .npy file of numbers, mapped into memory rather than read: ranks of one machine share it."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{setting}: {path} is not an .npy file of numbers ({error}); write it with np.save") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{setting}: {path} holds {array.dtype}, not real numbers")
    return array.view(np.ndarray)
