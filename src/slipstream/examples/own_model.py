"""A model and a dataset as anyone would write them: nothing here knows about Slipstream."""

import torch
from torch import Tensor, nn


class Parity(nn.Module):
    """Is the number of ones even or odd?"""

    def __init__(self, width: int, bits: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(bits, width), nn.GELU(), nn.Dropout(0.05), nn.Linear(width, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class ParityData:
    """All numbers of some bits, and whether their ones are odd."""

    classes = 2

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def __len__(self) -> int:
        return 1 << self.bits

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        bits = [(index >> place) & 1 for place in range(self.bits)]
        return torch.tensor(bits, dtype=torch.float32), sum(bits) % 2
