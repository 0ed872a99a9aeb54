"""Samples of a dataset that `slipstream data prepare` has made."""

from pathlib import Path

import numpy as np

from slipstream.data.base import Batch, Dataset, Facts
from slipstream.data.manifest import TOKENIZER, read_manifest
from slipstream.data.shards import Shards
from slipstream.data.text import mask_of
from slipstream.data.tokenizer import Ids
from slipstream.job import Job
from slipstream.job.data import PreparedData


class Prepared:
    """Sample i is tokens[i·S : i·S + S + shift] of the row of all tokens."""

    def __init__(self, shards: Shards, sequence: int, shift: int) -> None:
        manifest = shards.manifest
        self.facts = Facts(inputs=(sequence,), outputs=manifest.ids.vocabulary, tokens=True)
        self.together = max(1, manifest.page // np.dtype(manifest.dtype).itemsize // sequence)
        """Samples of a page: those that are fetched at once."""
        self._shards, self._sequence, self._shift = shards, sequence, shift

    def __len__(self) -> int:
        return (self._shards.manifest.tokens - self._shift) // self._sequence

    def fetch(self, indices: np.ndarray) -> Batch:
        import torch

        rows = self._shards.rows(indices * self._sequence, self._sequence + self._shift).astype(np.int64)
        inputs, targets = rows[:, : self._sequence], rows[:, self._shift :]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def prepared_tokenizer(data: PreparedData) -> Path:
    """What the tokens mean."""
    return Path(data.prepared) / TOKENIZER


def prepared_ids(data: PreparedData) -> Ids:
    """Special ids of the tokeniser."""
    return read_manifest(Path(data.prepared), "data.prepared").ids


def check_prepared(data: PreparedData) -> None:
    read_manifest(Path(data.prepared), "data.prepared")


def open_prepared(data: PreparedData, job: Job) -> Dataset:
    folder = Path(data.prepared)
    manifest = read_manifest(folder, "data.prepared")
    shift = 0 if job.task.kind == "masked-token" else 1
    if manifest.tokens < data.sequence + shift:
        raise ValueError(
            f"data.prepared: {folder} has {manifest.tokens:,} tokens, fewer than one sequence of {data.sequence:,}; "
            "prepare more text, or set a smaller data.sequence"
        )
    if job.task.kind == "masked-token":
        mask_of(manifest.ids, f"the tokeniser of data.prepared {folder}")
    return Prepared(Shards(folder, manifest), data.sequence, shift)
