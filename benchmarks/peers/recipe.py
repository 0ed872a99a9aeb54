"""What every peer trains: the model, data and recipe of a job file. The trainer is the peer's own."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.data.base import Facts
from slipstream.job import load_job
from slipstream.job.data import TokenData
from slipstream.job.train import AdamW
from slipstream.train.models import build_model

RANK, WORKERS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sequences of a row of tokens that is mapped into memory, each with its next tokens."""

    def __init__(self, path: str, sequence: int) -> None:
        self._tokens, self._sequence = np.load(path, mmap_mode="r"), sequence

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._sequence

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._sequence
        row = torch.from_numpy(self._tokens[start : start + self._sequence + 1].astype(np.int64))
        return row[:-1], row[1:]


@dataclass(frozen=True)
class Recipe:
    """A job as plain values."""

    model: nn.Module
    data: Tokens
    steps: int
    batch: int
    """Samples of this worker in a step."""
    optimizer: AdamW
    clip: float

    def adamw(self) -> torch.optim.Optimizer:
        o = self.optimizer
        return torch.optim.AdamW(
            self.model.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
        )


def read_recipe() -> Recipe:
    """The job named first on the command line."""
    job = load_job(Path(sys.argv[1]))
    assert isinstance(job.data, TokenData) and isinstance(job.train.optimizer, AdamW), "as cpu_train.py writes it"
    assert job.train.steps and job.train.clip and job.train.clip.norm, "as cpu_train.py writes it"
    torch.manual_seed(job.seed)
    model = build_model(job, Facts((job.data.sequence,), job.data.vocabulary, tokens=True))
    data = Tokens(job.data.source, job.data.sequence)
    return Recipe(model, data, job.train.steps, job.train.batch // WORKERS, job.train.optimizer, job.train.clip.norm)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Stopwatch:
    """The time and loss at the end of every step."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._losses: list[float] = []

    def lap(self, loss: Tensor) -> None:
        """A step has ended."""
        self._ends.append(time.perf_counter())
        self._losses.append(float(loss))

    def write(self) -> None:
        """Leave the seconds of each step after the first in the file named second on the command line."""
        if RANK == 0:
            seconds = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
            Path(sys.argv[2]).write_text(json.dumps({"seconds": seconds, "losses": self._losses}))
