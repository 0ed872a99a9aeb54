"""`exchange:` how workers agree on an update."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, Tag, model_validator

from slipstream.job.base import Section, choice, refuse
from slipstream.job.codecs import Codec
from slipstream.job.servers import Server
from slipstream.job.units import Bytes, Count, CountOrZero, Number

if TYPE_CHECKING:
    from slipstream.job.job import Job


class Summing(Section):
    """What exchanges share in which workers add up tensors."""

    bucket: Bytes = 25_000_000
    """Gradients travel in buckets of about this size."""
    algorithm: Literal["auto", "backend", "ring", "tree", "halving-doubling", "hierarchical"] = "auto"
    """How a bucket is added up (docs/exchange.md). auto: on one machine, and on GPUs, the backend's own; between
    machines the quickest for the bucket's size, by links that are measured once for a run. backend: what gloo or NCCL
    choose. On GPUs ring and tree are NCCL's own, and the last two do not exist. With a codec leave it out: codes have
    their own ways. One worker has nothing to add up and ignores it: the same job file runs on a laptop."""
    codec: Codec | None = None
    """How gradients are made smaller on the wire: fp16, bf16, int8, onebit, topk, randomk or powersgd. Default: not."""

    @model_validator(mode="after")
    def _check_codec(self) -> "Summing":
        without = self.codec and self.algorithm != "auto"
        refuse([_ALGORITHM_OF_CODES.format(algorithm=self.algorithm)] if without else [])
        return self


_ALGORITHM_OF_CODES = (
    "algorithm {algorithm} has no effect with a codec: codes are added up by the backend, or by a reduce-scatter and "
    "all-gather of their own, and only biases and norms go without one; leave it out, or the codec"
)


class AllReduce(Summing):
    """The sum of all gradients, exchanged while backward still runs."""

    kind: Literal["allreduce"] = "allreduce"
    """The exchange's name."""
    balance: bool = False
    """Whether workers of different speed take samples in proportion to what each was measured to do; in whole
    micro-batches where the model is compiled. The curve is that of the even split, up to the order of additions."""


class Outer(Section):
    """The step that follows the mean of what all workers have changed: SGD, with momentum if that is set."""

    lr: Number = Field(default=1.0, gt=0)
    """How far to go along the mean change; 1 without momentum is the mean of all workers' weights."""
    momentum: Number = Field(default=0.0, ge=0, lt=1)
    """How much of the last step goes on into the next."""
    nesterov: bool = False
    """Nesterov's momentum, which looks a step ahead."""

    @model_validator(mode="after")
    def _check(self) -> "Outer":
        refuse(
            ["nesterov has no effect without momentum: set it too, or leave nesterov out"]
            if self.nesterov and not self.momentum
            else []
        )
        return self


class Local(Summing):
    """Every worker updates weights of its own, and now and then all agree: local SGD (Stich 2018, arXiv 1805.09767),
    and with an outer step that has momentum DiLoCo (Douillard et al. 2023, arXiv 2311.08105)."""

    kind: Literal["local"]
    """The exchange's name."""
    every: Count = 16
    """Steps from one exchange to the next."""
    outer: Outer = Outer()
    """How the weights that all agree on move by the mean of what the workers have changed. Default: all the way, which
    is the mean of their weights. DiLoCo: {lr: 0.7, momentum: 0.9, nesterov: true}, for long runs; for short ones less
    momentum (0.4)."""
    overlap: CountOrZero = 0
    """Steps during which an exchange travels while workers go on (as in Douillard et al. 2025, arXiv 2501.18512); a
    fixed number, so that the curve does not depend on the network. 0: they wait."""

    @model_validator(mode="after")
    def _check(self) -> "Local":
        late = self.overlap > self.every
        refuse([f"overlap must be at most every ({self.every}): one exchange at a time"] if late else [])
        return self


AnyExchange = AllReduce | Local | Server
Exchange = Annotated[
    Annotated[AllReduce, Tag("allreduce")] | Annotated[Local, Tag("local")] | Annotated[Server, Tag("server")],
    choice("kind", default="allreduce"),
]


def is_balanced(job: "Job") -> bool:
    """Whether a worker takes as much of a batch as it can do in the time of the others."""
    return isinstance(job.exchange, AllReduce) and job.exchange.balance
