"""`exchange: {kind: server}`: servers hold the weights and update them by what workers send."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from slipstream.job.base import Section, refuse
from slipstream.job.units import Count, CountOrZero, Number

if TYPE_CHECKING:
    from slipstream.job.job import Job


class Server(Section):
    """Parameter servers (Li et al. 2014, OSDI): each holds some of the weights and their optimiser; workers fetch
    weights, send gradients, and may come, go and die at any time."""

    kind: Literal["server"]
    """The exchange's name."""
    servers: Count = 1
    """Over how many servers the weights are shared out, by whole tensors."""
    mode: Literal["sync", "async"] = "sync"
    """sync: an update has all parts of its batch, and the curve is that of all-reduce. async: every worker takes whole
    batches, and its gradient is an update as soon as it arrives (Dean et al. 2012, NIPS)."""
    staleness: CountOrZero | None = None
    """With async: most updates that may come between a worker's fetch of weights and the update by its gradient (Ho et
    al. 2013, NIPS); who is ahead waits. Default: any number."""
    lr: Literal["constant", "staleness"] = "constant"
    """With async: staleness divides the learning rate of an update by its staleness (Zhang et al. 2016, arXiv
    1511.05950)."""
    compensation: Number | None = Field(default=None, gt=0)
    """With async: λ of delay compensation (Zheng et al. 2017, arXiv 1609.08326), which corrects a gradient for what the
    weights have moved since: g + λ·g·g·(w − w at the fetch). Default: none."""

    algorithm: ClassVar[Literal["auto"]] = "auto"
    codec: ClassVar[None] = None

    @model_validator(mode="after")
    def _check(self) -> "Server":
        if self.mode == "sync":
            late = {"staleness": None, "lr": "constant", "compensation": None}
            without = [name for name, default in late.items() if getattr(self, name) != default]
            refuse(
                [
                    f"{name} has no effect with mode: sync, where no gradient is late; set mode: async"
                    for name in without
                ]
            )
        return self


def servers_of(job: "Job") -> int:
    """How many servers a job has beside its workers."""
    return job.exchange.servers if isinstance(job.exchange, Server) else 0
