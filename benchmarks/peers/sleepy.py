"""A small model that takes a set time for every sample; one of those who train it, the first to come, takes longer."""

import time
from pathlib import Path

from torch import Tensor, nn


class Sleepy(nn.Module):
    """Sleeps instead of computing much: machines of any speed on one."""

    def __init__(self, seconds: float, mark: str, slower: float = 4.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self._each, self._mark, self._slower = seconds, Path(mark), slower
        self._pace: float | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of the ten digits."""
        if self.training:
            time.sleep(self._seconds() * len(inputs))
        scores: Tensor = self.layers(inputs)
        return scores

    def _seconds(self) -> float:
        if self._pace is None:
            try:
                self._mark.touch(exist_ok=False)
                self._pace = self._each * self._slower
            except FileExistsError:
                self._pace = self._each
        return self._pace
