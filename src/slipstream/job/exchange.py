"""`exchange:` how workers agree on an update."""

from typing import Literal

from slipstream.job.base import Section
from slipstream.job.codecs import Codec
from slipstream.job.units import Bytes


class AllReduce(Section):
    """The sum of all gradients, exchanged while backward still runs."""

    kind: Literal["allreduce"] = "allreduce"
    """The exchange's name."""
    bucket: Bytes = 25_000_000
    """Gradients travel in buckets of about this size."""
    algorithm: Literal["auto", "backend", "ring", "tree", "halving-doubling", "hierarchical"] = "auto"
    """How a bucket is added up (docs/exchange.md). auto: on one machine, and on GPUs, the backend's own; between
    machines the quickest for the bucket's size, by links that are measured once for a run. backend: what gloo or NCCL
    choose. On GPUs ring and tree are NCCL's own, and the last two do not exist. One worker has nothing to add up and
    ignores it: the same job file runs on a laptop."""
    codec: Codec | None = None
    """How gradients are made smaller on the wire: fp16, bf16, int8, onebit, topk, randomk or powersgd. Default: not."""


Exchange = AllReduce
