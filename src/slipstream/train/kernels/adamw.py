"""AdamW in one pass over a weight and its state: clipping folded in, the state in fp32 or bf16 (Triton, on a GPU)."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    weight, gradient, mean, square, count, factor, skip, size, lr, log_beta1, log_beta2, eps, decay,
    NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        steps = tl.load(count) + 1
        beta1, beta2 = tl.exp2(log_beta1), tl.exp2(log_beta2)
        w = tl.load(weight + at, mask=inside)
        g = tl.load(gradient + at, mask=inside) * tl.load(factor)
        m = tl.load(mean + at, mask=inside).to(tl.float32)
        v = tl.load(square + at, mask=inside).to(tl.float32)
        m += (g - m) * (1 - beta1)
        v = v * beta2 + g * g * (1 - beta2)
        unbiased = tl.sqrt(v / (1 - tl.exp2(log_beta2 * steps))) + eps
        w = w * (1 - lr * decay) - lr * m / (1 - tl.exp2(log_beta1 * steps)) / unbiased
        tl.store(weight + at, w, mask=inside)
        tl.store(mean + at, m, mask=inside)
        if NARROW:  # rounded up or down at random: a small decay of a large number would always be rounded away
            x = at.to(tl.uint32) ^ (steps.to(tl.uint32) * 0x9E3779B9)
            x = (x ^ (x >> 16)) * 0x7FEB352D
            x = (x ^ (x >> 15)) * 0x846CA68B
            bits = v.to(tl.uint32, bitcast=True) + ((x ^ (x >> 16)) & 0xFFFF)
            v = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        tl.store(square + at, v, mask=inside)


def update(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, count: Tensor, factor: Tensor, skip: Tensor,
    lr: float, betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """One weight's update, unless `skip`. The gradient counts `factor` times; `count` is of the steps before this."""
    assert _alike(weight, gradient, mean, square), "element by element in memory"
    size = weight.numel()
    _adamw[(triton.cdiv(size, _BLOCK),)](
        weight, gradient, mean, square, count, factor, skip, size, lr, math.log2(betas[0]) if betas[0] else -math.inf,
        math.log2(betas[1]), eps, decay, NARROW=square.dtype == torch.bfloat16, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def _alike(first: Tensor, *others: Tensor) -> bool:
    """Whether they lie in memory in the same order. It is asked for each weight in each step."""
    stride = first.stride()
    return all(each.stride() == stride or _order(each) == _order(first) for each in others)


def _order(tensor: Tensor) -> tuple[int, ...]:
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
