"""Parts of a decoder's blocks with less between their products than the compiler leaves there."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from slipstream.plan import Plan
from slipstream.train.kernels.layers import best_products
from slipstream.train.kernels.products import linear, linear_onto, linears
from slipstream.train.kernels.rotary import turned
from slipstream.train.kernels.swiglu import swiglu
from slipstream.train.models.decoder import Attention, Block, Decoder, FeedForward


class FoldedFeedForward(FeedForward):
    """The same with GELU, which it has: a class, so that one block is compiled for all (kernels/layers.py)."""

    def forward(self, x: Tensor) -> Tensor:
        from slipstream.train.kernels.gelu import feed_forward

        return feed_forward(x, self.up, self.down)


class JoinedFeedForward(FeedForward):
    """The same with a gate: one product with what it opens."""

    def inner(self, x: Tensor) -> Tensor:
        assert self.gate is not None, "it is for those that have one"
        return swiglu(linears(x, self.gate.weight, self.up.weight))


class TurnedAttention(Attention):
    """Attention whose rotary positions are one pass over what its projection gives."""

    def apart(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.rotation is not None and self.rotation.angles is not None, "made before a compiled block runs"
        return turned(groups, *self.rotation.angles)


class JoinedBlock(Block):
    """A block whose parts are added to the stream where their last products are written."""

    def forward(self, x: Tensor) -> Tensor:
        attended = linear_onto(x, self.attention.inner(self.attention_norm(x)), self.attention.out.weight)
        inner = self.feed_forward.inner(self.feed_forward_norm(attended))
        return linear_onto(attended, inner, self.feed_forward.down.weight)


def add_rows(model: Decoder, plan: Plan) -> None:
    """Let the gradient of the embedding, which has few rows that are not zero, be added to that of the head where both
    are one table and one worker has it. In what order rows are added up is left open then."""
    alone = plan.device == "cuda" and plan.layout.workers == 1
    if alone and model.section.tied and not torch.are_deterministic_algorithms_enabled():
        model.embed.tokens.sparse = True


def fold(blocks: Iterable[nn.Module], plan: Plan) -> None:
    """Put these in blocks that are compiled for a GPU. What they keep cannot be computed again, so not where that is
    wanted."""
    if not best_products(plan):
        return
    for block in blocks:
        if type(block) is Block:
            _fold(block)


def _fold(block: Block) -> None:
    attention, feed_forward = block.attention, block.feed_forward
    assert not feed_forward.dropout.p, "blocks with dropout are not compiled"
    if attention.rotation is not None:
        attention.__class__ = TurnedAttention
    if getattr(feed_forward.up, "multiply", None) is not linear:  # its products are in 8 bits
        return
    if feed_forward.gate is None:
        feed_forward.__class__ = FoldedFeedForward
    elif not any(name.endswith("bias") for name, _ in block.named_parameters()):
        feed_forward.__class__, block.__class__ = JoinedFeedForward, JoinedBlock
