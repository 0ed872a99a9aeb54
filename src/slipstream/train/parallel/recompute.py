"""Recomputation: keep less of the forward, and compute it again in backward (Chen et al. 2016, arXiv 1604.06174)."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slipstream.train.models.dropout import SampleKeys

KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
"""What `selective` keeps: what is dear to compute for its size."""


def recompute_blocks(blocks: Iterable[nn.Module], mode: Literal["selective", "full"], keys: SampleKeys) -> None:
    """Wrap the forward of each block."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        again = keys.again(keys.positions, keys.calls, keys.packed)
        if mode == "full":
            return nullcontext(), again
        keeping, recalling = create_selective_checkpoint_contexts(KEPT)  # type: ignore[no-untyped-call]
        return keeping, _both(again, recalling)

    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
