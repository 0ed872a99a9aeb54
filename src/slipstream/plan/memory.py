"""What a worker holds, term by term: on the busiest worker, at the worst moment."""

from dataclasses import dataclass

import numpy as np

from slipstream.plan.exchange import Agreement
from slipstream.plan.grid import OURS, Grid, Style, micro_batches
from slipstream.plan.stages import most_parameters
from slipstream.plan.work import Number, Work

CONTEXT = 1.0e9
"""Bytes that the driver, its kernels and the collectives take before anything is trained."""


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    parameters: Number
    gradients: Number
    optimizer: Number
    master: Number
    """A second, exact copy of the weights."""
    gathered: Number
    """Weights of other workers that are here for a block's forward or backward, and gradients on their way to them."""
    activations: Number
    """Kept from forward to backward, for all micro-batches that are on their way at once."""
    scores: Number
    """What the head gives, and the loss makes of it."""
    reserve: Number
    """Driver, kernels, collectives, and what the allocator cannot use."""
    buckets: Number = 0.0
    """In which gradients travel, where several micro-batches add up beside them."""
    unsent: Number = 0.0
    """What codes have left out of gradients so far, and what the step under way leaves (error feedback)."""
    codes: Number = 0.0
    """What codes are made of where nothing is kept, and the directions of powersgd."""
    making: Number = 0.0
    """What making the code of one bucket takes for a moment."""
    anchor: Number = 0.0
    """The weights that workers of local steps agreed on last."""
    outer: Number = 0.0
    """The momentum of their outer step."""
    travelling: Number = 0.0
    """Changes of local steps on their way, or gradients on the way to servers."""
    servers: Number = 0.0
    """A worker's part of what servers in the same memory hold."""

    @property
    def state(self) -> Number:
        """What is held from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.master

    @property
    def total(self) -> Number:
        """All of it."""
        return sum(vars(self).values())


def memory(
    work: Work,
    grid: Grid,
    batch: Number,
    optimizer_states: Number,
    style: Style = OURS,
    agreement: Agreement | None = None,
) -> Memory:
    """What the busiest worker holds. `optimizer_states` are the numbers that the optimiser keeps for each weight. What
    other programs' exchanges hold is not known: without an agreement nothing is counted for it."""
    held = _held_parameters(work, grid)
    whole = grid.shard * np.where(style.over_context, grid.context, 1) * np.ones_like(held)
    shared = {name: np.where(grid.sharded >= least, whole, 1.0) for name, least in _SHARED_FROM.items()}
    activations, scores = _activations(work, grid, batch, style)
    served = agreement is not None and agreement.setting.kind == "server"  # then the servers have the optimiser
    terms = {
        "parameters": style.stored_weight * held / shared["parameters"],
        "gradients": np.maximum(style.gradient_bytes, style.stored_weight) * held / shared["gradients"],
        "optimizer": 4 * optimizer_states * (not served) * held / shared["optimizer"],
        "master": style.master * held / shared["optimizer"],
        "gathered": np.where(grid.sharded >= 2, style.weight_bytes * _gathered(work, grid, held), 0.0),
        "activations": activations,
        "scores": scores,
        **(agreement.held(work, grid, batch, held, optimizer_states, style) if agreement else {}),
    }
    return Memory(**terms, reserve=CONTEXT + style.fragmented * sum(terms.values()))


_SHARED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 2}


def _held_parameters(work: Work, grid: Grid) -> Number:
    """Of the worker with most of them."""
    if np.ndim(work.layers):  # many models at once, cut as other programs cut them: as many blocks to each stage
        ends = np.where(grid.pipeline > 1, work.table_parameters, work.table_parameters + work.head_parameters)
        return (np.ceil(work.layers / grid.pipeline) * work.block_parameters + ends) / grid.tensor
    held = np.empty_like(grid.pipeline * grid.stages)
    for pipeline in np.unique(grid.pipeline):
        for each in np.unique(grid.stages):
            here = (grid.pipeline == pipeline) & (grid.stages == each)
            if here.any():
                np.putmask(held, here, most_parameters(work, int(pipeline), int(each)))
    return held / grid.tensor


def _gathered(work: Work, grid: Grid, held: Number) -> Number:
    """Weights: two blocks at once, one computing and one coming, and what is in no block; or all, where they are kept.
    And the gradients of a block, on their way."""
    some = (2 * work.block_parameters + work.table_parameters + work.head_parameters) / grid.tensor
    gradients = work.block_parameters / grid.tensor
    return np.where(grid.sharded == 2, held, np.minimum(some, held)) + gradients


_WIDE_NORMS = 16
"""Bytes for each number of the stream that the two norms of a block keep where nothing fuses them: what comes in and
what it is normed to, in fp32 (llama-1b on an H200: 85.3 GB without the compiler, 63.4 with it)."""


def _activations(work: Work, grid: Grid, batch: Number, style: Style) -> tuple[Number, Number]:
    tokens = work.tokens * grid.micro_batch / grid.context
    along = np.where(style.sequence, grid.tensor, 1)
    compiled = 1.0 * style.compiles(grid)
    widened = (style.compiled - compiled) * _WIDE_NORMS * (np.asarray(style.stream_bytes) < 4)
    many = tokens * (work.stream + 2 * work.keys) >= style.turns_from
    turned = work.turned * (1 - (many & (grid.recompute != 1)) * np.asarray(work.in_one_pass))
    block = tokens * (
        (style.stream_bytes / along + style.kept_bytes / np.where(style.keeps_gathered, 1, along))
        * work.kept_stream
        / 2
        + (1 - np.asarray(style.fused)) * work.stream * 2 / along  # masks of dropout
        + widened * work.stream / along
        + style.kept_bytes * (work.kept_inside - compiled * (work.fused - turned)) / grid.tensor
        - _shorter(work, style) / grid.tensor
    )
    weights = compiled * style.product_bytes * work.block_parameters
    scores = 5 * tokens * work.tokens * work.heads / grid.tensor * (work.attention > 0)
    unfused = block + scores
    start = tokens * style.stream_bytes * work.stream / along
    products = start + style.kept_products * tokens * (
        style.stream_bytes * 2 * work.stream / along + style.kept_bytes * work.products_inside / grid.tensor
    )
    fused = np.asarray(style.fused) > 0
    whole = np.where(fused, block, unfused) + weights
    selective = np.where(fused, products, block)
    kept = np.where(grid.recompute == 0, whole, np.where(grid.recompute == 1, selective, start))
    once = np.where(grid.recompute == 0, 0.0, whole)  # the block that is being computed again
    layers = np.ceil(work.layers / grid.pipeline)
    whole_model = (grid.tensor == 1) & (grid.pipeline == 1)
    some = style.kept_bytes * np.minimum(tokens, style.score_rows) * work.outputs
    weights_of_head = sum(part.n * part.k for part in work.head)
    # The head's gradient comes as a new tensor, to be added to the one that is there.
    added = style.gradient_bytes * (micro_batches(grid, batch) > 1)
    by_rows = whole_model & np.isfinite(style.score_rows)
    ours = some + (style.kept_bytes + added) * weights_of_head
    head = np.where(by_rows, ours, style.score_bytes * tokens * work.outputs) / grid.tensor
    first = layers * kept * _in_flight(grid, batch) + once
    # The head is over when the first block goes backward, is computed again and makes its own gradients.
    making = tokens * style.kept_bytes * (work.inner + work.middle)
    making += (style.kept_bytes + added) * work.block_parameters * (work.middle > 0)  # others may have but one block
    again = np.where(by_rows, np.maximum(0, once + making + added * weights_of_head - head), once)
    last = layers * kept * np.where(grid.first_in_first_out, micro_batches(grid, batch), 1) + again + head
    at_the_end = (grid.pipeline == 1) | (last > first)
    return np.where(at_the_end, last - head, first), np.where(at_the_end, head, 0.0)


def _shorter(work: Work, style: Style) -> Number:
    """Bytes for each token that products in fp8 keep less: what goes into the last one. What goes into the others is
    kept twice, or is needed in full besides."""
    bytes_less = np.where(np.asarray(style.product_bytes) == 1, style.kept_bytes - style.product_bytes, 0)
    return bytes_less * work.middle * (1 - style.long_blocks / work.layers)


def _in_flight(grid: Grid, batch: Number) -> Number:
    """Micro-batches on their way through the first stage: with several stages to a worker a little more than one
    each (Narayanan et al. 2021, arXiv 2104.04473, §2.2)."""
    count = micro_batches(grid, batch)
    most = np.where(
        grid.stages > 1, grid.pipeline * (1 + (grid.pipeline - 1) / (grid.pipeline * grid.stages)), grid.pipeline
    )
    return np.where(grid.first_in_first_out, count, np.minimum(count, most))
