"""Layouts as columns of numbers, one entry for each candidate, and the machines they would run on."""

import math
from dataclasses import dataclass, replace

import numpy as np

from slipstream.job.train import SHORT
from slipstream.plan.layout import Layout
from slipstream.plan.offer_table import Offer
from slipstream.plan.work import Number

SHARDED = ("nothing", "optimizer", "gradients", "parameters")
"""What the shard axis shares out, by number."""
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Grid:
    """Many layouts at once."""

    replicate: Number
    shard: Number
    tensor: Number
    pipeline: Number
    context: Number
    micro_batch: Number
    stages: Number
    """Stages of each worker."""
    sharded: Number
    """Index into SHARDED."""
    recompute: Number
    """Index into RECOMPUTE."""
    first_in_first_out: Number = 0
    """1 where all forwards come before all backwards (gpipe)."""

    @classmethod
    def of(cls, layout: Layout) -> "Grid":
        """A single layout."""
        return cls(
            replicate=np.float64(layout.replicate),
            shard=np.float64(layout.shard),
            tensor=np.float64(layout.tensor),
            pipeline=np.float64(layout.pipeline),
            context=np.float64(layout.context),
            micro_batch=np.float64(layout.micro_batch),
            stages=np.float64(layout.stages / layout.pipeline),
            sharded=SHARDED.index(layout.sharded) if layout.shard > 1 else 0,
            recompute=RECOMPUTE.index(layout.recompute),
            first_in_first_out=int(layout.schedule == "gpipe"),
        )

    @property
    def data(self) -> Number:
        """Groups of workers that take different samples."""
        return self.replicate * self.shard

    @property
    def workers(self) -> Number:
        """All of them."""
        return self.data * self.tensor * self.pipeline * self.context


def micro_batches(grid: Grid, batch: Number) -> Number:
    """How many pass through the worker with most samples."""
    return np.ceil(np.ceil(batch / grid.data) / grid.micro_batch)


@dataclass(frozen=True)
class Hardware:
    """What a worker computes on and talks over."""

    peak: Number
    """FLOP/s of matrix products in the run's precision."""
    bits: Number
    """Of that precision: 4, 8, 16; 32 and 64 count as 16."""
    peak_16: Number
    """The same in 16 bits, in which attention stays, or in the run's precision if that is longer."""
    memory: Number
    bandwidth: Number
    """Bytes a second to and from its memory."""
    link: Number
    """Bytes a second to its neighbours in the machine, in one direction."""
    network: Number
    """Bytes a second of the whole machine to others, in one direction."""
    per_node: Number
    """Accelerators in a machine."""
    ahead: Number = 1
    """1 where kernels are launched ahead of their computation; on a CPU the one waits for the other."""


@dataclass(frozen=True)
class Style:
    """How the training program is written, where that shows in time and memory."""

    fused: Number = 1
    """1 where attention and element-wise operations are fused kernels."""
    sequence: Number = 1
    """1 where tensor workers share out the sequence too."""
    balanced: Number = 1
    """1 where stages are cut so that all have as much to do, the head counted; 0 where all have as many blocks."""
    gradient_bytes: Number = 4
    """Of each gradient, as it travels."""
    weight_bytes: Number = 4
    """Of each weight, as it travels, and as it is held where it is gathered."""
    stored_weight: Number = 4
    """Of each weight, as the model holds it."""
    master: Number = 0
    """Of a second, exact copy of each weight, kept with the optimiser's state."""
    stream_bytes: Number = 4
    """Of a number in the residual stream: under autocast what fp32 weights and bf16 products add up to is fp32, unless
    the program says otherwise."""
    kept_bytes: Number = 2
    """Of a number that backward needs inside a block."""
    keeps_gathered: Number = 1
    """1 where the sequence that tensor workers have gathered for a product is kept for its backward."""
    kept_products: Number = 1
    """Part of a block's products that selective recomputation keeps."""
    over_context: Number = 0
    """1 where context workers share out the state of a replica too."""
    score_bytes: Number = 8
    """Held for each of the head's scores while the loss is taken, in all copies."""
    score_rows: Number = math.inf
    """Tokens whose scores are held at once, where a worker has the whole model; then each score is held once, as long
    as `kept_bytes`, and the head's weights are there as long as that too."""
    compiled: Number = 0
    """1 where a compiler makes kernels of whole blocks: it keeps less of what is between their products, but also the
    weights, as long as products take them."""
    waits: Number = 1
    """1 where a step is waited for before the next one is launched."""
    product_bytes: Number = 2
    """Of a weight as products take it."""
    fragmented: Number = 0.04
    """What the allocator cannot use, as a part of what is held."""
    eager: Number = 0
    """1 where a program that compiles its blocks must not, on no layout: the job says so, or has dropout."""
    fixed_order: Number = 0
    """1 where attention's backward adds up in a fixed order."""
    product_time: Number = 1
    """How much longer products take than their bits say: with a scale for each row, or by a slower kernel."""
    folds: Number = 0
    """1 where compiled blocks have GELU in their products' own kernels, unless what those give is computed again."""
    turns_from: Number = math.inf
    """Numbers of queries, keys and values from which compiled blocks turn them to their positions in one pass, unless
    what it gives is computed again: then nothing of them is kept twice."""
    long_blocks: Number = 0
    """Blocks whose products are left in 16 bits where those of others are shorter."""

    def compiles(self, grid: Grid) -> Number:
        """Where blocks are compiled: the program does so, and they exchange nothing in their middle."""
        return (
            (np.asarray(self.compiled) > 0) & (np.asarray(self.eager) == 0) & (grid.tensor == 1) & (grid.context == 1)
        )


OURS = Style(stream_bytes=2, score_rows=4096, compiled=1, waits=0, fragmented=0.015)
"""Slipstream's own program, in bf16 on a GPU. On an H200 its workers took 1.0 to 2.6 GB more than their tensors, of
22 to 127 GB: the driver's part and little else, for memory is one whole there (fleet/workers.py)."""


def style_of(precision: str, on_gpu: bool = True, eager: bool = False, fixed_order: bool = False) -> Style:
    """Our program in a precision: in 32 and 64 bits what is kept is as long as the weights, and so is fp16's stream."""
    slower = _SLOWER.get(precision, 1.0)
    ours = replace(OURS, compiled=int(on_gpu), eager=int(eager), fixed_order=int(fixed_order), product_time=slower)
    if precision == "bf16" and on_gpu:
        ours = replace(ours, folds=1)  # train/models/folded.py
    if (precision == "bf16" or precision in SHORT) and on_gpu:
        ours = replace(ours, turns_from=2**24)  # train/kernels/rotary.py
    if precision in SHORT:
        ours = replace(ours, long_blocks=1)  # the first: train/kernels/layers.py
    if precision in ("fp8", "fp8-rows"):
        return replace(ours, product_bytes=1)
    if precision == "fp16":
        return replace(ours, stream_bytes=4)
    longer = {"fp32": 4, "tf32": 4, "fp64": 8}.get(precision)
    if longer is None:
        return ours
    names = ("gradient_bytes", "weight_bytes", "stored_weight", "kept_bytes", "stream_bytes")
    return replace(ours, product_bytes=0, **dict.fromkeys(names, longer))  # products take the weights themselves


_SLOWER = {"fp8-rows": 1.2, "int8": 2.45}
"""llama-1b on an H200: 441 and 525 ms a step, beside 402 in fp8, all blocks in 8 bits."""


def of_products(precision: str) -> str:
    """As data sheets and profiles call the arithmetic of a run's products."""
    return "fp8" if precision == "fp8-rows" else precision


def hardware_of(offer: Offer, precision: str) -> Hardware:
    """What workers have on a rented machine. A rack whose accelerators are all linked is one machine to them."""
    accelerator = offer.accelerator
    bits = {"fp4": 4, "fp8": 8, "int8": 8}.get(precision, 16)
    peak = accelerator.peaks[precision]
    linked = max(offer.count, accelerator.linked) if offer.count > 1 and accelerator.linked > 8 else offer.count
    return Hardware(
        peak=peak,
        bits=bits,
        peak_16=accelerator.peaks.get("bf16" if bits < 16 else precision, peak),
        memory=accelerator.memory,
        bandwidth=accelerator.bandwidth,
        link=offer.link,
        network=offer.network * linked / offer.count,
        per_node=linked,
    )
