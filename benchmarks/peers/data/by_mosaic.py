"""mosaicml-streaming: MDS with arrays of a fixed shape."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reading import SEED, Reading
from torch import Tensor

# It imports torchvision, whose build for GPUs cannot be imported beside a torch for CPUs unless this is known.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


def write(tokens: np.ndarray, folder: Path, reading: Reading) -> None:
    columns = {"tokens": f"ndarray:uint16:{reading.sequence}"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=reading.shard * reading.sequence * 2) as writer:
        for row in tokens:
            writer.write({"tokens": np.asarray(row)})


def _collate(samples: list[dict[str, np.ndarray]]) -> Tensor:
    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]))


class Loader:
    def __init__(self, reading: Reading, state: dict[str, Any] | None) -> None:
        os.environ["S3_ENDPOINT_URL"] = os.environ.get("AWS_ENDPOINT_URL", "")
        if "RANK" not in os.environ:
            clean_stale_shared_memory()  # what a process that was ended has left
        self._dataset = StreamingDataset(
            remote=reading.address if reading.remote else None,
            local=reading.cache if reading.remote else reading.address,
            shuffle=True,
            shuffle_seed=SEED,
            batch_size=reading.batch,
            predownload=8 * 1024,
        )
        self._loader = StreamingDataLoader(
            self._dataset, batch_size=reading.batch, num_workers=reading.workers, collate_fn=_collate
        )
        if state is not None:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._loader:
            yield batch.to(torch.int64)

    def state(self) -> dict[str, Any] | None:
        return self._loader.state_dict()
