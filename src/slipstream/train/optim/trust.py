"""The trust ratio that LARS and LAMB share."""

import torch
from torch import Tensor


def trust_ratio(weight_norm: Tensor, update_norm: Tensor) -> Tensor:
    """‖w‖ / ‖update‖, and 1 where either is zero: a tensor that is still zero must be able to leave it."""
    usable = (weight_norm > 0) & (update_norm > 0)
    return torch.where(usable, weight_norm / update_norm, torch.ones_like(weight_norm))
