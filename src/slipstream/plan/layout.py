"""The layout: how the work of one step is split over workers, as five numbers and a few choices."""

from math import prod
from typing import Any, Literal, NamedTuple

from slipstream.job.base import Section


class Place(NamedTuple):
    """Where a worker stands on each axis, from the outermost to the innermost: those that talk most are neighbours."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


AXES = Place._fields
SPOKEN = ("replicate", "shard", "tensor", "pipeline", "context")
"""The order in which people say them."""


class Layout(Section):
    """How the work is split."""

    replicate: int = 1
    """Groups of workers that each hold the whole model."""
    shard: int = 1
    """Workers that share out one replica's weights, gradients and optimiser state."""
    tensor: int = 1
    """Workers that share out every layer."""
    pipeline: int = 1
    """Stages that the layers are cut into."""
    context: int = 1
    """Workers that share out every sequence."""
    micro_batch: int
    """Samples a worker takes through the model at once."""
    sharded: Literal["parameters", "gradients", "optimizer"] = "parameters"
    """What `shard` shares out."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """The order in which a pipeline's stages work."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again."""
    offload: Literal["none", "optimizer"] = "none"
    """What lives in main memory."""

    @property
    def sizes(self) -> Place:
        """How many workers stand along each axis."""
        return Place(*(getattr(self, axis) for axis in AXES))

    @property
    def workers(self) -> int:
        """Processes that run this layout."""
        return prod(self.sizes)

    @property
    def data(self) -> int:
        """Groups of workers that take different samples."""
        return self.replicate * self.shard

    @property
    def shares_weights(self) -> bool:
        """Whether no worker has whole gradients: sums of them are left to whoever shares them out."""
        return self.shard > 1 and self.sharded != "optimizer"

    @property
    def stages(self) -> int:
        """Pieces of the model in a row; two to a worker where the schedule interleaves them."""
        return self.pipeline * (2 if self.schedule in ("interleaved", "zero-bubble") and self.pipeline > 1 else 1)

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        found = []
        for size in reversed(self.sizes):
            rank, index = divmod(rank, size)
            found.append(index)
        return Place(*reversed(found))

    def rank(self, place: Place) -> int:
        """Who stands there."""
        rank = 0
        for size, index in zip(self.sizes, place, strict=True):
            rank = rank * size + index
        return rank

    def share(self, rank: int, start: int, size: int) -> range:
        """The positions of a batch that a worker takes: consecutive, and as even as can be."""
        place = self.place(rank)
        index = place.replicate * self.shard + place.shard
        even, left = divmod(size, self.data)
        first = start + index * even + min(index, left)
        return range(first, first + even + (index < left))

    @property
    def choices(self) -> dict[str, Any]:
        """As a job writes it: what would have no effect is left out."""
        without = {"sharded"} if self.shard == 1 else set()
        return self.model_dump(mode="json", exclude=without | ({"schedule"} if self.pipeline == 1 else set()))

    @property
    def written(self) -> str:
        """As `--layout` takes it."""
        axes = [f"{axis}={size}" for axis in SPOKEN if (size := getattr(self, axis)) > 1]
        choices = [f"micro_batch={self.micro_batch}"]
        if self.shard > 1 and self.sharded != "parameters":
            choices.append(f"sharded={self.sharded}")
        if self.pipeline > 1 and self.schedule != "1f1b":
            choices.append(f"schedule={self.schedule}")
        choices += [f"{name}={value}" for name in ("recompute", "offload") if (value := getattr(self, name)) != "none"]
        return ",".join([*(axes or ["replicate=1"]), *choices])

    def __str__(self) -> str:
        axes = " × ".join(f"{axis} {size}" for axis in SPOKEN if (size := getattr(self, axis)) > 1)
        choices = [f"micro-batch {self.micro_batch}"]
        if self.shard > 1 and self.sharded != "parameters":
            choices.append(f"sharded {self.sharded}")
        if self.pipeline > 1:
            choices.append(self.schedule)
        if self.recompute != "none":
            choices.append(f"recompute {self.recompute}")
        if self.offload != "none":
            choices.append(f"offload {self.offload}")
        return ", ".join([axes or "one worker", *choices])
