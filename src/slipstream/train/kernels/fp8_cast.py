"""A matrix in fp8, by rows and by columns, in one pass (Triton, on a GPU)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128
_DTYPE = torch.float8_e4m3fn


@triton.jit  # type: ignore[untyped-decorator]
def _cast(x, scale, straight, turned, rows, columns, MOST: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
    tile = tl.minimum(tl.maximum(tile, -MOST), MOST).to(straight.dtype.element_ty)
    tl.store(straight + row[:, None] * columns + column[None, :], tile, mask=inside)
    tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


def cast_both_ways(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [a, b] over its scale, in e4m3, and the same as [b, a]."""
    rows, columns = x.shape
    straight = torch.empty((rows, columns), dtype=_DTYPE, device=x.device)
    turned = torch.empty((columns, rows), dtype=_DTYPE, device=x.device)
    _cast[(triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))](
        x, scale, straight, turned, rows, columns, MOST=torch.finfo(_DTYPE).max, TILE=_TILE, num_warps=8
    )
    return straight, turned
