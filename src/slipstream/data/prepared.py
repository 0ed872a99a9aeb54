"""A dataset that `slipstream data prepare` has made: sequences of its tokens, or its samples."""

from pathlib import Path

import numpy as np

from slipstream.data.base import Batch, Dataset, Facts
from slipstream.data.folder import Folder
from slipstream.data.held import HeldShards, Source, pages_folder, remote_manifest
from slipstream.data.holding import Ids, Samples
from slipstream.data.manifest import TOKENIZER, Manifest, read_manifest
from slipstream.data.page_cache import PageCache
from slipstream.data.pages import checked
from slipstream.data.samples import PreparedSamples
from slipstream.data.sealing import guard_of
from slipstream.data.shards import Shards
from slipstream.data.storage import PATIENCE, Storage, StorageGone, is_remote
from slipstream.data.text import mask_of
from slipstream.job import Job
from slipstream.job.data import PreparedData

_CACHE = 20_000_000_000
_IMPATIENT = 8.0
"""Seconds for which a storage is asked for a manifest: who has just typed a command is waiting."""


class Prepared:
    """Sample i is tokens[i·S : i·S + S + shift] of the row of all tokens."""

    def __init__(self, shards: Shards | HeldShards, sequence: int, shift: int) -> None:
        manifest = shards.manifest
        self.facts = Facts(inputs=(sequence,), outputs=manifest.ids.vocabulary, tokens=True)
        self.together = max(1, manifest.page // manifest.dtype.itemsize // sequence)
        """Samples of a page: those that are fetched at once."""
        self._shards, self._sequence, self._shift = shards, sequence, shift

    def __len__(self) -> int:
        return (self._shards.manifest.items - self._shift) // self._sequence

    def expect(self, indices: np.ndarray) -> None:
        """These samples will be fetched soon."""
        self._shards.expect(indices * self._sequence, self._sequence + self._shift)

    def fetch(self, indices: np.ndarray) -> Batch:
        import torch

        rows = self._shards.rows(indices * self._sequence, self._sequence + self._shift).astype(np.int64)
        inputs, targets = rows[:, : self._sequence], rows[:, self._shift :]
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def prepared_tokenizer(data: PreparedData) -> bytes | None:
    """What the tokens mean: its tokenizer.json, if it has one."""
    manifest = _manifest(data)
    if TOKENIZER not in manifest.sha256:
        return None
    stored = bytes(_source(data, manifest).read(TOKENIZER))
    return checked(stored, TOKENIZER, manifest, data.prepared, guard_of(manifest, data.prepared))


def prepared_ids(data: PreparedData) -> Ids:
    """Special ids of the tokeniser."""
    return _manifest(data).ids


def check_prepared(data: PreparedData) -> None:
    manifest = _manifest(data)
    try:
        guard_of(manifest, data.prepared)
    except ValueError as error:
        raise ValueError(f"data.prepared: {error}") from None


def open_prepared(data: PreparedData, job: Job) -> Dataset:
    manifest = _manifest(data)
    if isinstance(manifest.holds, Samples):
        if data.sequence is not None:
            raise ValueError(
                f"data.prepared: {data.prepared} holds whole samples, not tokens; remove data.sequence, and set "
                "train.task to classification or regression"
            )
        return PreparedSamples(_shards(data, manifest), manifest.holds, job.task.kind, data.prepared)
    if data.sequence is None:
        raise ValueError(f"data.prepared: {data.prepared} holds tokens; say with data.sequence how many make a sample")
    return Prepared(_shards(data, manifest), data.sequence, _shift(data, data.sequence, manifest, job))


def _shift(data: PreparedData, sequence: int, manifest: Manifest, job: Job) -> int:
    """How far targets are from their inputs; refuses what the tokens are not enough for."""
    shift = 0 if job.task.kind == "masked-token" else 1
    if manifest.items < sequence + shift:
        raise ValueError(
            f"data.prepared: {data.prepared} has {manifest.items:,} tokens, fewer than one sequence of "
            f"{sequence:,}; prepare more text, or set a smaller data.sequence"
        )
    if job.task.kind == "masked-token":
        mask_of(manifest.ids, f"the tokeniser of data.prepared {data.prepared}")
    if job.train.sample and TOKENIZER not in manifest.sha256:
        raise ValueError(f"train.sample needs a tokeniser, and data.prepared {data.prepared} was prepared without one")
    return shift


def _manifest(data: PreparedData) -> Manifest:
    if not is_remote(data.prepared):
        return read_manifest(Path(data.prepared), "data.prepared")
    try:
        return remote_manifest(Storage(data.prepared, _IMPATIENT), "data.prepared")
    except StorageGone as error:
        raise ValueError(f"data.prepared: {error}") from None


def _source(data: PreparedData, manifest: Manifest) -> Source:
    if not is_remote(data.prepared):
        return Folder(Path(data.prepared), manifest)
    return Storage(data.prepared, PATIENCE if data.patience is None else data.patience)


def _shards(data: PreparedData, manifest: Manifest) -> Shards | HeldShards:
    remote = is_remote(data.prepared)
    if not remote and manifest.seal is None:
        return Shards(Path(data.prepared), manifest)
    limit = (_CACHE if data.cache is None else data.cache) if remote else 0
    cache = PageCache(pages_folder(manifest), limit)
    return HeldShards(_source(data, manifest), manifest, cache, guard_of(manifest, data.prepared))
