"""Some numbers, chosen at random and by all workers alike (Stich et al. 2018, arXiv 1809.07599): codes add up.

One is chosen of each row of `width`: as likely as by drawing from all, with far fewer draws, and never one twice.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.exchange.codecs.base import generator, in_blocks


@dataclass(frozen=True)
class RandomK:
    """Values alone; their places follow from the key."""

    width: int
    """One in so many is sent."""
    scaled: bool
    """Whether a number is multiplied by what makes the mean right."""

    def encode(self, x: Tensor, key: int) -> Tensor:
        """The chosen number of each row."""
        rows = in_blocks(x, self.width)
        return rows.gather(1, self._places(rows, key)).flatten()

    def decode(self, code: Tensor, like: Tensor, key: int) -> Tensor:
        """Zero wherever nothing was sent."""
        rows = torch.zeros_like(in_blocks(like, self.width))
        values = code * self.width if self.scaled else code
        return rows.scatter_(1, self._places(rows, key), values.view(-1, 1)).flatten()[: like.numel()]

    def _places(self, rows: Tensor, key: int) -> Tensor:
        return torch.randint(self.width, (len(rows), 1), generator=generator(key, rows.device), device=rows.device)
