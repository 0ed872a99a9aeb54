"""Hugging Face datasets, iterable: arrow files one after the other, shuffled in a buffer."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from by_datasets_map import write
from datasets import IterableDataset, load_dataset, load_from_disk
from datasets.distributed import split_dataset_by_node
from reading import RANK, RANKS, SEED, Reading
from torch import Tensor
from torch.utils.data import DataLoader

__all__ = ["Loader", "write"]


def _tokens(rows: list[pa.Table]) -> Tensor:
    return torch.from_numpy(np.stack([row["tokens"].chunk(0).flatten().to_numpy() for row in rows]))


def _open(reading: Reading) -> IterableDataset:
    if not reading.remote:
        return load_from_disk(reading.address).to_iterable_dataset(num_shards=8)
    options = {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
    files = f"{reading.address}/data-*.arrow"
    return load_dataset("arrow", data_files=files, split="train", streaming=True, storage_options=options)


class Loader:
    def __init__(self, reading: Reading, state: dict[str, Any] | None) -> None:
        stream = _open(reading).with_format("arrow").shuffle(seed=SEED, buffer_size=1000)
        self._stream = split_dataset_by_node(stream, RANK, RANKS) if RANKS > 1 else stream
        if state is not None:
            self._stream.load_state_dict(state)
        self._loader = DataLoader(
            self._stream, batch_size=reading.batch, num_workers=reading.workers, collate_fn=_tokens
        )

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._loader:
            yield batch.to(torch.int64)

    def state(self) -> dict[str, Any]:
        return self._stream.state_dict()
