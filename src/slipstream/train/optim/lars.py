"""LARS: momentum with a trust ratio for each tensor (You, Gitman and Ginsburg 2017, arXiv 1708.03888)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.train.optim.trust import Norm, plain_norm, trust_ratio


class LARS(torch.optim.Optimizer):
    """Large-batch SGD: each tensor moves by a fixed part of its own norm."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        momentum: float,
        weight_decay: float,
        trust: float,
        norm: Norm = plain_norm,
    ) -> None:
        self._norm = norm
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update."""
        assert closure is None, "the loop never passes one"
        for group in self.param_groups:
            for weight in group["params"]:
                self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        gradient = weight.grad
        if gradient is None:
            return
        if group["adapt"]:
            # λ = η ‖w‖ / (‖∇‖ + β ‖w‖), the paper's equation 6
            norm = self._norm(weight, weight)
            ratio = group["trust"] * trust_ratio(norm, self._norm(weight, gradient) + group["weight_decay"] * norm)
            gradient = (gradient + group["weight_decay"] * weight) * ratio
        velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
        velocity.mul_(group["momentum"]).add_(gradient, alpha=group["lr"])
        weight.sub_(velocity)
