"""Optimisers that never ask the GPU: what a step is to do with the gradients is learned there."""

from torch import Tensor


class Lean:
    """What the loop tells such an optimiser before a step. Both tensors are where the weights are."""

    factor: Tensor | None = None
    """What gradients are multiplied by, if not 1."""
    skip: Tensor | None = None
    """Not zero where the step is to leave everything as it is."""
