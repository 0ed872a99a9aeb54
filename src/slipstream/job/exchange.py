"""`exchange:` how workers agree on an update."""

from typing import Literal

from slipstream.job.base import Section
from slipstream.job.units import Bytes


class AllReduce(Section):
    """The sum of all gradients, exchanged while backward still runs."""

    kind: Literal["allreduce"] = "allreduce"
    """The exchange's name."""
    bucket: Bytes = 25_000_000
    """Gradients travel in buckets of about this size."""


Exchange = AllReduce
