"""In what precision a tensor's products are taken here and now."""

import torch
from torch import Tensor


def working_dtype(x: Tensor) -> torch.dtype:
    """What autocast asks for, or the tensor's own; without a device nobody asks."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `x.to(dtype)`, for what an autograd function returns. Where nothing is to be done, that gives x a second name,
    and a compiled function then hands its gradient to the wrong one: zeros come out (torch 2.11, pytorch#180642)."""
    return x if x.dtype == dtype else x.to(dtype)
