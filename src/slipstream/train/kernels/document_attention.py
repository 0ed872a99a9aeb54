"""Causal attention that stays within a document, where several are packed into a sequence.

Of each token is known at which place of its sequence its document begins (`begins` [B, T]): it sees that place, itself
and what lies between. On a GPU torch's flex attention (Dong et al. 2024, arXiv 2412.05496) leaves out what nobody sees,
block by block; a mask of every token by every other would be as large as all scores.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Any
"""Scores to add [B, 1, T, T], or what flex attention calls a BlockMask."""
_BLOCK = 128
"""Tokens of a block: what flex attention's kernels take at once."""
_SMALLEST_HEAD = 16
"""They multiply nothing smaller."""


def document_mask(begins: Tensor, dtype: torch.dtype, size: int) -> Mask:
    """Who sees whom, for heads of this size in this precision: made once for all layers."""
    blocks = begins.is_cuda and dtype != torch.float64 and size >= _SMALLEST_HEAD and begins.shape[1] >= _BLOCK
    return block_mask(begins) if blocks else dense_mask(begins, dtype)


def attend_within(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """What queries [B, heads, T, size] get from keys and values [B, kv_heads, T, size] that they see."""
    shared = k.shape[1] != q.shape[1]
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared)
    attended: Tensor = _flex()(q, k, v, block_mask=mask, enable_gqa=shared)
    return attended


def attend_within_plainly(q: Tensor, k: Tensor, v: Tensor, begins: Tensor) -> Tensor:
    """The same, written out."""
    k, v = (shared.repeat_interleave(q.shape[1] // shared.shape[1], dim=1) for shared in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~_seen(begins), -math.inf).softmax(-1) @ v


def dense_mask(begins: Tensor, dtype: torch.dtype) -> Tensor:
    """As scores to add: a mask of yes and no would be turned into this again in every layer, and each kept."""
    seen = _seen(begins)
    return torch.zeros(seen.shape, dtype=dtype, device=begins.device).masked_fill_(~seen, -math.inf)


def _seen(begins: Tensor) -> Tensor:
    """Whether each token [B, 1, T, 1] sees each token [T]."""
    places = torch.arange(begins.shape[1], device=begins.device)
    return ((places >= begins.unsqueeze(-1)) & (places <= places.unsqueeze(-1))).unsqueeze(1)


def block_mask(begins: Tensor) -> Mask:
    """For flex attention. Beginnings never fall along a sequence: so the first and the last query of a block say what
    it sees of the keys' blocks, and no score has to be looked at."""
    from torch.nn.attention.flex_attention import BlockMask

    length = begins.shape[1]
    first = torch.arange(0, length, _BLOCK, device=begins.device)
    last = (first + _BLOCK - 1).clamp(max=length - 1)
    earlier, same = first < first.unsqueeze(-1), first == first.unsqueeze(-1)
    some = (last >= begins[:, first].unsqueeze(-1)) & (earlier | same)
    full = last - first == _BLOCK - 1  # a last one that is shorter is always looked at, as torch does
    whole = (first >= begins[:, last].unsqueeze(-1)) & earlier & full.unsqueeze(-1)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (key >= begins[batch, query]) & (key <= query)

    return BlockMask.from_kv_blocks(
        *_numbered(some & ~whole), *_numbered(whole), _BLOCK, sees, seq_lengths=(length, length)
    )


def _numbered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of each block of queries how many blocks of keys are marked, and their numbers, these first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts.unsqueeze(1), numbers.unsqueeze(1)


def _flex() -> Callable[..., Any]:
    """Where the block around it is not compiled, compiled alone: as it is, it would hold all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    plain: Callable[..., Any] = flex_attention
    return plain if torch.compiler.is_compiling() else _compiled(plain)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
