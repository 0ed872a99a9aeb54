"""Documents packed into sequences: a decoder whose attention, or whose positions, begin anew with each of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.job.data import Reset
from slipstream.train.kernels.document_attention import Mask, attend_within, document_mask
from slipstream.train.models.decoder import Attention, Count, Decoder, attend_causally
from slipstream.train.models.dropout import SampleKeys


@dataclass(frozen=True, eq=False)
class Packed:
    """What the parts of a decoder must know of documents in the sequences at hand. Made once for all layers."""

    begins: Tensor
    """The place in the whole sequence at which each token's document begins [B, T]."""
    mask: Mask | None
    """Who sees whom, where attention is reset."""


def pack(begins: Tensor, model: Decoder, reset: tuple[Reset, ...], dtype: torch.dtype) -> Packed:
    """Of sequences that go through a model in this precision."""
    size = model.section.hidden // model.section.heads
    return Packed(begins, document_mask(begins, dtype, size) if "attention" in reset else None)


def reset_with_documents(model: Decoder, reset: tuple[Reset, ...], keys: SampleKeys) -> None:
    """Let what is to be reset follow the samples at hand."""
    if "positions" in reset:
        model.embed.places = _from_beginnings(model.embed.places, keys)
        if model.rotation is not None:
            model.rotation.places = _from_beginnings(model.rotation.places, keys)
            model.rotation.whose = lambda: keys.packed
    if "attention" in reset:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            packed = keys.packed
            return attend_causally(q, k, v) if packed is None else attend_within(q, k, v, packed.mask)

        for part in model.modules():
            if isinstance(part, Attention):
                part.attend = attend


def _from_beginnings(places: Count, keys: SampleKeys) -> Count:
    """Counted from where documents begin: [T] of places becomes [B, T]."""

    def count(length: int, device: torch.device) -> Tensor:
        inside = places(length, device)
        return inside if keys.packed is None else inside - keys.packed.begins[:, inside]

    return count
