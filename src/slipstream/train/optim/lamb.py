"""LAMB: Adam with a trust ratio for each tensor (You et al. 2019, arXiv 1904.00962, algorithm 2)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.train.optim.trust import Norm, plain_norm, trust_ratio


class LAMB(torch.optim.Optimizer):
    """Large-batch Adam: each tensor moves by the learning rate times its own norm."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        norm: Norm = plain_norm,
    ) -> None:
        self._norm = norm
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

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
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["mean"] = torch.zeros_like(weight)
            state["square"] = torch.zeros_like(weight)
        state["step"] += 1
        (beta1, beta2), count = group["betas"], float(state["step"])
        mean = state["mean"].lerp_(gradient, 1 - beta1) / (1 - beta1**count)
        square = state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2) / (1 - beta2**count)
        update = mean / (square.sqrt() + group["eps"])
        if group["adapt"]:
            update = update + group["weight_decay"] * weight
            update = update * trust_ratio(self._norm(weight, weight), self._norm(weight, update))
        weight.sub_(update, alpha=group["lr"])
