"""What a codec is: a pure pair of functions. What is random in it follows from a key alone."""

from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """How a flat tensor is made smaller on the wire."""

    def encode(self, x: Tensor, key: int) -> Tensor:
        """What travels; its size follows from that of x alone."""
        ...

    def decode(self, code: Tensor, like: Tensor, key: int) -> Tensor:
        """What the code stands for, with the size and type of `like`."""
        ...


def key_of(*words: int | str) -> int:
    """A key that these words determine, on every machine alike."""
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest()) >> 1


def generator(key: int, device: torch.device) -> torch.Generator:
    """A source of random numbers that the key determines."""
    return torch.Generator(device).manual_seed(key)


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return x.contiguous().view(torch.uint8)


def from_bytes(code: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that these bytes are; copied, because they may begin anywhere."""
    return code.clone().view(dtype)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """x as rows of this length, the last filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
