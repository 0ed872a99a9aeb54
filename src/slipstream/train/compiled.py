"""Compiling the blocks of a model: they are alike, so one is compiled and all use it. The result is kept on disk."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.train.models.decoder import Decoder, Rotation
from slipstream.train.models.resnet import Resnet

Forward = Callable[..., Any]
_SHORT = 1e-4
"""Seconds after which a thread gives the interpreter to another one."""
_SHAPES = 128
"""Most shapes of a batch that are compiled for, of all kinds of blocks together: a ramp goes through several, and
judging has its own."""
_TUNED = {"max_autotune_pointwise": True, "conv_1x1_as_mm": True}
"""For convolutions and what is between them: kernels that move memory are tried in several sizes, and a 1×1 convolution
is a product. An H200 takes 36.7 instead of 37.3 ms for 256 images by the first alone, and 37.1 by the second
(ResNet-50, compiled whole); for a decoder's blocks the first is no help."""


_waking: list[Thread] = []


def wake_compiler() -> None:
    """Load torch's compiler, which takes seconds, while the model is being built."""

    def load() -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SHORT)  # who makes weights asks for the interpreter often, and would wait each time
        try:
            import_module("torch._inductor.compile_fx")
        finally:
            sys.setswitchinterval(before)

    _waking.append(Thread(target=load, daemon=True))
    _waking[-1].start()


def await_compiler() -> None:
    """Return when it is loaded: two threads that load parts of it at once can find each other's half done."""
    while _waking:
        _waking.pop().join()


def compile_model(model: nn.Module, blocks: Sequence[nn.Module], keep_little: bool, at_once: bool) -> None:
    """Let every block run compiled. With `keep_little` the compiler computes again in backward what it can. `at_once`
    says that nobody waits for the gradients of single blocks."""
    if isinstance(model, Resnet):  # its many blocks are short, and to call each takes the processor longer than the GPU
        blocks = [model] if at_once else [model.stem, *model.blocks]
        if at_once:
            _lay_channels_last(model)
    if isinstance(model, Decoder):
        model.finish = _compiled(model.finish, keep_little)  # type: ignore[method-assign]
    for block in blocks:
        block.forward = _compiled(block.forward, keep_little, tuned=isinstance(model, Resnet) and at_once)
        if isinstance(model, Decoder) and model.rotation:
            block.forward = _turned(block.forward, model.rotation)


def _lay_channels_last(model: Resnet) -> None:
    """So do cuDNN's fastest kernels read weights and write their gradients: else each is copied in every step."""
    for weight in model.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def _turned(function: Forward, rotation: Rotation) -> Forward:
    """The forward of a block, with the angles made before it: no hook, for recomputation calls none."""

    def call(x: Tensor) -> Any:
        rotation.prepare(x.shape[1], x)
        return function(x)

    return call


def _compiled(function: Forward, keep_little: bool, tuned: bool = False) -> Forward:
    """The function compiled when it is first called: by then the compiler is loaded, and nobody has waited for it."""
    made: list[Forward] = []

    @wraps(function)
    def call(*values: Any) -> Any:
        if not made:
            import torch._dynamo.config as dynamo
            import torch._functorch.config as autograd

            dynamo.recompile_limit, autograd.aggressive_recomputation = _SHAPES, keep_little
            options: Any = _TUNED if tuned and _may_tune(values[0]) else None
            made.append(torch.compile(function, dynamic=False, fullgraph=True, options=options))
        return made[0](*values)

    return call


def _may_tune(x: Tensor) -> bool:
    """Not where sums must come in the same order each time: a clock would choose it."""
    return x.is_cuda and not torch.are_deterministic_algorithms_enabled()
