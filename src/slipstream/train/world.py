"""The workers of a run, as one of them sees it."""

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Seat:
    """One worker's place, as the fleet assigns it."""

    rank: int
    size: int
    rendezvous: str
    """Where the workers meet: `file:///…` on one machine, `tcp://host:port` across several."""


class Underway:
    """A sum over all workers that nobody waits for yet."""

    def __init__(self, values: Tensor, group: dist.ProcessGroup, beside: "torch.cuda.Stream | None") -> None:
        self._work, self._values = dist.all_reduce(values, group=group, async_op=True), values
        self._read: torch.cuda.Event | None = None
        if beside:  # what the device does next must not wait for it
            with torch.cuda.stream(beside):
                self._work.wait()
                self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
                self._read = beside.record_event()
            values.record_stream(beside)

    def wait(self) -> list[float]:
        """The sum, when it is here."""
        if self._read:
            self._read.synchronize()
        else:
            self._work.wait()
        numbers: list[float] = self._values.tolist()
        return numbers


class World:
    """This worker among all of them. A single worker needs no process group and has none."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        self.rank, self.size, self.device = seat.rank, seat.size, device
        self.checkpoint_group: dist.ProcessGroup | None = None
        self._late_group: dist.ProcessGroup | None = None
        self._beside: torch.cuda.Stream | None = None

    @classmethod
    def of_one(cls, device: torch.device) -> "World":
        """A worker that knows of no other."""
        return cls(Seat(0, 1, ""), device)

    @classmethod
    def join(cls, seat: Seat, device_kind: str) -> "World":
        """Meet the others."""
        device = device_of(seat.rank, device_kind)
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

    def start_sum(self, values: Tensor) -> Underway:
        """Begin to sum over all workers, in place, where there are several; beside whatever else is exchanged."""
        if self._late_group is None:  # all come here at the same step
            self._late_group = dist.new_group()
            self._beside = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        assert self._late_group is not None, "this worker is in it"
        return Underway(values, self._late_group, self._beside)

    def tell(self, value: T) -> T:
        """What the first worker says."""
        if self.size == 1:
            return value
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """What every worker says, on the first; nothing on the others."""
        if self.size == 1:
            return [value]
        found: list[T] | None = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=0, group=group)
        return found or []

    def wait_for_all(self, group: dist.ProcessGroup | None = None) -> None:
        """Return when every worker has come here."""
        if self.size > 1:
            dist.barrier(group)

    def leave(self) -> None:
        """Part from the others."""
        if self.size > 1:
            dist.destroy_process_group()


def device_of(rank: int, kind: str) -> torch.device:
    """The device of a worker, from now on its own."""
    if kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
