"""By what the products of a decoder's layers are taken, and which of them in 8 bits."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from slipstream.plan import Plan
from slipstream.train.kernels import fp8, int8, products

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
SHORT: dict[str, Linear] = {
    "fp8": fp8.linear,
    "fp8-rows": partial(fp8.linear, by_row=True),
    "int8": int8.linear,
}


class ChosenLinear(nn.Linear):
    """What a linear layer becomes. A class and not a function for each layer: the compiler takes the layers of two
    blocks for the same, and compiles one block for all of them."""

    multiply: Linear

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.weight, self.bias)


def choose_products(blocks: Sequence[nn.Module], plan: Plan) -> None:
    """Let the linear layers of these blocks multiply in the plan's precision, if that is a short one. Norms, attention,
    the table and the head stay as they are: they are a small part of the time, and more depends on their digits.

    So does the first block. What it gets wrong all others build upon: of llama-1b's gradients after 300 steps on text
    2.6% (by their norm) were error with every block in fp8, and 0.6% without the first and the last; forward alone in
    fp8 made it 2.2% in the first block and 0.1% in the last."""
    wide: Linear | None = products.linear if best_products(plan) else None
    short = SHORT.get(plan.precision, wide)
    for number, block in enumerate(blocks):
        if linear := short if number else wide:
            _multiply_by(linear, block)


def best_products(plan: Plan) -> bool:
    """Whether products in 16 bits are taken by the best way known: where blocks are compiled for a GPU, and nothing of
    them is computed again, for which products would have to be told apart from what is cheap."""
    in_bf16 = plan.precision == "bf16" or plan.precision in SHORT
    return in_bf16 and plan.device == "cuda" and plan.compile and plan.layout.recompute != "selective"


def _multiply_by(linear: Linear, block: nn.Module) -> None:
    for layer in block.modules():
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            layer.__class__ = ChosenLinear
        if isinstance(layer, ChosenLinear) or hasattr(layer, "multiply"):  # or a piece of one
            layer.multiply = linear  # type: ignore[assignment]
