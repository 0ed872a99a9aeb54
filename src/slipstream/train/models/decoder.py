"""A decoder-only transformer: GPT-2 (Radford et al. 2019) and Llama (Touvron et al. 2023, arXiv 2302.13971)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.job.models import DecoderModel

Rotation = tuple[Tensor, Tensor]
"""cos and sin for every position, [T, head size]."""
_STD = 0.02  # of the initial weights, in GPT-2 and Llama alike


class Attention(nn.Module):
    """Causal self-attention; groups of query heads may share a key and value head (arXiv 2305.13245)."""

    def __init__(self, section: DecoderModel) -> None:
        super().__init__()
        self.heads = section.heads
        self.kv_heads = section.kv_heads or section.heads
        self.size = section.hidden // section.heads
        # One projection for all three: 10 to 20 % faster than three on a CPU at hidden 256.
        self.qkv = nn.Linear(section.hidden, (self.heads + 2 * self.kv_heads) * self.size, section.bias)
        self.out = nn.Linear(section.hidden, section.hidden, section.bias)
        self.dropout = nn.Dropout(section.dropout)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        added: Tensor = self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, hidden)))
        return added


class FeedForward(nn.Module):
    """Two layers with GELU between them, or SwiGLU, whose gate makes it three (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, section: DecoderModel) -> None:
        super().__init__()
        gated = section.activation == "swiglu"
        self.gate = nn.Linear(section.hidden, section.inner, section.bias) if gated else None
        self.up = nn.Linear(section.hidden, section.inner, section.bias)
        self.down = nn.Linear(section.inner, section.hidden, section.bias)
        self.dropout = nn.Dropout(section.dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            inner = F.gelu(self.up(x), approximate="tanh")  # what GPT-2 was trained with
        else:
            inner = F.silu(self.gate(x)) * self.up(x)
        added: Tensor = self.dropout(self.down(inner))
        return added


class Block(nn.Module):
    """What the residual stream passes through in one layer; norms come first (arXiv 2002.04745)."""

    def __init__(self, section: DecoderModel) -> None:
        super().__init__()
        self.attention_norm = _norm(section)
        self.attention = Attention(section)
        self.feed_forward_norm = _norm(section)
        self.feed_forward = FeedForward(section)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        attended = x + self.attention(self.attention_norm(x), rotation)
        result: Tensor = attended + self.feed_forward(self.feed_forward_norm(attended))
        return result


class Decoder(nn.Module):
    """Token ids [B, T] to the logits of each next token [B, T, vocabulary]."""

    def __init__(self, section: DecoderModel, vocabulary: int, context: int) -> None:
        super().__init__()
        self.section, self.vocabulary, self.context = section, vocabulary, context
        self.tokens = nn.Embedding(vocabulary, section.hidden)
        self.positions = nn.Embedding(context, section.hidden) if section.positions == "learned" else None
        self.dropout = nn.Dropout(section.dropout)
        self.blocks = nn.ModuleList(Block(section) for _ in range(section.layers))
        self.norm = _norm(section)
        # Tied models have no head at all, so nothing can untie them: no move, no copy, no checkpoint.
        self.head = None if section.tied else nn.Linear(section.hidden, vocabulary, bias=False)
        self._initialise()

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        assert length <= self.context, f"{length} tokens in a context of {self.context}"
        x = self.tokens(inputs)
        if self.positions is not None:
            x, rotation = x + self.positions.weight[:length], None
        else:
            rotation = rotary(length, self.section.hidden // self.section.heads, self.section.rope_theta, x)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.tokens.weight if self.head is None else self.head.weight)

    def _initialise(self) -> None:
        """As GPT-2 (§2.3): a layer adds to the residual stream twice, and the scale keeps its variance over depth."""
        residual = _STD / math.sqrt(2 * self.section.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual if name.endswith(("out.weight", "down.weight")) else _STD)


def rotary(length: int, size: int, theta: float, like: Tensor) -> Rotation:
    """The angles of rotary positions (Su et al. 2021, arXiv 2104.09864), for the tokens at hand and not the context.

    Each pair of dimensions (i, i + size/2) turns at its own speed. Computed at every forward, in fp64 for a model in
    fp64 and in fp32 for all others: bf16 cannot tell position 257 from 256.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    speeds = 1.0 / theta ** (torch.arange(0, size, 2, device=like.device, dtype=dtype) / size)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=dtype), speeds)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (a, b) of x [..., T, size] to (a·cos - b·sin, b·cos + a·sin); rolling swaps a and b."""
    cos, sin = rotation
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).type_as(x)


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
