"""A matrix as a product of two thin ones (Vogels et al. 2019, arXiv 1905.13727): one step of a power iteration.

Both halves add up over workers: first the left one, which all then make orthogonal, then the right one.
"""

import torch
from torch import Tensor


def encode(matrix: Tensor, right: Tensor) -> Tensor:
    """The left half [rows, rank], seen from these directions [columns, rank]."""
    return matrix @ right


def decode(left: Tensor, right: Tensor) -> Tensor:
    """The matrix that the two halves stand for."""
    return left @ right.T


def orthogonal(left: Tensor) -> Tensor:
    """An orthogonal basis of the same directions."""
    basis: Tensor = torch.linalg.qr(left).Q
    return basis
