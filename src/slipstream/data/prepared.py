"""A dataset that `slipstream data prepare` has made: sequences of its tokens, or its samples."""

from functools import lru_cache
from pathlib import Path

import numpy as np

from slipstream.data.base import Batch, Dataset, Facts
from slipstream.data.beginnings import beginnings
from slipstream.data.folder import Folder
from slipstream.data.held import HeldShards, pages_folder, remote_manifest
from slipstream.data.holding import Ids, Samples
from slipstream.data.manifest import TOKENIZER, Manifest, read_manifest
from slipstream.data.mixing import Mixed, shares_of
from slipstream.data.opened import OpenedShards
from slipstream.data.page_cache import PageCache
from slipstream.data.paged import AnyShards, Source
from slipstream.data.pages import checked
from slipstream.data.samples import PreparedSamples
from slipstream.data.sealing import guard_of
from slipstream.data.shards import Shards
from slipstream.data.storage import PATIENCE, Storage, StorageLacks, is_remote
from slipstream.data.text import mask_of
from slipstream.job import Job
from slipstream.job.data import PreparedData

_CACHE = 20_000_000_000
_IMPATIENT = 8.0
"""Seconds for which a storage is asked for a manifest: who has just typed a command is waiting."""


class Prepared:
    """Sample i is tokens[i·S : i·S + S + shift] of the row of all tokens. With `documents` it says where they begin."""

    def __init__(self, shards: AnyShards, sequence: int, shift: int, documents: bool = False) -> None:
        manifest = shards.manifest
        self.facts = Facts(inputs=(sequence,), outputs=manifest.ids.vocabulary, tokens=True)
        self.together = max(1, manifest.page // manifest.dtype.itemsize // sequence)
        """Samples of a page: those that are fetched at once."""
        self._shards, self._sequence, self._shift = shards, sequence, shift
        self._documents = shards.documents() if documents else None
        self.near = shards.near and not documents
        """Whether a fetch is no more than a copy: what is expected has been read by then."""

    def __len__(self) -> int:
        return (self._shards.manifest.items - self._shift) // self._sequence

    def expect(self, indices: np.ndarray) -> None:
        """These samples will be fetched soon."""
        self._shards.expect(indices * self._sequence, self._sequence + self._shift)

    def fetch(self, indices: np.ndarray) -> Batch:
        import torch

        # As they are stored: a model takes four times as many bytes, which are written where it is.
        rows = self._shards.rows(indices * self._sequence, self._sequence + self._shift)
        inputs, targets = rows[:, : self._sequence], rows[:, self._shift :]
        if self._documents is None:
            return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
        begins = beginnings(self._documents, indices * self._sequence, self._sequence)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(begins))


def prepared_tokenizer(data: PreparedData) -> bytes | None:
    """What the tokens mean: its tokenizer.json, if it has one; of several datasets it is the same."""
    return _tokenizer(next(iter(data.weights)), _patience(data))


@lru_cache(maxsize=1)
def _tokenizer(where: str, patience: float) -> bytes | None:
    """Read once, when the dataset is opened: at the end of a long run its storage may be gone."""
    manifest = manifest_at(where, patience=patience)
    if TOKENIZER not in manifest.sha256:
        return None
    stored = bytes(_source(where, manifest, patience).read(TOKENIZER))
    return checked(stored, TOKENIZER, manifest, where, guard_of(manifest, where))


def prepared_ids(data: PreparedData) -> Ids:
    """Special ids of the tokeniser."""
    return manifest_at(next(iter(data.weights))).ids


def check_prepared(data: PreparedData) -> None:
    manifests = {where: manifest_at(where) for where in data.weights}
    try:
        for where, manifest in manifests.items():
            guard_of(manifest, where)
            if not is_remote(where):
                Folder(Path(where), manifest).check_sizes()
    except ValueError as error:
        raise ValueError(f"data.prepared: {error}") from None
    shares_of(list(data.weights.values()))
    if data.reset and all(manifest.documents == 1 for manifest in manifests.values()):
        raise ValueError(
            "data.reset has no effect: all tokens are one document; remove it, or prepare each document as one (a .npy "
            "file is one)"
        )
    (first, known), *others = manifests.items()
    for where, manifest in others:
        tokenisers = {found.sha256.get(TOKENIZER) for found in (known, manifest) if not found.seal}
        if manifest.holds != known.holds or len(tokenisers) > 1:  # an encrypted one cannot be compared: its ids must do
            raise ValueError(
                f"data.prepared: {first} and {where} cannot be mixed: their tokenisers or samples are not the same; "
                f"prepare one with --tokenizer and the tokenizer.json of the other"
            )


def open_prepared(data: PreparedData, job: Job) -> Dataset:
    _tokenizer(next(iter(data.weights)), _patience(data))
    parts = [_open(where, data, job) for where in data.weights]
    return parts[0] if len(parts) == 1 else Mixed(parts, list(data.weights.values()))


def _open(where: str, data: PreparedData, job: Job) -> Dataset:
    manifest = manifest_at(where, patience=_patience(data))
    if isinstance(manifest.holds, Samples):
        if data.sequence is not None:
            raise ValueError(
                f"data.prepared: {where} holds whole samples, not tokens; remove data.sequence, and set "
                "train.task to classification or regression"
            )
        return PreparedSamples(_shards(where, data, manifest), manifest.holds, job.task.kind, where)
    if data.sequence is None:
        raise ValueError(f"data.prepared: {where} holds tokens; say with data.sequence how many make a sample")
    shift = _shift(where, data.sequence, manifest, job)
    return Prepared(_shards(where, data, manifest), data.sequence, shift, documents=bool(data.reset))


def _shift(where: str, sequence: int, manifest: Manifest, job: Job) -> int:
    """How far targets are from their inputs; refuses what the tokens are not enough for."""
    shift = 0 if job.task.kind == "masked-token" else 1
    if manifest.items < sequence + shift:
        raise ValueError(
            f"data.prepared: {where} has {manifest.items:,} tokens, fewer than one sequence of "
            f"{sequence:,}; prepare more text, or set a smaller data.sequence"
        )
    if job.task.kind == "masked-token":
        if TOKENIZER not in manifest.sha256:
            raise ValueError(
                f"train.task masked-token needs a tokeniser that has a mask token, and data.prepared {where} was "
                "prepared without one; prepare text, or .npy files with --tokenizer"
            )
        mask_of(manifest.ids, f"the tokeniser of data.prepared {where}")
    if job.train.sample and TOKENIZER not in manifest.sha256:
        raise ValueError(f"train.sample needs a tokeniser, and data.prepared {where} was prepared without one")
    return shift


def manifest_at(where: str, setting: str = "data.prepared", patience: float = _IMPATIENT) -> Manifest:
    """Of the dataset in a folder or at an address, which `setting` has named. Raises ValueError if there is none, and
    StorageGone if nobody knows."""
    if not is_remote(where):
        return read_manifest(Path(where), setting)
    try:
        return remote_manifest(Storage(where, patience), setting)
    except StorageLacks as error:
        raise ValueError(f"{setting}: {error}") from None


def _source(where: str, manifest: Manifest, patience: float) -> Source:
    return Storage(where, patience) if is_remote(where) else Folder(Path(where), manifest)


def _patience(data: PreparedData) -> float:
    return PATIENCE if data.patience is None else data.patience


def _shards(where: str, data: PreparedData, manifest: Manifest) -> AnyShards:
    if is_remote(where):
        cache = PageCache(pages_folder(manifest), _CACHE if data.cache is None else data.cache, manifest.page)
        return HeldShards(Storage(where, _patience(data)), manifest, cache, guard_of(manifest, where))
    if manifest.seal is None:
        return Shards(Path(where), manifest)
    return OpenedShards(Path(where), manifest, guard_of(manifest, where))
