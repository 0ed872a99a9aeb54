"""A decoder-only transformer: GPT-2 (Radford et al. 2019) and Llama (Touvron et al. 2023, arXiv 2302.13971)."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.job.models import DecoderModel
from slipstream.train.kernels.dtypes import working_dtype
from slipstream.train.kernels.linear_cross_entropy import linear_cross_entropy
from slipstream.train.models.initial import normal_rows

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries [B, heads, T, size], keys and values [B, kv_heads, T, size] to what is attended to, like the queries."""
Count = Callable[[int, torch.device], Tensor]
"""The places of so many tokens: [T], or [B, T] where they differ from sample to sample."""
_ROOT = math.sqrt(2 / math.pi)
_STD = 0.02  # of the initial weights, in GPT-2 and Llama alike


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token to itself and those before it; groups of query heads share a key and value head."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


def count_tokens(length: int, device: torch.device) -> Tensor:
    """The places of tokens in their sequence, where a worker holds all of them."""
    return torch.arange(length, device=device)


class Linear(nn.Linear):
    """Without torch's first values: the decoder has its own."""

    def reset_parameters(self) -> None:
        """Nothing yet."""


class Embedding(nn.Embedding):
    """The same for tables."""

    def reset_parameters(self) -> None:
        """Nothing yet."""


class Attention(nn.Module):
    """Causal self-attention; groups of query heads may share a key and value head (arXiv 2305.13245)."""

    def __init__(self, section: DecoderModel, rotation: "Rotation | None") -> None:
        super().__init__()
        kv_heads = section.kv_heads or section.heads
        self.size = section.hidden // section.heads
        self.queries = section.heads // kv_heads
        """Query heads of each group."""
        self.rotation = rotation
        self.attend: Attend = attend_causally
        # One projection for all three: 10 to 20 % faster than three on a CPU at hidden 256. Its rows are ordered by
        # groups, each its queries, its key and its value, so that any number of whole groups can stand alone.
        self.qkv = Linear(section.hidden, kv_heads * (self.queries + 2) * self.size, section.bias)
        self.out = Linear(section.hidden, section.hidden, section.bias)
        self.dropout = nn.Dropout(section.dropout)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.out(self.inner(x)))
        return added

    def inner(self, x: Tensor) -> Tensor:
        """What the heads have found, before the last product."""
        batch, length, _ = x.shape
        groups = self.qkv(x).view(batch, length, -1, self.queries + 2, self.size)
        return self.attend(*self.apart(groups)).transpose(1, 2).flatten(2)

    def apart(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the first two turned to their positions."""
        q, k, v = torch.split(groups, [self.queries, 1, 1], dim=3)
        q, k, v = (heads.flatten(2, 3).transpose(1, 2) for heads in (q, k, v))
        return (q, k, v) if self.rotation is None else (self.rotation(q), self.rotation(k), v)


class FeedForward(nn.Module):
    """Two layers with GELU between them, or SwiGLU, whose gate makes it three (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, section: DecoderModel) -> None:
        super().__init__()
        gated = section.activation == "swiglu"
        self.gate = Linear(section.hidden, section.inner, section.bias) if gated else None
        self.up = Linear(section.hidden, section.inner, section.bias)
        self.down = Linear(section.inner, section.hidden, section.bias)
        self.dropout = nn.Dropout(section.dropout)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.dropout(self.down(self.inner(x)))
        return added

    def inner(self, x: Tensor) -> Tensor:
        """What is between the products, before the last one."""
        return _gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)


def _gelu(x: Tensor) -> Tensor:
    """GELU by tanh, as GPT-2 was trained with. (1 + tanh u) / 2 is sigmoid(2u), for which less code is made."""
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(2 * _ROOT * (x + 0.044715 * x * x * x))
    return F.gelu(x, approximate="tanh")


class Block(nn.Module):
    """What the residual stream passes through in one layer; norms come first (arXiv 2002.04745)."""

    def __init__(self, section: DecoderModel, rotation: "Rotation | None") -> None:
        super().__init__()
        self.attention_norm = _norm(section)
        self.attention = Attention(section, rotation)
        self.feed_forward_norm = _norm(section)
        self.feed_forward = FeedForward(section)

    def forward(self, x: Tensor) -> Tensor:
        attended = x + self.attention(self.attention_norm(x))
        result: Tensor = attended + self.feed_forward(self.feed_forward_norm(attended))
        return result


class Embed(nn.Module):
    """Token ids [B, T] to the start of the residual stream [B, T, hidden]."""

    def __init__(self, section: DecoderModel, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens = Embedding(vocabulary, section.hidden)
        self.positions = Embedding(context, section.hidden) if section.positions == "learned" else None
        self.dropout = nn.Dropout(section.dropout)
        self.places: Count = count_tokens

    def forward(self, inputs: Tensor) -> Tensor:
        x: Tensor = self.tokens(inputs)
        if self.positions is not None:
            x = x + self.positions(self.places(x.shape[1], x.device))
        dropped: Tensor = self.dropout(_in_stream(x))
        return dropped


def _in_stream(x: Tensor) -> Tensor:
    """In the precision of the residual stream: bf16 has fp32's range, fp16 has not and stays inside the layers."""
    return x.bfloat16() if working_dtype(x) == torch.bfloat16 else x


class Decoder(nn.Module):
    """Token ids [B, T] to the logits of each next token [B, T, vocabulary], or to the loss of targets summed up."""

    def __init__(self, section: DecoderModel, vocabulary: int, context: int) -> None:
        super().__init__()
        self.section, self.vocabulary, self.context = section, vocabulary, context
        self.rotation = Rotation(section) if section.positions == "rotary" else None
        self.embed = Embed(section, vocabulary, context)
        self.blocks = nn.ModuleList(Block(section, self.rotation) for _ in range(section.layers))
        self.norm = _norm(section)
        self.head = Linear(section.hidden, vocabulary, bias=False)
        if section.tied:
            self.head.weight = self.embed.tokens.weight
        self._seed = torch.initial_seed()
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                with torch.no_grad():
                    parameter.copy_(self.initial(name, parameter.shape, range(parameter.shape[0]), parameter.device))

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        assert inputs.shape[1] <= self.context, f"{inputs.shape[1]} tokens in a context of {self.context}"
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        x = self.finish(x)
        if targets is not None:
            return linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten())
        logits: Tensor = self.head(x)
        return logits

    def finish(self, x: Tensor) -> Tensor:
        """The last norm, in the precision of the stream."""
        return _in_stream(self.norm(x))

    def initial(self, name: str, shape: torch.Size, rows: range, device: torch.device) -> Tensor:
        """Some rows of a parameter's first value, by the name and shape that it has in the whole model.

        As GPT-2 (§2.3): a layer adds to the residual stream twice, and the scale keeps its variance over depth.
        """
        if len(shape) == 1:
            return torch.full((len(rows),), 0.0 if name.endswith("bias") else 1.0, device=device)
        adds = name.endswith(("out.weight", "down.weight"))
        std = _STD / math.sqrt(2 * self.section.layers) if adds else _STD
        return normal_rows(self._seed, name, shape, std, rows, device)


class Rotation(nn.Module):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): one for all layers of a model.

    Each pair of dimensions (i, i + size/2) turns at its own speed. Angles are computed for the tokens at hand, in fp64
    for a model in fp64 and in fp32 for all others: bf16 cannot tell position 257 from 256.
    """

    def __init__(self, section: DecoderModel) -> None:
        super().__init__()
        self.theta, self.size = section.rope_theta, section.hidden // section.heads
        self.places: Count = count_tokens
        self.whose: Callable[[], object] = lambda: None
        """The samples that the places are of, where they differ from sample to sample."""
        self._wanted: object = None
        self.angles: tuple[Tensor, Tensor] | None = None
        """Cosines and sines of the tokens at hand."""

    def forward(self, x: Tensor) -> Tensor:
        """Turn each pair (a, b) of x [..., T, size] to (a·cos - b·sin, b·cos + a·sin); rolling swaps a and b."""
        if not torch.compiler.is_compiling():  # a compiled block has them made before it runs
            self.prepare(x.shape[-2], x)
        assert self.angles is not None, "prepared"
        cos, sin = self.angles
        return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).type_as(x)

    def prepare(self, length: int, like: Tensor) -> None:
        """Have the angles of so many tokens at hand: they are the same for every layer and, as a rule, every step."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        wanted = (length, dtype, like.device, self.places, self.whose())
        if self._wanted != wanted:
            speeds = 1.0 / self.theta ** (torch.arange(0, self.size, 2, device=like.device, dtype=dtype) / self.size)
            places = self.places(length, like.device).to(dtype)
            angles = torch.outer(places, speeds) if places.dim() == 1 else places[:, None, :, None] * speeds
            cos, sin = angles.cos(), angles.sin()
            self._wanted, self.angles = wanted, (torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def _norm(section: DecoderModel) -> nn.Module:
    if section.norm == "rms":
        return nn.RMSNorm(section.hidden, section.norm_eps)
    return nn.LayerNorm(section.hidden, section.norm_eps, bias=section.bias)


def build_decoder(job: Job, facts: Facts) -> nn.Module:
    section = job.model
    assert isinstance(section, DecoderModel)
    return Decoder(section, *sizes(section, facts))


def sizes(section: DecoderModel, facts: Facts) -> tuple[int, int]:
    """Vocabulary and context: as written, or what the data needs."""
    if not facts.tokens:
        raise ValueError(
            f"model.kind decoder takes tokens, and the data has samples of {facts.inputs}; use mlp or resnet"
        )
    vocabulary, context = section.vocabulary or facts.outputs, section.context or facts.inputs[0]
    if vocabulary < facts.outputs:
        raise ValueError(
            f"model.vocabulary is {vocabulary}, but the data has {facts.outputs} token ids; "
            f"set it to {facts.outputs} or more, or leave it out"
        )
    if context < facts.inputs[0]:
        raise ValueError(f"model.context is {context}, but the data has sequences of {facts.inputs[0]} tokens")
    return vocabulary, context


def parameter_count(section: DecoderModel, vocabulary: int, context: int) -> int:
    """How many parameters a decoder has, without building one."""
    hidden, inner, bias = section.hidden, section.inner, int(section.bias)
    projected = hidden + 2 * hidden * (section.kv_heads or section.heads) // section.heads
    attention = (hidden + bias) * projected + (hidden + bias) * hidden
    inward = 2 if section.activation == "swiglu" else 1
    feed_forward = inward * (hidden + bias) * inner + (inner + bias) * hidden
    norm = hidden * (1 + (bias if section.norm == "layer" else 0))
    tables = vocabulary * (1 if section.tied else 2) + (context if section.positions == "learned" else 0)
    return section.layers * (attention + feed_forward + 2 * norm) + norm + tables * hidden
