"""SGD with momentum that never asks the GPU, by what torch's fused kernel has for loss scales."""

import inspect
from collections.abc import Callable

import torch

from slipstream.train.optim.lean import Lean


class LeanSGD(Lean, torch.optim.SGD):
    """The kernel divides gradients by `grad_scale`, and where `found_inf` is not zero leaves everything as it is."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update."""
        assert closure is None, "the loop never passes one"
        self.grad_scale = None if self.factor is None else self.factor.reciprocal()
        self.found_inf = self.skip
        for group in self.param_groups:
            for weight in group["params"] if group["momentum"] else ():
                # torch would leave it unwritten until a step is not skipped.
                if "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        with torch.no_grad():
            inspect.unwrap(torch.optim.SGD.step)(self)
