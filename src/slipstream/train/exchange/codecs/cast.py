"""Numbers of 16 bits. Their sum is taken as such."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cast:
    """Another type of number."""

    dtype: torch.dtype

    def encode(self, x: Tensor, key: int) -> Tensor:  # noqa: ARG002
        """Rounded to the nearest."""
        return x.to(self.dtype)

    def decode(self, code: Tensor, like: Tensor, key: int) -> Tensor:  # noqa: ARG002
        """Exactly what the code says."""
        return code.to(like.dtype)
