"""AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) that never asks the GPU: its kernel learns there how far to clip
and whether to skip. The running means may be held in bf16."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from slipstream.train.optim.lean import Lean


class LeanAdamW(Lean, torch.optim.Optimizer):
    """The state is named as torch's own is, so that a run may go on with either."""

    def __init__(
        self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, state: torch.dtype
    ) -> None:
        self._dtype = state
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update."""
        assert closure is None, "the loop never passes one"
        counts = [
            self._update(weight, group)
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None and weight.numel()
        ]
        if counts:
            done = torch.ones_like(counts[0]) if self.skip is None else 1 - self.skip
            torch._foreach_add_(counts, [done] * len(counts))  # a single tensor would be read by the processor

    def _update(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None, "asked before"
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight, dtype=self._dtype)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=self._dtype)
        factor = weight.new_ones(()) if self.factor is None else self.factor
        skip = weight.new_zeros(()) if self.skip is None else self.skip
        tensors = (weight, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"], factor, skip)
        numbers = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
        if weight.is_cuda:
            from slipstream.train.kernels.adamw import update

            update(*tensors, *numbers)
        elif not skip:
            update_plainly(*tensors, *numbers)
        count: Tensor = state["step"]
        return count


def update_plainly(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, count: Tensor, factor: Tensor, _skip: Tensor,
    lr: float, betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """The kernel's update, written out."""
    steps, g = float(count) + 1, gradient * factor
    m = torch.lerp(mean.to(g.dtype), g, 1 - betas[0])
    v = square.to(g.dtype) * betas[1] + g * g * (1 - betas[1])
    unbiased = (v / (1 - betas[1] ** steps)).sqrt_() + eps
    weight.mul_(1 - lr * decay).sub_(lr * m / (1 - betas[0] ** steps) / unbiased)
    mean.copy_(m)
    square.copy_(round_at_random(v, int(steps)) if square.dtype == torch.bfloat16 else v)


def round_at_random(x: Tensor, seed: int) -> Tensor:
    """fp32 to bf16, up or down with the probability that keeps the mean. The random numbers are those of a hash of 32
    bits (Wellons 2018, "lowbias32") of each element's place."""
    at = torch.arange(x.numel(), dtype=torch.int64, device=x.device).view_as(x)
    mask = 0xFFFFFFFF
    h = at ^ (seed * 0x9E3779B9 & mask)
    h = (h ^ (h >> 16)) * 0x7FEB352D & mask
    h = (h ^ (h >> 15)) * 0x846CA68B & mask
    bits = (x.float().contiguous().view(torch.int32).to(torch.int64) & mask) + ((h ^ (h >> 16)) & 0xFFFF)
    return (bits & 0xFFFF0000).to(torch.int32).view(torch.float32).to(torch.bfloat16)
