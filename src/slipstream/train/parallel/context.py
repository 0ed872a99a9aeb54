"""The context axis: workers share out every sequence, and keys and values travel round a ring (Liu, Zaharia and
Abbeel 2023, arXiv 2310.01889).

Causal attention costs a late token more than an early one. A sequence is cut into twice as many parts as there are
workers; each takes an early and a late one, so that all have the same to do (Brandon et al. 2023, arXiv 2311.09431).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.plan import Layout, Place
from slipstream.train.parallel.groups import Group


def tokens_of(index: int, workers: int, length: int) -> Tensor:
    """The places in a sequence of one worker's tokens: part number `index`, and the same number from the end."""
    part = length // (2 * workers)
    early, late = index * part, (2 * workers - 1 - index) * part
    return torch.cat((torch.arange(early, early + part), torch.arange(late, late + part)))


class Places:
    """Where the tokens that a worker holds stand in their sequence."""

    def __init__(self, layout: Layout, place: Place) -> None:
        self._layout, self._place = layout, place

    def in_attention(self, length: int, device: torch.device) -> Tensor:
        """Of so many tokens in attention: all those of this worker on the context axis."""
        if self._layout.context == 1:
            return torch.arange(length, device=device)
        return tokens_of(self._place.context, self._layout.context, length * self._layout.context).to(device)

    def in_stream(self, length: int, device: torch.device) -> Tensor:
        """Of so many tokens in the residual stream, which tensor workers share out further."""
        tensor = self._layout.tensor
        return self.in_attention(length * tensor, device).chunk(tensor)[self._place.tensor]


class RingAttention:
    """Causal attention of one worker's queries to everybody's keys and values."""

    def __init__(self, group: Group, ranks: list[int]) -> None:
        self.group, self.size, self.index = group, group.size(), group.rank()
        self._next, self._previous = ranks[(self.index + 1) % self.size], ranks[(self.index - 1) % self.size]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        full = q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32
        with torch.autocast(q.device.type, enabled=False):
            return _ring(q.to(full), k.to(full), v.to(full), self).type_as(q)

    def visible(self, other: int, length: int, device: torch.device) -> Tensor:
        """Which of another worker's tokens each of this worker's may see, [T, T]."""
        mine, theirs = (tokens_of(n, self.size, length * self.size).to(device) for n in (self.index, other))
        return mine[:, None] >= theirs[None, :]

    def owner(self, hop: int) -> int:
        """Whose keys and values are here after so many hops."""
        return (self.index - hop) % self.size

    def pass_on(self, tensors: list[Tensor]) -> list[Tensor]:
        """Give to the next worker, and take from the one before."""
        given = [tensor.contiguous() for tensor in tensors]
        taken = [torch.empty_like(tensor) for tensor in given]
        sends = [dist.P2POp(dist.isend, tensor, self._next, self.group) for tensor in given]
        takes = [dist.P2POp(dist.irecv, tensor, self._previous, self.group) for tensor in taken]
        for work in dist.batch_isend_irecv(sends + takes):
            work.wait()
        return taken


class _Ring(torch.autograd.Function):
    """Softmax over all keys, gathered one worker's at a time (Milakov and Gimelshein 2018, arXiv 1805.02867)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingAttention) -> Tensor:
        grouped = _by_group(q, k)
        total = grouped.new_full(grouped.shape[:-1], -math.inf)
        output = torch.zeros_like(grouped)
        here = [k, v]
        for hop in range(ring.size):
            scores = _scores(grouped, here[0], ring.visible(ring.owner(hop), q.shape[2], q.device))
            part = torch.logsumexp(scores, -1)
            new_total = torch.logaddexp(total, part)
            weights = torch.exp(scores - new_total.unsqueeze(-1))
            output = output * torch.exp(total - new_total).unsqueeze(-1) + weights @ here[1].unsqueeze(2)
            total = new_total
            if hop < ring.size - 1:
                here = ring.pass_on(here)
        ctx.save_for_backward(q, k, v, output, total)
        ctx.ring = ring
        return output.reshape(q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """As in FlashAttention (arXiv 2205.14135, §B.2), the gradients of keys and values travelling with them."""
        q, k, v, output, total = ctx.saved_tensors
        ring: RingAttention = ctx.ring
        grouped, of_output = _by_group(q, k), _by_group(grads[0], k)
        slack = (of_output * output).sum(-1, keepdim=True)
        of_q = torch.zeros_like(grouped)
        here = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        for hop in range(ring.size):
            key, value, of_key, of_value = here
            scores = _scores(grouped, key, ring.visible(ring.owner(hop), q.shape[2], q.device))
            weights = torch.exp(scores - total.unsqueeze(-1))
            of_value = of_value + (weights.transpose(-1, -2) @ of_output).sum(2)
            of_scores = weights * (of_output @ value.unsqueeze(2).transpose(-1, -2) - slack) / math.sqrt(q.shape[-1])
            of_q += of_scores @ key.unsqueeze(2)
            of_key = of_key + (of_scores.transpose(-1, -2) @ grouped).sum(2)
            here = ring.pass_on([key, value, of_key, of_value])  # after the last hop they are at home again
        return of_q.reshape(q.shape), here[2], here[3], None


_ring: Callable[[Tensor, Tensor, Tensor, RingAttention], Tensor] = _Ring.apply


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    """Queries [B, heads, T, size] by the key head they share: [B, kv_heads, queries, T, size]."""
    return q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])


def _scores(grouped: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2) / math.sqrt(key.shape[-1])
    return scores.masked_fill(~visible, -math.inf)
