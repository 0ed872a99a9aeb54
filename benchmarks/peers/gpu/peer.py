"""What the peers on a GPU share: the shape they are given, batches, and a clock that never waits for the device.

A peer is started as `PEER SHAPE TIMES [OPTION]`: it reads the shape from one JSON file and leaves its times in another.
It does not import Slipstream, so that its start is its own.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
torch.set_float32_matmul_precision("high")  # as Slipstream does; only what autocast leaves in fp32 notices


@dataclass(frozen=True)
class Shape:
    """What to train on, how, and for how long."""

    job: str
    """The job file that Slipstream trains."""
    source: str
    """The .npy file of inputs."""
    batch: int
    steps: int
    lr: float
    compile: bool

    @classmethod
    def read(cls) -> Any:
        """The file named first on the command line; keys that this kind of shape does not have are another's."""
        values = json.loads(Path(sys.argv[1]).read_text())
        shape = cls(**{field.name: values[field.name] for field in fields(cls)})
        torch.manual_seed(0)
        return shape

    def compiled(self, thing: Any) -> Any:
        """With torch's compiler and its defaults, unless only the script is being tried out."""
        return torch.compile(thing) if self.compile else thing


@dataclass(frozen=True)
class Decoder(Shape):
    """A decoder on tokens, with AdamW."""

    family: str
    """`llama` or `gpt2`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    sequence: int
    norm_eps: float
    rope_theta: float
    tied: bool
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float

    def adamw(self, weights: Any) -> torch.optim.Optimizer:
        """As the job says it, fused."""
        return torch.optim.AdamW(
            weights, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True
        )


@dataclass(frozen=True)
class Images(Shape):
    """A classifier of images, with momentum."""

    target: str
    """The .npy file of classes."""
    depth: int
    momentum: float


class Sequences(torch.utils.data.Dataset[Tensor]):
    """Sequences of a row of tokens, each with one token more than is put in: the last target."""

    def __init__(self, shape: Decoder) -> None:
        self._tokens, self._length = np.load(shape.source, mmap_mode="r"), shape.sequence

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._length
        return torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))


def token_batches(shape: Decoder) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets on the device, in the order of the file, over and over."""
    data = Sequences(shape)
    for step in range(shape.steps):
        first = step * shape.batch
        rows = torch.stack([data[place % len(data)] for place in range(first, first + shape.batch)])
        yield here(rows[:, :-1].contiguous()), here(rows[:, 1:].contiguous())


def here(samples: Tensor) -> Tensor:
    """On the device, without waiting for it."""
    return samples.pin_memory().to(DEVICE, non_blocking=True) if ON_GPU else samples


def autocast() -> torch.autocast:
    """Weights stay fp32, products are bf16: what Slipstream's bf16 and the trainers' bf16-mixed are."""
    return torch.autocast(DEVICE.type, dtype=torch.bfloat16)


class Clock:
    """The end of every step: an event in the device's queue; on a CPU the time. Only the first step is waited for."""

    def __init__(self) -> None:
        self._ends: list[Any] = []
        self._losses: list[Tensor] = []
        self._first = 0.0

    def lap(self, loss: Tensor) -> None:
        """A step has been put into the queue."""
        self._losses.append(loss.detach())
        if ON_GPU:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._ends.append(end)
        else:
            self._ends.append(time.perf_counter())
        if len(self._ends) == 1:
            if ON_GPU:
                torch.cuda.synchronize()
            self._first = time.time()

    def write(self) -> None:
        """Leave all that was seen in the file named second on the command line."""
        if ON_GPU:
            torch.cuda.synchronize()
        pairs = zip(self._ends, self._ends[1:], strict=False)
        times = {
            "seconds": [(a.elapsed_time(b) / 1e3 if ON_GPU else b - a) for a, b in pairs],
            "losses": [float(loss) for loss in self._losses],
            "first": self._first,
            "memory": torch.cuda.max_memory_allocated() if ON_GPU else None,
        }
        Path(sys.argv[2]).write_text(json.dumps(times))


def drive(shape: Decoder, step: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The loop of those that bring none: `step` does all from forward to update and gives the loss."""
    clock = Clock()
    for inputs, targets in token_batches(shape):
        clock.lap(step(inputs, targets))
    clock.write()
