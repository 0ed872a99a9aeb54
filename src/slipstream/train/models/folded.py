"""The feed-forward part of a decoder with its activation folded into its products, where that is quicker."""

from collections.abc import Iterable

from torch import Tensor, nn

from slipstream.plan import Plan
from slipstream.train.models.decoder import FeedForward


class FoldedFeedForward(FeedForward):
    """The same with GELU, which it has: a class, so that one block is compiled for all (kernels/short.py)."""

    def forward(self, x: Tensor) -> Tensor:
        from slipstream.train.kernels.gelu import feed_forward

        return feed_forward(x, self.up, self.down)


def fold_activations(blocks: Iterable[nn.Module], plan: Plan) -> None:
    """Fold the activation of blocks that are compiled for a GPU. What the products keep cannot be computed again then,
    so not where that is wanted."""
    if plan.device != "cuda" or plan.precision != "bf16" or plan.layout.recompute == "selective":
        return
    for block in blocks:
        for part in block.modules():
            if type(part) is FeedForward and part.gate is None:
                assert not part.dropout.p, "blocks with dropout are not compiled"
                part.__class__ = FoldedFeedForward
