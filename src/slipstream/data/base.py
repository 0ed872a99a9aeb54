"""What the stages after this one know about data: facts, batches, and a dataset to fetch them from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""A target of this value carries no weight: padding, or a token that is not to be predicted."""


@dataclass(frozen=True)
class Facts:
    """What a model must know about the data it will see."""

    inputs: tuple[int, ...]
    """Shape of one sample's inputs: (sequence,) of tokens, (channels, height, width), or (columns,)."""
    outputs: int
    """Token ids, classes, or numbers to predict."""
    tokens: bool
    """Whether inputs are token ids."""
    white: int = 1
    """Inputs that are bytes are divided by this where the model is: images are bytes up to 255, numbers up to 1."""

    @property
    def tokens_per_sample(self) -> int:
        """Tokens in one sample; a sample that is no sequence counts as one."""
        return self.inputs[0] if self.tokens else 1


@dataclass(frozen=True)
class Batch:
    """Some samples, fetched together. The first dimension of all tensors is the sample."""

    inputs: "torch.Tensor"
    """Token ids (int64, or on the way to the model as they are stored) or numbers (float32, or bytes)."""
    targets: "torch.Tensor"
    """Token ids or classes (int64, IGNORED where nothing is to be predicted), or numbers (float32)."""
    begins: "torch.Tensor | None" = None
    """The place in the sequence at which each token's document begins (int64), where the job resets something there."""


class Dataset(Protocol):
    """Samples by number, in no order of their own."""

    facts: Facts

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> Batch:
        """The samples with these numbers, in this order. Pure: the same numbers give the same batch."""
        ...
