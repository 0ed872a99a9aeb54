"""What one item of a prepared dataset is: a token, or a whole sample. A dataset is a row of items of one type."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.data.tokenizer import Ids

__all__ = ["Holds", "Ids", "Numbers", "Samples", "as_json", "holds_from"]


@dataclass(frozen=True)
class Numbers:
    """Part of a sample."""

    dtype: str
    """As numpy writes it: |u1, <f4, …."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{' × '.join(map(str, self.shape))} {self.dtype}".strip()


@dataclass(frozen=True)
class Samples:
    """What must be known of samples to learn from them."""

    inputs: Numbers
    target: Numbers
    """One <i8 where it is a class, else <f4."""
    outputs: int
    """Classes, or numbers to predict."""
    classes: tuple[str, ...] | None = None
    """Their names, where they have some."""
    white: int = 1
    """A model gets inputs divided by this."""
    decoder: str | None = None
    """What has decoded images."""

    @property
    def has_classes(self) -> bool:
        """Whether a target is a class."""
        return self.target.dtype == "<i8"

    @property
    def dtype(self) -> np.dtype:
        """One sample."""
        parts = (("inputs", self.inputs), ("target", self.target))
        return np.dtype([(name, part.dtype, part.shape) for name, part in parts])


Holds = Ids | Samples


def as_json(dtype: np.dtype) -> Any:
    """A type as JSON can say it: a word, or the list that np.dtype takes (as np.lib.format has it)."""
    return dtype.str if dtype.names is None else [[name, *_part(dtype[name])] for name in dtype.names]


def holds_from(values: dict[str, Any]) -> Holds:
    """What was written as this JSON. Raises TypeError or KeyError."""
    if "vocabulary" in values:
        return Ids(**values)
    parts = {name: Numbers(values[name]["dtype"], tuple(values[name]["shape"])) for name in ("inputs", "target")}
    classes = values["classes"] and tuple(values["classes"])
    return Samples(**{**values, **parts, "classes": classes})


def _part(dtype: np.dtype) -> tuple[str, list[int]]:
    return dtype.base.str, list(dtype.shape)
