"""The largest numbers alone, and where they stand (Aji and Heafield 2017, arXiv 1704.05021)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.exchange.codecs.base import as_bytes, from_bytes


@dataclass(frozen=True)
class TopK:
    """Values first, then their places."""

    part: float

    def encode(self, x: Tensor, key: int) -> Tensor:  # noqa: ARG002
        """Values as they are, and four bytes for each place."""
        places = x.abs().topk(max(1, int(self.part * x.numel())), sorted=False).indices
        return torch.cat((as_bytes(x[places]), as_bytes(places.to(torch.int32))))

    def decode(self, code: Tensor, like: Tensor, key: int) -> Tensor:  # noqa: ARG002
        """Zero wherever nothing was sent."""
        width = like.element_size()
        values = len(code) // (width + 4) * width
        places = from_bytes(code[values:], torch.int32).long()
        return torch.zeros_like(like).index_put_((places,), from_bytes(code[:values], like.dtype))
