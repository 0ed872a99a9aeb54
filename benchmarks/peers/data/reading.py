"""What every side of `benchmarks/data.py` is told and must offer."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SEED = 7


@dataclass(frozen=True)
class Reading:
    """What is read, and how."""

    address: str
    """A folder, or one in object storage."""
    cache: str
    """A folder for what is fetched: empty at first."""
    sequence: int
    batch: int
    """Samples of this process in a batch."""
    samples: int
    """Samples of the whole dataset."""
    workers: int
    """Processes of the loader beside this one."""

    @property
    def remote(self) -> bool:
        return self.address.startswith("s3://")

    @property
    def shard(self) -> int:
        """Samples in a file, for those who ask: about 64 MB, and eight files at least."""
        return max(1, min(64_000_000 // 2 // self.sequence, self.samples // 8))


class Loader(Protocol):
    """Batches of one epoch, shuffled. Each side's file has one."""

    def __init__(self, reading: Reading, state: Any) -> None:
        """`state` is what `state()` gave in another process, or None."""

    def __iter__(self) -> Iterator[Tensor]:
        """int64, batch × sequence."""

    def state(self) -> Any:
        """Where it is now: by the library's own means."""


class Side(Protocol):
    """A side's file."""

    Loader: type[Loader]

    def write(self, tokens: np.ndarray, folder: Path, reading: Reading) -> None:
        """Make the dataset, in the form that suits the library: samples × sequence, uint16."""


def as_int64(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))


def numbers(batch: Tensor) -> list[int]:
    """Which samples these are: their first two tokens say so."""
    return (batch[:, 0] * 2**16 + batch[:, 1]).tolist()
