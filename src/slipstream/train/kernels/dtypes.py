"""In what precision a tensor's products are taken here and now."""

import torch
from torch import Tensor


def working_dtype(x: Tensor) -> torch.dtype:
    """What autocast asks for, or the tensor's own; without a device nobody asks."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype
