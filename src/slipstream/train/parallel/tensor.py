"""The tensor axis: workers share out the layers themselves (Shoeybi et al. 2019, arXiv 1909.08053).

A `column` layer is split by its outputs and a `row` layer, which takes them, by its inputs; the sum over the workers
comes after the row. Where the model is ours the sequence between them is shared out too: then every parameter that is
not split sees only a part of the tokens, and its gradient is summed over the workers like everywhere else.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.train.parallel.collectives import add_up, copy_to_all, gather_sequence, scatter_sequence
from slipstream.train.parallel.groups import Group

Style = Literal["column", "row", "embedding", "head", "region"]
DECODER: dict[str, Style] = {
    "embed.tokens": "embedding",
    "blocks.*.attention": "region",
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.feed_forward": "region",
    "blocks.*.feed_forward.gate": "column",
    "blocks.*.feed_forward.up": "column",
    "blocks.*.feed_forward.down": "row",
    "head": "head",
}
"""Our decoder. A `region` is entered with the whole sequence; what its rows give leaves it in parts."""


@dataclass(frozen=True)
class Slice:
    """The piece of a parameter that this worker keeps."""

    dim: int
    start: int
    whole: int
    """Size of that dimension before."""


class TensorAxis:
    """One worker's place on the axis."""

    def __init__(self, group: Group, sequence: bool) -> None:
        self.group, self.sequence = group, sequence
        self.size, self.index = group.size(), group.rank()
        self.slices: dict[nn.Parameter, Slice] = {}

    def split(self, model: nn.Module, styles: Mapping[str, Style]) -> None:
        """Split the modules that the patterns name, in place."""
        kept: dict[nn.Parameter, nn.Parameter] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        for pattern, style in styles.items():
            names = [name for name in modules if re.fullmatch(pattern.replace(".", r"\.").replace("*", "[^.]+"), name)]
            if not names:
                raise ValueError(f"model.split.tensor: no module is named {pattern}")
            for name in names:
                self._split_module(model, name, modules[name], style, kept)

    def _split_module(
        self, model: nn.Module, name: str, module: nn.Module, style: Style, kept: dict[nn.Parameter, nn.Parameter]
    ) -> None:
        if style == "region":
            if self.sequence:
                module.register_forward_pre_hook(lambda _, args: (gather_sequence(args[0], self.group), *args[1:]))
            return
        if not isinstance(module, nn.Embedding | nn.Linear):
            raise ValueError(f"model.split.tensor: {name} is a {type(module).__name__}; only nn.Linear can be split")
        dim = 1 if style == "row" else 0
        if style in ("column", "row") and module.weight.shape[dim] % self.size:
            raise ValueError(
                f"model.split.tensor: {name} has {module.weight.shape[dim]} {'inputs' if dim else 'outputs'}, "
                f"which layout.tensor ({self.size}) does not divide"
            )
        weight = self._keep(module.weight, dim, kept)
        bias = module.bias if isinstance(module, nn.Linear) else None
        if bias is not None and style != "row":
            bias = self._keep(bias, 0, kept)
        model.set_submodule(name, _SPLIT[style](self, weight, bias))

    def _keep(self, parameter: Tensor, dim: int, kept: dict[nn.Parameter, nn.Parameter]) -> nn.Parameter:
        """This worker's piece of a parameter; one that two modules share stays shared."""
        assert isinstance(parameter, nn.Parameter), "every weight of a layer is one"
        if parameter not in kept:
            pieces = parameter.detach().chunk(self.size, dim)
            whole, each = parameter.shape[dim], pieces[0].shape[dim]
            start = min(self.index * each, whole)
            piece = parameter.detach().narrow(dim, start, min(each, whole - start))
            kept[parameter] = nn.Parameter(piece.clone(), requires_grad=parameter.requires_grad)
            self.slices[kept[parameter]] = Slice(dim, start, whole)
        return kept[parameter]


class _Split(nn.Module):
    """A layer of which this worker holds a piece."""

    def __init__(self, axis: TensorAxis, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.axis, self.weight, self.bias = axis, weight, bias
        self.first = axis.slices[weight].start
        """Number of the first row or column of the whole weight that is here."""
        self.multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear


class ColumnLinear(_Split):
    """Takes all inputs, gives this worker's outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x if self.axis.sequence else copy_to_all(x, self.axis.group), self.weight, self.bias)


class RowLinear(_Split):
    """Takes this worker's inputs, gives all outputs: the sum over the workers."""

    def forward(self, x: Tensor) -> Tensor:
        leave = scatter_sequence if self.axis.sequence else add_up
        y = leave(self.multiply(x, self.weight, None), self.axis.group)
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(_Split):
    """A worker knows some of the tokens; for the others it gives zeros, and the sum has them all."""

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.first
        known = (own >= 0) & (own < len(self.weight))
        looked_up = F.embedding(torch.where(known, own, 0), self.weight) * known.unsqueeze(-1)
        leave = scatter_sequence if self.axis.sequence else add_up
        return leave(looked_up, self.axis.group)


class VocabularyHead(_Split):
    """Gives the scores of this worker's tokens alone: the loss is made for that, and nobody gathers them."""

    def forward(self, x: Tensor) -> Tensor:
        enter = gather_sequence if self.axis.sequence else copy_to_all
        return F.linear(enter(x, self.axis.group), self.weight, self.bias)


_SPLIT: dict[Style, Callable[[TensorAxis, nn.Parameter, nn.Parameter | None], nn.Module]] = {
    "column": ColumnLinear,
    "row": RowLinear,
    "embedding": VocabularyEmbedding,
    "head": VocabularyHead,
}
