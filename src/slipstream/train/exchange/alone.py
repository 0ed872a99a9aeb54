"""The exchange of a single worker: its own gradients are the sum already."""

import torch
from torch import nn


class Alone:
    """Nothing to exchange."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]

    def begin(self) -> None:
        """Nothing travels."""

    def finish(self) -> None:
        """A parameter the loss did not touch has the gradient zero, as with several workers."""
        for weight in self._weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
