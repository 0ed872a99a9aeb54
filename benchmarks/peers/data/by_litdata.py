"""litdata, with its loader for tokens."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from litdata.streaming import downloader
from reading import SEED, Reading
from torch import Tensor

downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # else its fetching ahead refuses a server without TLS


def write(tokens: np.ndarray, folder: Path, reading: Reading) -> None:
    starts = list(range(0, len(tokens), 64))
    optimize(
        partial(_some, np.asarray(tokens)),
        inputs=starts,
        output_dir=str(folder),
        chunk_size=reading.shard * reading.sequence,
        num_workers=1,
        item_loader=TokensLoader(),
        keep_data_ordered=True,
        verbose=False,
    )


def _some(tokens: np.ndarray, start: int) -> Tensor:
    return torch.from_numpy(tokens[start : start + 64].reshape(-1).copy())


class Loader:
    def __init__(self, reading: Reading, state: dict[str, Any] | None) -> None:
        options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]} if reading.remote else {}
        dataset = StreamingDataset(
            reading.address,
            cache_dir=reading.cache if reading.remote else None,
            item_loader=TokensLoader(block_size=reading.sequence),
            shuffle=True,
            seed=SEED,
            drop_last=False,  # its default depends on the number of ranks, and a state keeps it
            storage_options=options,
        )
        self._loader = StreamingDataLoader(dataset, batch_size=reading.batch, num_workers=reading.workers)
        if state is not None:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._loader:
            yield batch.to(torch.int64)

    def state(self) -> dict[str, Any]:
        return self._loader.state_dict()
