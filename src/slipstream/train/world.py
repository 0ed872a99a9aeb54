"""The workers of a run, as one of them sees it."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Seat:
    """One worker's place, as the fleet assigns it."""

    rank: int
    size: int
    rendezvous: str
    """Where the workers meet: `file:///…` on one machine, `tcp://host:port` across several."""


class World:
    """This worker among all of them. A single worker needs no process group and has none."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        self.rank, self.size, self.device = seat.rank, seat.size, device
        self.checkpoint_group: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, seat: Seat, device_kind: str) -> "World":
        """Meet the others."""
        device = (
            torch.device("cuda", seat.rank % torch.cuda.device_count())
            if device_kind == "cuda"
            else torch.device("cpu")
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        world = cls(seat, device)
        if seat.size > 1:
            # The watchdog ends a run that hangs long before this; gloo notices a dead peer at once by itself.
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                init_method=seat.rendezvous,
                rank=seat.rank,
                world_size=seat.size,
                timeout=timedelta(hours=24),
            )
            # Checkpoints are written by a thread of their own, whose collectives must not meet those of training.
            world.checkpoint_group = dist.new_group(backend="gloo")
        return world

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all workers, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def wait_for_all(self, group: dist.ProcessGroup | None = None) -> None:
        """Return when every worker has come here."""
        if self.size > 1:
            dist.barrier(group)

    def leave(self) -> None:
        """Part from the others."""
        if self.size > 1:
            dist.destroy_process_group()
