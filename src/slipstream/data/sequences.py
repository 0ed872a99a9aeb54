"""Samples that are sequences of tokens, cut from one long row of them."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from slipstream.data.base import IGNORED, Batch, Facts
from slipstream.job import Job


class Packed:
    """Sample i is tokens[i·S : i·S + S + shift]; inputs are its first S tokens, targets its last S."""

    def __init__(self, tokens: np.ndarray, sequence: int, vocabulary: int, shift: int) -> None:
        self.facts = Facts(inputs=(sequence,), outputs=vocabulary, tokens=True)
        self._sequence, self._shift = sequence, shift
        # A view: rows of it are copied whole, much faster than gathering token by token.
        self._samples = sliding_window_view(tokens, sequence + shift)[::sequence]

    def __len__(self) -> int:
        return len(self._samples)

    def fetch(self, indices: np.ndarray) -> Batch:
        import torch

        rows = self._samples[indices]
        inputs, targets = rows[:, : self._sequence], rows[:, self._shift :]
        return Batch(torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64)))


class Documents:
    """Sample i is one document, cut to S + 1 tokens or padded to it; the padding is never a target."""

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, sequence: int, vocabulary: int, pad: int) -> None:
        self.facts = Facts(inputs=(sequence,), outputs=vocabulary, tokens=True)
        self._tokens, self._pad = tokens, pad
        lengths = np.diff(offsets)
        useful = lengths >= 2  # a lone token has nothing after it to predict
        self._starts, self._lengths = offsets[:-1][useful], lengths[useful]

    def __len__(self) -> int:
        return len(self._starts)

    def fetch(self, indices: np.ndarray) -> Batch:
        import torch

        columns = np.arange(self.facts.inputs[0] + 1)
        real = columns < self._lengths[indices, None]
        rows = self._tokens[np.where(real, self._starts[indices, None] + columns, 0)].astype(np.int64)
        inputs = np.where(real, rows, self._pad)[:, :-1]
        targets = np.where(real, rows, IGNORED)[:, 1:]
        return Batch(torch.from_numpy(inputs.copy()), torch.from_numpy(targets.copy()))


def pack(tokens: np.ndarray, job: Job, sequence: int, vocabulary: int, source: str) -> Packed:
    """Full sequences for the job's task: its targets are the next tokens, or (masked-token) the tokens themselves."""
    shift = 0 if job.task.kind == "masked-token" else 1
    if len(tokens) < sequence + shift:
        and_next = " and the token after it" if shift else ""
        raise ValueError(
            f"data.source {source} has {len(tokens):,} tokens, fewer than one sequence of {sequence:,}{and_next}; "
            "give it more text, or set a smaller data.sequence"
        )
    return Packed(tokens, sequence, vocabulary, shift)
