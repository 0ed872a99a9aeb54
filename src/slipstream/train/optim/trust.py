"""The trust ratio that LARS and LAMB share."""

from collections.abc import Callable

import torch
from torch import Tensor

Norm = Callable[[Tensor, Tensor], Tensor]
"""The norm of the second tensor, shaped like the first, a weight of which workers may hold pieces."""


def plain_norm(_weight: Tensor, tensor: Tensor) -> Tensor:
    """Where this worker holds all of it."""
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm


def trust_ratio(weight_norm: Tensor, update_norm: Tensor) -> Tensor:
    """‖w‖ / ‖update‖, and 1 where either is zero: a tensor that is still zero must be able to leave it."""
    usable = (weight_norm > 0) & (update_norm > 0)
    return torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm))
