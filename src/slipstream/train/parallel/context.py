"""The context axis: workers share out every sequence, and keys and values travel round a ring (Liu, Zaharia and
Abbeel 2023, arXiv 2310.01889).

Causal attention costs a late token more than an early one. A sequence is cut into twice as many parts as there are
workers; each takes an early and a late one, so that all have the same to do (Brandon et al. 2023, arXiv 2311.09431).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.plan import Layout, Place
from slipstream.train.kernels.attention import attend, attend_backward
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
        return _ring(q, k, v, self)

    def visible(self, hop: int, length: int) -> tuple[slice, slice]:
        """Which queries see which of the keys that are here after so many hops.

        Each worker has an early and a late part. Those of a worker before this one lie outside this one's: its early
        part is seen by all queries, its late part by none. Those of a worker after it lie between: the late queries
        see both.
        """
        owner, half = (self.index - hop) % self.size, length // 2
        if owner == self.index:
            return slice(length), slice(length)
        return (slice(length), slice(half)) if owner < self.index else (slice(half, length), slice(length))

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
        here = [k, v]
        for hop in range(ring.size):
            queries, keys = ring.visible(hop, q.shape[2])
            key, value = (_for_each_query(tensor[:, :, keys], q) for tensor in here)
            part, part_total = attend(q[:, :, queries], key, value, causal=hop == 0)
            if hop == 0:
                total = part_total.clone(
                    memory_format=torch.contiguous_format
                )  # recomputation may keep the part itself
                output = part.to(total.dtype, copy=True)
            else:
                _join(output[:, :, queries], total[:, :, queries], part, part_total)
            if hop < ring.size - 1:
                here = ring.pass_on(here)
        given = output.type_as(q)
        ctx.save_for_backward(q, k, v, given, total)
        ctx.ring = ring
        return given

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of keys and values travel with them."""
        q, k, v, output, total = ctx.saved_tensors
        ring: RingAttention = ctx.ring
        of_q = torch.zeros_like(q, dtype=total.dtype)
        here = [k, v, torch.zeros_like(k, dtype=total.dtype), torch.zeros_like(v, dtype=total.dtype)]
        for hop in range(ring.size):
            queries, keys = ring.visible(hop, q.shape[2])
            key, value = (_for_each_query(tensor[:, :, keys], q) for tensor in here[:2])
            seen = (tensor[:, :, queries] for tensor in (grads[0], q, output, total))
            grad, query, given, part_total = seen
            parts = attend_backward(grad, query, key, value, given, part_total, causal=hop == 0)
            of_q[:, :, queries] += parts[0]
            for whole, part in zip(here[2:], parts[1:], strict=True):
                whole[:, :, keys] += part.view(*k.shape[:2], -1, *part.shape[2:]).sum(2)
            here = ring.pass_on(here)  # after the last hop they are at home again
        return of_q.type_as(q), here[2].type_as(k), here[3].type_as(v), None


_ring: Callable[[Tensor, Tensor, Tensor, RingAttention], Tensor] = _Ring.apply


def _join(output: Tensor, total: Tensor, part: Tensor, part_total: Tensor) -> None:
    """Add to what queries have got, in place, what they get from further keys."""
    new_total = torch.logaddexp(total, part_total)
    output.mul_(torch.exp(total - new_total).unsqueeze(-1)).add_(part * torch.exp(part_total - new_total).unsqueeze(-1))
    total.copy_(new_total)


def _for_each_query(shared: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, kv_heads, T, size], repeated for the query heads that share them."""
    return shared.repeat_interleave(q.shape[1] // shared.shape[1], dim=1) if q.shape[1] != shared.shape[1] else shared
