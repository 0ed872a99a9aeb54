"""Hugging Face datasets, map-style: arrow files mapped into memory, whole batches by their numbers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, load_from_disk
from datasets.distributed import split_dataset_by_node
from reading import RANK, RANKS, SEED, Reading
from torch import Tensor
from torch.utils.data import DataLoader


def as_dataset(tokens: np.ndarray) -> Dataset:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), tokens.shape[1])
    return Dataset(pa.table({"tokens": rows}))


def write(tokens: np.ndarray, folder: Path, reading: Reading) -> None:
    as_dataset(tokens).save_to_disk(str(folder), num_shards=-(-len(tokens) // reading.shard))


def _tokens(rows: dict[str, np.ndarray]) -> Tensor:
    return torch.from_numpy(rows["tokens"])


class Loader:
    def __init__(self, reading: Reading, state: int | None) -> None:
        self._done, self._each = state or 0, reading.batch
        dataset = load_from_disk(reading.address).with_format("numpy").shuffle(seed=SEED).skip(self._done)
        dataset = split_dataset_by_node(dataset, RANK, RANKS)
        places = [list(range(len(dataset))[start : start + self._each]) for start in range(0, len(dataset), self._each)]
        self._loader = DataLoader(
            dataset, sampler=places, batch_size=None, num_workers=reading.workers, collate_fn=_tokens
        )

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._loader:
            self._done += self._each * RANKS
            yield batch.to(torch.int64)

    def state(self) -> int:
        return self._done
