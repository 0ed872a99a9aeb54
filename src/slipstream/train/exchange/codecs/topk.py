"""The largest numbers alone, and where they stand (Aji and Heafield 2017, arXiv 1704.05021).

They are chosen block by block: so a place is one byte, and every weight of a bucket has its turn. A value is a bf16
number; what that rounds off is exact, and error feedback keeps it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.exchange.codecs.base import as_bytes, from_bytes, in_blocks

BLOCK = 256


@dataclass(frozen=True)
class TopK:
    """Values first, then their places."""

    part: float

    def encode(self, x: Tensor, key: int) -> Tensor:  # noqa: ARG002
        """Three bytes for each number that is sent."""
        rows = in_blocks(x, min(BLOCK, x.numel()))
        places = rows.abs().topk(self._count(rows), 1, sorted=False).indices
        values = rows.gather(1, places).to(torch.bfloat16).flatten()
        return torch.cat((as_bytes(values), places.to(torch.uint8).flatten()))

    def decode(self, code: Tensor, like: Tensor, key: int) -> Tensor:  # noqa: ARG002
        """Zero wherever nothing was sent."""
        rows = torch.zeros_like(in_blocks(like, min(BLOCK, like.numel())))
        sent = len(rows) * self._count(rows)
        values = from_bytes(code[: 2 * sent], torch.bfloat16).to(like.dtype)
        places = code[2 * sent :].long()
        rows.scatter_(1, places.view(len(rows), -1), values.view(len(rows), -1))
        return rows.flatten()[: like.numel()]

    def _count(self, rows: Tensor) -> int:
        return max(1, round(self.part * rows.shape[1]))
