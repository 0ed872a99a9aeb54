"""Compiling the blocks of a model: they are alike, so one is compiled and all use it. The result is kept on disk."""

import os
from collections.abc import Iterable

import torch
from torch import nn

from slipstream.runs.cache import cache_folder
from slipstream.train.models.decoder import Rotation

_SHAPES = 64
"""Most shapes of a batch that are compiled for: a ramp goes through several, and judging has its own."""


def compile_blocks(blocks: Iterable[nn.Module], rotation: Rotation | None, keep_little: bool) -> None:
    """Let every block run compiled. With `keep_little` the compiler computes again in backward what it can."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    import torch._dynamo.config as dynamo  # not above: it takes two seconds
    import torch._functorch.config as autograd

    dynamo.recompile_limit, autograd.aggressive_recomputation = _SHAPES, keep_little
    for block in blocks:
        if rotation is not None:
            block.register_forward_pre_hook(lambda _, inputs: rotation.prepare(inputs[0].shape[1], inputs[0]))
        block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)
