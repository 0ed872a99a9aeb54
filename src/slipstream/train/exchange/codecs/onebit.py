"""One bit a number: its sign, with the mean size of each block (Seide et al. 2014, doi 10.21437/Interspeech.2014-274;
Bernstein et al. 2018, arXiv 1802.04434; with the mean as scale, Karimireddy et al. 2019, arXiv 1901.09847)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.exchange.codecs.base import as_bytes, from_bytes, in_blocks

_BITS = 8


@dataclass(frozen=True)
class OneBit:
    """Signs first, eight to a byte, then the scales."""

    block: int

    def encode(self, x: Tensor, key: int) -> Tensor:  # noqa: ARG002
        """One bit for each number and two bytes for each block."""
        scales = in_blocks(x.abs(), self.block).mean(1).to(torch.bfloat16)
        signs = in_blocks((x >= 0).to(torch.uint8), _BITS)
        packed = (signs << _places(x.device)).sum(1, dtype=torch.uint8)
        return torch.cat((packed, as_bytes(scales)))

    def decode(self, code: Tensor, like: Tensor, key: int) -> Tensor:  # noqa: ARG002
        """Each sign times its block's scale."""
        size = like.numel()
        packed = -(-size // _BITS)
        scales = from_bytes(code[packed:], torch.bfloat16).to(like.dtype)
        signs = (code[:packed, None] >> _places(code.device)).bitwise_and_(1).flatten()[:size]
        ones = signs.to(like.dtype).mul_(2).sub_(1)
        return in_blocks(ones, self.block).mul_(scales[:, None]).flatten()[:size]


def _places(device: torch.device) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)
