"""Queries, keys and values turned on their way out of one matrix, or back into it (Triton, on a GPU)."""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _pass(  # type: ignore[no-untyped-def]
    packed, q, k, v, cos, sin, length, angles,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    QUERIES: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Some tokens of one group of heads. Both halves of a head are turned by the same angles."""
    group, groups, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    half = tl.arange(0, HALF)[None, :]
    inside = row < length
    angle = batch * angles + row * 2 * HALF + HALF + half
    c, s = tl.load(cos + angle, mask=inside), tl.load(sin + angle, mask=inside)
    if BACK:
        s = -s
    for head in tl.static_range(QUERIES + 2):
        here = packed + (((batch * length + row) * groups + group) * (QUERIES + 2) + head) * 2 * HALF + half
        if head < QUERIES:
            there = q + batch * q_batch + (group * QUERIES + head) * q_head + row * q_row + half
        elif head == QUERIES:
            there = k + batch * k_batch + group * k_head + row * k_row + half
        else:
            there = v + batch * v_batch + group * v_head + row * v_row + half
        if BACK:
            source, target = there, here
        else:
            source, target = here, there
        first = tl.load(source, mask=inside).to(tl.float32)
        second = tl.load(source + HALF, mask=inside).to(tl.float32)
        if head <= QUERIES:
            first, second = first * c - second * s, second * c + first * s
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)


def turn(packed: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """Fill q, k and v [B, heads, T, size] from packed [B, T, groups, queries + 2, size], or `back` the other way."""
    batch, length, groups, each, size = packed.shape
    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
    angles = cos.stride(0) if cos.dim() > 2 else 0
    strides = [part.stride(dim) for part in (q, k, v) for dim in range(3)]
    _pass[(triton.cdiv(length, _ROWS), groups, batch)](
        packed, q, k, v, cos, sin, length, angles, *strides,
        QUERIES=each - 2, HALF=size // 2, ROWS=_ROWS, BACK=back, num_warps=4,
    )  # fmt: skip
