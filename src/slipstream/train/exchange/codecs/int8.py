"""Whole numbers of 8 bits, with a scale for each block (Alistarh et al. 2017, arXiv 1610.02132).

A scale is a bf16 number, rounded up: so a number, less what its code stands for, has few enough digits to be exact if
it is rounded to the nearest, and error feedback loses nothing at all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.exchange.codecs.base import as_bytes, from_bytes, generator, in_blocks

_MOST = 127


@dataclass(frozen=True)
class Int8:
    """Bytes first, then the scales."""

    block: int
    at_random: bool
    """Whether rounding is random, with the right mean, or to the nearest."""

    def encode(self, x: Tensor, key: int) -> Tensor:
        """One byte for each number and two for each block."""
        rows = in_blocks(x, self.block)
        scales = _round_up(rows.abs().amax(1) / _MOST)
        steps = rows / torch.where(scales == 0, 1, scales).to(x.dtype)[:, None]
        if self.at_random:
            draws = torch.rand(rows.shape, generator=generator(key, x.device), dtype=x.dtype, device=x.device)
            steps = steps.add_(draws).floor_()
        whole = steps.round_().clamp_(-_MOST, _MOST).to(torch.int8).flatten()[: x.numel()]
        return torch.cat((as_bytes(whole), as_bytes(scales)))

    def decode(self, code: Tensor, like: Tensor, key: int) -> Tensor:  # noqa: ARG002
        """Each number times its block's scale."""
        size = like.numel()
        scales = from_bytes(code[size:], torch.bfloat16).to(like.dtype)
        whole = in_blocks(code[:size].view(torch.int8).to(like.dtype), self.block)
        return whole.mul_(scales[:, None]).flatten()[:size]


def _round_up(x: Tensor) -> Tensor:
    """In bf16, and not smaller."""
    short = x.to(torch.bfloat16)
    return torch.where(short.to(x.dtype) < x, (short.view(torch.int16) + 1).view(torch.bfloat16), short)
