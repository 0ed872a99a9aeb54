"""Memory that a worker and a server on one machine both see: there tensors need not travel through the network.

A file in memory, of which the worker tells the server the name, where both have one address.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.train.server.flat import Flat

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Shared:
    """What passes between one worker and one server."""

    gradients: Flat
    weights: Flat
    file: Path

    @classmethod
    def create(cls, like: Sequence[Tensor]) -> "Shared | None":
        """By the worker; None, if this system has no such memory."""
        return cls._of(_MEMORY / f"slipstream-{secrets.token_hex(16)}", like) if _MEMORY.is_dir() else None

    @classmethod
    def find(cls, name: str, like: Sequence[Tensor]) -> "Shared | None":
        """By the server; None, if it is not here."""
        file = _MEMORY / name
        known = re.fullmatch(r"slipstream-[0-9a-f]{32}", name) and file.is_file()
        return cls._of(file, like) if known else None

    @classmethod
    def _of(cls, file: Path, like: Sequence[Tensor]) -> "Shared":
        size = Flat.size(like)
        both = torch.from_file(str(file), shared=True, size=2 * size, dtype=torch.uint8)
        return cls(Flat(like, both[:size]), Flat(like, both[size:]), file)
