"""Attention to a part of the keys, by torch's fused kernels: what it gives, and the sum that joins it to other parts.

torch's `scaled_dot_product_attention` chooses among the same kernels, but keeps that sum to itself.
"""

import math
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.train.kernels.clock import quickest
from slipstream.train.kernels.remembered import remembered

aten: Any = torch.ops.aten
_KERNELS = {"flash": torch.backends.cuda.enable_flash_sdp, "cudnn": torch.backends.cuda.enable_cudnn_sdp}


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """What queries [B, heads, T, size] get from these keys and values, and the log of the sum of e^score [B, heads, T].

    The sum is in fp32, or in fp64 for fp64.
    """
    if q.device.type == "cpu":
        output, total = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif q.dtype in (torch.bfloat16, torch.float16):
        output, total, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    elif q.dtype == torch.float32:
        output, total, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        total = total[..., : q.shape[2]]  # it is padded
    else:
        return attend_plainly(q, k, v, causal)
    return output, total


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. With output and sum over all keys, these are parts of the whole ones."""
    if q.device.type == "cpu":
        made = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, output, total, 0.0, causal)
    elif q.dtype in (torch.bfloat16, torch.float16):
        state = torch.empty(0, dtype=torch.uint64, device=q.device)  # of random numbers, which it does not draw
        made = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, output, total, None, None, q.shape[2], k.shape[2], 0.0, causal, state, state
        )
    elif q.dtype == torch.float32:
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        padded = torch.nn.functional.pad(total, (0, -total.shape[-1] % 32), value=math.inf)
        made = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, output, padded, state, state, 0.0, [True, True, True, False], causal
        )
    else:
        return attend_plainly_backward(grad, q, k, v, output, total, causal)
    return made[0], made[1], made[2]


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The same, written out."""
    scores = _scores(q, k, causal)
    total = torch.logsumexp(scores, -1)
    return torch.exp(scores - total.unsqueeze(-1)) @ v, total


def attend_plainly_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, written out (Dao et al. 2022, arXiv 2205.14135, §B.2)."""
    weights = torch.exp(_scores(q, k, causal) - total.unsqueeze(-1))
    slack = (grad * output).sum(-1, keepdim=True)
    of_scores = weights * (grad @ v.mT - slack) / math.sqrt(q.shape[-1])
    return of_scores @ k, of_scores.mT @ q, weights.mT @ grad


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def use_fastest(queries: tuple[int, ...], kv_heads: int, dtype: torch.dtype, device: torch.device) -> str:
    """Let torch use the fastest of its fused kernels for causal attention of these queries [B, heads, T, size], forward
    and backward: measured once, and remembered. On Hopper cuDNN's takes 2/3 of the time of flash, but has no backward
    that adds up in a fixed order."""
    fixed = ", in a fixed order" if torch.are_deterministic_algorithms_enabled() else ""
    what = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {queries}, {kv_heads}, {dtype}{fixed}"
    fastest: str = remembered("fastest-attention", what, lambda: _measure(queries, kv_heads, dtype, device))
    for name, enable in _KERNELS.items():
        enable(name == fastest)
    return fastest


def _measure(queries: tuple[int, ...], kv_heads: int, dtype: torch.dtype, device: torch.device) -> str:
    batch, _, length, size = queries
    q = torch.randn(queries, dtype=dtype, device=device, requires_grad=True)
    k, v = (torch.randn(batch, kv_heads, length, size, dtype=dtype, device=device, requires_grad=True) for _ in "kv")
    took: dict[str, float] = {}
    for name in _KERNELS:
        for other, enable in _KERNELS.items():
            enable(other == name)
        with suppress(RuntimeError):  # not every kernel takes every shape
            took[name] = quickest(lambda: _train(q, k, v), 3)
    return min(took, key=lambda name: took[name], default="flash")


def _train(q: Tensor, k: Tensor, v: Tensor) -> None:
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
    torch.autograd.grad(output.sum(), (q, k, v))
