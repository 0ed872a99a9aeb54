"""A user's model and dataset that go wrong on purpose: at a chosen forward, on a chosen rank, in a chosen way."""

import ctypes
import os
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn


def my_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Faulty(nn.Module):
    """A linear model with a fault, in two layers if it has a width."""

    def __init__(self, fault: str = "none", rank: int = 1, at: int = 5, outputs: int = 1, width: int = 0) -> None:
        super().__init__()
        widths = [4, width, outputs] if width else [4, outputs]
        self.layer = nn.Sequential(*(nn.Linear(*each) for each in pairwise(widths)))
        self.fault, self.rank, self.at, self.calls = fault, rank, at, 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        self.calls += self.training
        if self.calls == self.at and my_rank() == self.rank:
            return self._go_wrong(outputs)
        return outputs

    def _go_wrong(self, outputs: Tensor) -> Tensor:
        if self.fault == "raise":
            raise KeyError("the model lost its way")
        if self.fault == "backward":
            outputs.register_hook(_raise)
        elif self.fault == "unordered":
            return outputs.clone().put_(torch.tensor([0]), torch.zeros(1))  # which of equal indices wins?
        elif self.fault == "memory":
            torch.empty(2**45)
        elif self.fault == "hang":
            time.sleep(600)
        elif self.fault == "hang-in-c":
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock, as a bad extension does
        elif self.fault == "kill":
            os.kill(os.getpid(), 9)
        elif self.fault == "exit":
            os._exit(7)
        elif self.fault == "nan":
            return outputs * float("nan")
        elif self.fault == "huge":
            return outputs * 1e30
        return outputs


def _raise(_gradient: Tensor) -> None:
    raise ArithmeticError("backward lost its way")


class Numbers:
    """x → sum of x; one sample may raise."""

    outputs = 1

    def __init__(self, count: int = 64, bad: int = -1) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise OSError(f"sample {index} cannot be read")
        inputs = torch.tensor([(index * k % 7) / 7 for k in range(1, 5)])
        return inputs, inputs.sum().reshape(1)


class SlowDecoder(nn.Module):
    """A small language model with dropout whose steps take at least some time, so that a test can hit them."""

    def __init__(self, seconds: float, vocabulary: int = 300, width: int = 32) -> None:
        super().__init__()
        self.seconds = seconds
        self.embedding = nn.Embedding(vocabulary, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)
        states, _ = self.memory(self.dropout(self.embedding(inputs)))
        outputs: Tensor = self.head(states)
        return outputs


class SlowRegression(nn.Module):
    """Sixteen numbers to one, slowly."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)
        outputs: Tensor = self.layer(inputs)
        return outputs


class Loud(nn.Module):
    """Outputs so large that the gradients of its loss do not fit fp16 when the loss is scaled up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs * 100.0)
        return outputs


class TowerLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return x + added


class Tower(nn.Module):
    """A model of a user's own, made of blocks in a row."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(TowerLayer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.leave(x)
        return y


class BentTower(Tower):
    """Its forward does something between the modules that a split names."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = 0.5 * layer(x)
        y: Tensor = self.leave(x)
        return y


class Moody(nn.Module):
    """Its outputs depend on which worker asks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + 0.1 * my_rank()
        return y
