"""How long a step takes, term by term.

A product takes its arithmetic at the peak it reaches, and the traffic of its matrices on top: small ones are slow for
that. Attention and element-wise operations come beside it, and the launching of kernels is a floor under all. What
collectives move crosses the links inside a machine or the network between machines, and hides behind computation in
part. A pipeline adds the time in which stages wait (Narayanan et al. 2021, arXiv 2104.04473). What codecs, local steps
and servers make of the exchange is in `exchange.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.job.exchange import Local
from slipstream.job.servers import Server
from slipstream.plan.exchange import PLAIN, Agreement
from slipstream.plan.grid import OURS, Grid, Hardware, Style, micro_batches
from slipstream.plan.rates import Rates
from slipstream.plan.work import Number, Product, Work

_BYTES = 2  # of what is between the layers, in bf16 and fp16


@dataclass(frozen=True)
class Times:
    """Seconds of a step on the busiest worker."""

    matrix: Number
    attention: Number
    elementwise: Number
    """Norms, activations, residual additions, the loss: what moves memory rather than computes."""
    launch: Number
    """Waiting for the processor to launch kernels."""
    recompute: Number
    tensor: Number
    """Exchange along the tensor axis that nothing hides."""
    context: Number
    stages: Number
    """Handing over between pipeline stages."""
    bubble: Number
    """Stages that wait for others."""
    gradients: Number
    """Exchange of gradients and weights that nothing hides."""
    optimizer: Number
    fixed: Number
    spread: Number
    """Waiting for the slowest worker."""
    coding: Number = 0.0
    """Making codes of gradients, and reading them."""

    @property
    def total(self) -> Number:
        """All of it."""
        return sum(vars(self).values())

    def scaled(self, factor: float) -> "Times":
        """All of it, so many times."""
        return Times(**{name: seconds * factor for name, seconds in vars(self).items()})


@dataclass(frozen=True)
class _Block:
    """Seconds of one micro-batch in one block: forward, and the same for backward."""

    matrix: Number
    attention: Number
    elementwise: Number
    launch: Number
    tensor: Number
    context: Number

    @property
    def total(self) -> Number:
        return sum(vars(self).values())

    def __add__(self, other: "_Block") -> "_Block":
        return _Block(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def step_time(
    work: Work,
    grid: Grid,
    batch: Number,
    on: Hardware,
    rates: Rates,
    style: Style = OURS,
    agreement: Agreement = PLAIN,
) -> Times:
    """The time of one step; where steps differ, their mean over the run."""
    count = micro_batches(grid, batch)
    forward, backward = _block(work, grid, on, rates, style)
    both = forward + backward
    again = np.where(grid.recompute == 2, forward.total, (grid.recompute == 1) * _selective(forward, style))
    layers = work.layers / grid.pipeline
    # The head is the last stage's, beside as many blocks as the others have, or all have as much to do.
    part = np.where(style.balanced, 1 / grid.pipeline, 1.0)
    head, loss = part * _head(work, grid, on, rates), part * _loss(work, grid, on, rates)
    handed = _handed_over(work, grid, on, rates)
    stage = layers * (both.total + again) + head
    evenly = (work.layers * (both.total + again) + head / part) / grid.pipeline
    times = {
        "matrix": count * (layers * both.matrix + head - loss),
        "attention": count * layers * both.attention,
        "elementwise": count * (layers * both.elementwise + loss),
        "launch": count * layers * both.launch,
        "recompute": count * layers * again,
        "tensor": count * layers * both.tensor,
        "context": count * layers * both.context,
        "stages": count * handed,
        "bubble": (grid.pipeline - 1) / grid.stages * (evenly + handed),
        **_agreeing(work, grid, on, rates, style, agreement, stage, count),
        "fixed": _fixed(count * layers, both, count * head, on, rates, style),
    }
    return Times(**times, spread=sum(times.values()) * rates.spread * np.log2(np.maximum(1, grid.workers)))


def _fixed(blocks: Number, both: _Block, head: Number, on: Hardware, rates: Rates, style: Style) -> Number:
    """What the processor does beside launching blocks; where nobody waits for a step, it hides behind what the
    accelerator has still to do."""
    busy = blocks * (both.matrix + both.attention + both.elementwise) + head
    launching = blocks * 3 * np.where(style.fused, rates.launch, rates.unfused_launch)
    late = np.maximum(0, rates.step - np.maximum(0, busy - launching))
    return np.where((style.waits == 0) & (on.ahead > 0), late, rates.step)


def _block(work: Work, grid: Grid, on: Hardware, rates: Rates, style: Style) -> tuple[_Block, _Block]:
    """Forward and backward."""
    rows = grid.micro_batch / grid.context  # samples' worth of tokens on a worker
    matrix = _block_products(work, rows, grid, on, rates, style)
    attention = _attention(work, rows, grid, on, rates, style)
    elementwise = _elementwise(work, rows, grid, on, rates, style)
    launch = np.where(style.fused, rates.launch, rates.unfused_launch)
    tensor = _tensor(work, rows, grid, on, rates)
    ring = _ring(work, rows, grid, on, rates)
    busy = matrix, attention, elementwise
    forward = _launched(busy, launch, on, tensor, np.maximum(0, ring - attention))
    # Each product becomes two. Fused attention computes its scores again: five products for the two of the forward.
    # Keys and values travel with their gradients.
    attention = np.where(style.fused, 2.5, 2) * attention
    late = np.maximum(0, 2 * ring - attention)
    return forward, _launched((2 * matrix, attention, 1.6 * elementwise), 2 * launch, on, tensor, late)


def _launched(
    parts: tuple[Number, Number, Number], launch: Number, on: Hardware, tensor: Number, context: Number
) -> _Block:
    busy = sum(parts)
    squares = busy * busy, launch * launch
    floored = np.sqrt(np.sqrt(squares[0] * squares[0] + squares[1] * squares[1]))  # the larger, without a corner
    return _Block(*parts, np.where(on.ahead, floored - busy, launch), tensor, context)


def _block_products(work: Work, samples: Number, grid: Grid, on: Hardware, rates: Rates, style: Style) -> Number:
    """Of the mean block, where some are left out of shorter precisions."""
    short = _products(work.block, samples, grid, on, rates) * style.product_time
    if not np.any(style.long_blocks):
        return short
    part = style.long_blocks / work.layers
    return (1 - part) * short + part * _products(work.block, samples, grid, _exact(on), rates)


def _exact(on: Hardware) -> Hardware:
    """For products that are left out of shorter precisions."""
    return replace(on, peak=on.peak_16, bits=np.maximum(16, on.bits))


def _products(parts: Sequence[Product], samples: Number, grid: Grid, on: Hardware, rates: Rates) -> Number:
    """Arithmetic and traffic of matrices. Each term goes with samples, with a tensor worker's part, with both or none:
    what is the same for all layouts is added up before it meets them, who are many."""
    reached = np.where(on.bits >= 16, rates.matrix_16, np.where(on.bits == 8, rates.matrix_8, rates.matrix_4))
    operation, byte = 1 / (on.peak * reached), rates.matrix_traffic * _BYTES / (on.bandwidth * rates.bandwidth)
    by_samples = by_part = by_both = 0.0
    fixed = rates.matrix_start * len(parts)
    for part in parts:
        arithmetic = 2 * part.rows * part.n * part.k * operation
        into, weights, out = byte * part.rows * part.k, byte * part.k * part.n, byte * part.rows * part.n
        if part.split == "no":
            by_samples, fixed = by_samples + arithmetic + into + out, fixed + weights
        else:
            whole, cut = (into, out) if part.split == "n" else (out, into)
            by_both, by_samples, by_part = by_both + arithmetic + cut, by_samples + whole, by_part + weights
    return (by_both * samples + by_part) / grid.tensor + by_samples * samples + fixed


_FIXED_ORDER = 1.5
"""How much longer attention takes that adds up in a fixed order: llama-1b on an H200, 541 ms a step instead of 504."""


def _attention(work: Work, samples: Number, grid: Grid, on: Hardware, rates: Rates, style: Style) -> Number:
    flops = work.attention * samples / grid.tensor
    length = work.tokens / grid.context
    fused = flops / (on.peak_16 * rates.attention) * (1 + rates.attention_length / length)
    fused = fused * np.where(style.fixed_order, _FIXED_ORDER, 1)
    if np.all(style.fused):
        return fused
    scores = work.tokens * samples * work.tokens * work.heads / grid.tensor * (work.attention > 0)
    # Without fusion what causality hides is computed too, and scores travel.
    unfused = 2 * flops / (on.peak_16 * rates.matrix_16) + rates.scores_traffic * _BYTES * scores / (
        on.bandwidth * rates.bandwidth
    )
    return np.where(style.fused, fused, unfused)


def _elementwise(work: Work, samples: Number, grid: Grid, on: Hardware, rates: Rates, style: Style) -> Number:
    stream = rates.stream_traffic * work.stream / np.where(style.sequence, grid.tensor, 1)
    inner = rates.inner_traffic * work.inner / grid.tensor * (1 - _FOLDED * _folded(work, grid, style))
    more = np.where(style.fused, 1, rates.unfused_traffic)
    more = more * np.where((np.asarray(style.compiled) > 0) & ~style.compiles(grid), rates.eager_traffic, 1)
    return more * _BYTES * work.tokens * samples * (stream + inner) / (on.bandwidth * rates.bandwidth)


_FOLDED = 0.5
"""Of what GELU takes apart: GPT-2 on an H200, 7.5 ms a step before and 3.4 in its products."""


def _folded(work: Work, grid: Grid, style: Style) -> Number:
    """Whether GELU is a part of products; with a gate there are two products before the activation, and it is not."""
    if not np.any(style.folds):
        return 0.0
    return (np.asarray(style.folds) > 0) & (work.inner == work.middle) & style.compiles(grid) & (grid.recompute != 1)


def _tensor(work: Work, samples: Number, grid: Grid, on: Hardware, rates: Rates) -> Number:
    """In a block, forward or backward, tensor workers sum the stream twice."""
    inside = grid.tensor <= on.per_node
    speed = np.where(inside, on.link * rates.link, on.network / on.per_node * rates.network)
    summed = 2 * (grid.tensor - 1) / grid.tensor * _BYTES * work.tokens * samples * work.stream
    return (grid.tensor > 1) * 2 * (summed / speed + rates.link_latency) * (1 - rates.tensor_hidden)


def _ring(work: Work, samples: Number, grid: Grid, on: Hardware, rates: Rates) -> Number:
    """Keys and values go round the context workers."""
    inside = grid.tensor * grid.context <= on.per_node
    speed = np.where(inside, on.link * rates.link, on.network / on.per_node * rates.network)
    hop = 2 * _BYTES * work.tokens * samples * work.keys / grid.tensor / speed
    return (grid.context - 1) * (hop + np.where(inside, rates.link_latency, rates.network_latency))


def _head(work: Work, grid: Grid, on: Hardware, rates: Rates) -> Number:
    rows = grid.micro_batch / grid.context
    return 3 * _products(work.head, rows, grid, _exact(on), rates) + _loss(work, grid, on, rates)


def _loss(work: Work, grid: Grid, on: Hardware, rates: Rates) -> Number:
    scores = work.tokens * grid.micro_batch / grid.context * work.outputs / grid.tensor
    return rates.loss_traffic * 4 * scores / (on.bandwidth * rates.bandwidth)


def _selective(forward: _Block, style: Style) -> Number:
    return forward.elementwise + np.where(style.fused, 0, forward.attention)


def _handed_over(work: Work, grid: Grid, on: Hardware, rates: Rates) -> Number:
    """A micro-batch goes from stage to stage, and its gradient back."""
    size = _BYTES * work.tokens * grid.micro_batch / grid.context * work.stream / grid.tensor
    each = size / (on.network / on.per_node * rates.network) + rates.network_latency
    return (grid.pipeline > 1) * 2 * grid.stages * each


def _agreeing(
    work: Work,
    grid: Grid,
    on: Hardware,
    rates: Rates,
    style: Style,
    agreement: Agreement,
    stage: Number,
    count: Number,
) -> dict[str, Number]:
    """Exchange and update."""
    held, memory = work.parameters / (grid.tensor * grid.pipeline), on.bandwidth * rates.bandwidth
    update, size = rates.optimizer_bytes * _owned(work, grid) / memory, style.stored_weight * held
    setting = agreement.setting
    if isinstance(setting, Server):
        moved = rates.optimizer_bytes * held
        waits, update = agreement.of_servers(setting, grid, on, rates, size, count * stage, moved)
    elif isinstance(setting, Local):
        summing = _sum_of(agreement.sent(work, grid, style) * held, grid.replicate, grid, on, rates)
        waits, updates = agreement.of_local_steps(setting, summing, count * stage, update, size, memory)
        update = np.where(grid.replicate > 1, updates, update)
    else:
        waits = _gradients(work, grid, on, rates, style, agreement, stage, count)
    return {
        "gradients": waits,
        "optimizer": update,
        "coding": agreement.coding(work, grid, held, on, rates, style),
    }


def _sum_of(size: Number, group: Number, grid: Grid, on: Hardware, rates: Rates) -> Number:
    """Seconds of an all-reduce."""
    return 2 * size * (group - 1) / group / _speed(grid, on, rates, group)


def _gradients(
    work: Work,
    grid: Grid,
    on: Hardware,
    rates: Rates,
    style: Style,
    agreement: Agreement,
    stage: Number,
    count: Number,
) -> Number:
    """Gradients are summed once a step; with shared-out weights they and the weights travel for each micro-batch."""
    held = work.parameters / (grid.tensor * grid.pipeline)
    group = grid.data * grid.context
    gathered, summed = style.weight_bytes * held, agreement.sent(work, grid, style) * held
    speed = _speed(grid, on, rates, group)
    part = (group - 1) / group
    # Where the optimiser's state is shared out each gets the sum of its part; but codes are summed whole.
    both = 2 if agreement.setting.codec else 1
    once = np.where(grid.sharded == 0, 2 * summed, both * summed + gathered) * part / speed
    gathers = np.where(grid.sharded == 3, 2, 1)
    latency = rates.network_latency * np.log2(np.maximum(2, group)) * (gathers + 1) * work.layers / grid.pipeline
    each = (gathers * gathered + style.weight_bytes * held) * part / speed + latency * (group > 1)
    hidden = rates.gradients_hidden
    every = each * (1 - hidden) + np.maximum(0, hidden * each - stage)
    last = once * (1 - hidden) + np.maximum(0, hidden * once - 2 / 3 * stage)
    return np.where(grid.sharded >= 2, count * every, last)


def _speed(grid: Grid, on: Hardware, rates: Rates, group: Number) -> Number:
    """Bytes a second of a collective over data workers. Those in one machine share its network as a ring does: only
    what leaves the machine counts, so a group with more members in it has more of the network."""
    inside = np.maximum(1, np.minimum(group, np.floor(on.per_node / grid.tensor)))
    network = on.network * rates.network * inside / on.per_node
    return np.where(group > inside, np.minimum(on.link * rates.link, network), on.link * rates.link)


def _owned(work: Work, grid: Grid) -> Number:
    held = work.parameters / (grid.tensor * grid.pipeline)
    return np.where(grid.sharded > 0, held / grid.shard, held)
