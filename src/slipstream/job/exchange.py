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
    codec: Codec | None = None
    """How gradients are made smaller on the wire: fp16, bf16, int8, onebit, topk, randomk or powersgd. Default: not."""


Exchange = AllReduce
