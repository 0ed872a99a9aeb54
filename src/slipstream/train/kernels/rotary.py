"""Queries, keys and values from what one product makes of all three, the first two turned to their positions (Su et al.
2021, arXiv 2104.09864): one pass over memory, and one back. Of these the compiler makes kernels that take three times
as long in backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.train.kernels.steps import as_one_step

_WORTH = 2**24
"""Numbers from which a pass takes a GPU longer (about 16 µs) than Python takes to launch it."""
_SMALLEST = 32
"""Of sizes of heads, which are powers of two."""


def turn_plainly(packed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From [B, T, groups, queries + 2, size] to three of [B, heads, T, size]. Of angles [T, size], or [B, 1, T, size],
    the sines of the first half are negative."""
    queries = packed.shape[3] - 2
    q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in torch.split(packed, [queries, 1, 1], dim=3))
    half = packed.shape[-1] // 2
    q, k = ((x * cos + x.roll(half, -1) * sin).type_as(packed) for x in (q, k))
    return q, k, v


def turn_back_plainly(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What comes back through it: turned the other way, and packed."""
    half = q.shape[-1] // 2
    q, k = ((x * cos - x.roll(half, -1) * sin).type_as(v) for x in (q, k))
    batch, groups, length, size = k.shape
    return torch.cat([x.transpose(1, 2).reshape(batch, length, groups, -1, size) for x in (q, k, v)], dim=3)


@as_one_step("turn", lambda packed, _cos, _sin: _apart(packed))
def _turn(packed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    apart = _apart(packed)
    if packed.is_cuda:
        from slipstream.train.kernels import rotary_pass

        rotary_pass.turn(packed.contiguous(), *apart, cos, sin, back=False)
    else:
        for room, part in zip(apart, turn_plainly(packed, cos, sin), strict=True):
            room.copy_(part)
    return apart


@as_one_step("turn_back", lambda q, k, _v, _cos, _sin: _together(q, k))
def _turn_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not q.is_cuda:
        return turn_back_plainly(q, k, v, cos, sin)
    from slipstream.train.kernels import rotary_pass

    packed = _together(q, k)
    rotary_pass.turn(packed, q, k, v, cos, sin, back=True)
    return packed


def _apart(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for queries, keys and values, token after token in memory."""
    batch, length, groups, each, size = packed.shape
    q, k, v = (packed.new_empty(batch, length, groups * many, size).transpose(1, 2) for many in (each - 2, 1, 1))
    return q, k, v


def _together(q: Tensor, k: Tensor) -> Tensor:
    batch, heads, length, size = q.shape
    return q.new_empty(batch, length, k.shape[1], heads // k.shape[1] + 2, size)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, packed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k, v = _turn(packed, cos, sin)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _turn_back(*grads, *ctx.saved_tensors), None, None  # type: ignore[attr-defined]


_turned: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _Turned.apply


def turned(packed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From [B, T, groups, queries + 2, size] to three of [B, heads, T, size]."""
    if packed.numel() < _WORTH or not admits(packed.shape[-1]):
        return turn_plainly(packed, cos, sin)
    return _turned(packed, cos, sin)


def admits(size: int) -> bool:
    """Whether heads of this size can be turned in one pass."""
    return size >= _SMALLEST and not size & (size - 1)
