"""Dropout whose masks belong to samples, not to workers.

A mask is a pure function of (seed, layer, the sample's position in the run, element), so it is the same on any number
of workers, in any micro-batch, in any precision and when a forward is recomputed. The function is SplitMix64 (Steele,
Lea and Flood 2014, doi 10.1145/2660193.2660195), a counter put through a 64-bit mixer. Each 64-bit word serves four
elements with 16 bits, which makes it cheaper on a CPU than torch's own dropout.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from slipstream.train.models.packed import Packed

_LEVELS = 2**16  # a probability is rounded to one of these; the scale uses the rounded one, so the mean is exact


class SampleKeys:
    """The samples that pass through a model now. One object for all layers of the model that ask."""

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        """Each sample's position in the run, [samples]."""
        self.calls: Counter[int] = Counter()
        """How often each layer was called for them: a layer used twice must not drop the same elements twice."""
        self.packed: Packed | None = None
        """Where documents begin in them, if something is reset there."""
        self.places: Callable[[int, torch.device], Tensor] | None = None
        """Where the tokens at hand stand in their sequence, for inputs [samples, tokens, …] in parts."""
        self._watched = False

    @contextmanager
    def of(self, positions: Tensor, packed: "Packed | None" = None) -> Iterator[None]:
        """Around the forward of these samples, and around its backward when that recomputes activations."""
        random = None if self._watched else _random_state(positions)
        with self.again(positions, Counter(), packed):
            yield
        if random is not None and not torch.equal(random, _random_state(positions)):
            warnings.warn(
                "the model draws random numbers of its own, so its loss depends on the number of workers; use "
                "nn.Dropout instead of F.dropout, and no dropout inside attention (nn.MultiheadAttention, dropout_p)",
                stacklevel=3,
            )
        self._watched = True

    @contextmanager
    def again(self, positions: Tensor | None, calls: Counter[int], packed: "Packed | None" = None) -> Iterator[None]:
        """Around the recomputation of a forward, with what `positions`, `calls` and `packed` were then."""
        before = self.positions, self.calls, self.packed
        self.positions, self.calls, self.packed = positions, calls, packed
        try:
            yield
        finally:
            self.positions, self.calls, self.packed = before


class SampleDropout(nn.Module):
    """Takes the place of `nn.Dropout`. The first dimension of its input is samples, or rows grouped by sample."""

    def __init__(self, p: float, seed: int, layer: int, keys: SampleKeys, name: str) -> None:
        super().__init__()
        self.p, self.layer, self.keys, self.name = p, layer, keys, name
        self._threshold = round(p * _LEVELS)
        start, seeded, layered = torch.tensor((0, seed, layer), device="cpu")
        self._key = _fold(_fold(start, seeded), layered)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self._threshold == 0 or x.numel() == 0:
            return x
        if self._threshold == _LEVELS:
            return x * 0.0
        scale = _LEVELS / (_LEVELS - self._threshold)
        return torch.where(self._kept(x), x, 0.0) * scale

    def _kept(self, x: Tensor) -> Tensor:
        positions = self.keys.positions
        assert positions is not None, f"{self.name} runs in training outside SampleKeys.of(positions)"
        samples = positions.numel()
        if x.dim() == 0 or x.shape[0] % samples:
            raise ValueError(
                f"{self.name}: dropout needs the samples in the first dimension, but its input has shape "
                f"{tuple(x.shape)} for {samples} samples; make the model batch-first"
            )
        elements, start = x.numel() // samples, self._call() << 40  # each call has counters of its own
        words = start + self._words(x, elements)
        bits = _fold(_fold(self._key, positions.to(x.device))[:, None], words).view(torch.int16)
        return (bits[:, :elements] >= self._threshold - _LEVELS // 2).view(x.shape)

    def _words(self, x: Tensor, elements: int) -> Tensor:
        """The counters of a sample's elements, four to each, as they are where all its tokens are together."""
        places = self.keys.places
        if places is None or x.dim() < 3:
            return torch.arange(-(-elements // 4), device=x.device)
        each = x.shape[2:].numel()
        assert each % 4 == 0, f"{self.name}: a token of {each} numbers begins in the middle of a word"
        inside = torch.arange(each // 4, device=x.device)
        return (places(x.shape[1], x.device)[:, None] * (each // 4) + inside).flatten()

    def _call(self) -> int:
        """Which call of this layer in the present forward it is, counted from 0."""
        calls = self.keys.calls
        # A backward that runs Python recomputes; a compiled model recomputes without running this again.
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            calls[self.layer] += 1
            return calls[self.layer] - 1
        if calls[self.layer] > 1:
            raise ValueError(
                f"{self.name} is called {calls[self.layer]} times in a forward, so a recomputation cannot know "
                "which call it repeats; give each place its own nn.Dropout"
            )
        return 0

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}"


def own_dropout(model: nn.Module, seed: int) -> SampleKeys:
    """Replace every `nn.Dropout` of a model; layers are numbered in the order of `named_modules`."""
    keys = SampleKeys()
    found = [(name, part) for name, part in model.named_modules(remove_duplicate=False) if type(part) is nn.Dropout]
    for layer, (name, part) in enumerate(found):
        if part.p:
            model.set_submodule(name, SampleDropout(part.p, seed, layer, keys, name).train(part.training))
    return keys


def _random_state(like: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.get_rng_state()


def _signed(bits: int) -> int:
    """64 bits as torch's int64 sees them; its products wrap, which is what a mixer wants."""
    return bits - 2**64 if bits >= 2**63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)  # 2⁶⁴ over the golden ratio: successive multiples spread evenly
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _fold(key: Tensor, value: Tensor) -> Tensor:
    """A new key from a key and a value: the value-th output of SplitMix64 started at the key."""
    x = key + (value + 1) * _GOLDEN
    x ^= _shifted(x, 30)
    x *= _FIRST
    x ^= _shifted(x, 27)
    x *= _SECOND
    x ^= _shifted(x, 31)
    return x


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by, filled with zeros, where torch repeats the sign."""
    return (x >> by).bitwise_and_((1 << 64 - by) - 1)
