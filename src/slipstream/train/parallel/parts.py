"""What of the model a worker holds and updates, and how that makes up the whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.train.optim.trust import plain_norm
from slipstream.train.parallel.groups import Group


@dataclass(frozen=True, eq=False)
class Part:
    """One worker's piece of one parameter."""

    name: str
    """Of the parameter, in the plain model."""
    weight: nn.Parameter
    """The piece: what the optimiser updates. The parameter itself where that is not split."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...]
    """Where in it the piece begins."""
    copies: int
    """Workers of this stage that hold the very same piece."""
    stages: int
    """Stages that hold it: two for a tied weight whose ends are on different stages."""
    gradient: Callable[[], Tensor | None]
    """The piece's gradient, when all of it is there."""
    forget: Callable[[], None]
    """Forget the gradient."""


@dataclass(frozen=True, eq=False)
class Summed:
    """A parameter that workers have gradients of, each its own, which their exchange sums."""

    name: str
    """In the plain model."""
    parameter: nn.Parameter
    """Or the slice of it that tensor workers have each."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    offset: tuple[int, ...]
    """Where in it the slice begins."""
    first: int
    """How many of those workers stand before the stage of this one."""
    workers: int
    """How many they are, on both stages of a tied weight."""


class Norms:
    """Norms of whole tensors from the pieces that workers hold."""

    def __init__(self, parts: Sequence[Part], stage: Group | None, everyone: Group | None) -> None:
        self._part_of = {part.weight: part for part in parts}
        self._stage, self._everyone = stage, everyone
        holders = stage.size() if stage else 1
        self._split = any(part.copies != holders or part.stages > 1 for part in parts)
        self._several_stages = everyone is not None and everyone.size() != holders

    @property
    def needed(self) -> bool:
        """Whether a worker's own pieces do not tell the norm."""
        return self._split or self._several_stages

    def of(self, weight: Tensor, tensor: Tensor) -> Tensor:
        """The norm of a tensor shaped like the whole of a weight, of which this worker has its piece."""
        if not self._split or self._stage is None:
            return plain_norm(weight, tensor)
        square = tensor.double().square().sum() / self._part_of[weight].copies  # type: ignore[index]
        dist.all_reduce(square, group=self._stage)
        norm: Tensor = square.sqrt().to(tensor.dtype)
        return norm

    def of_all(self) -> Tensor:
        """The norm of all gradients of the model."""
        squares = []
        for weight, part in self._part_of.items():
            if weight.grad is not None:
                squares.append(weight.grad.double().square().sum() / (part.copies * part.stages))
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        device = next(iter(self._part_of)).device
        total = total.to(device)
        dist.all_reduce(total, group=self._everyone)
        return total.sqrt()


class Box(Tensor):
    """A piece of a tensor, for torch's distributed checkpoint, which writes and reads boxes of any tensor.

    It is a tensor only because that looks for its own words (`_Checkpointable`) in tensors alone.
    """

    tensor: Tensor
    _shape: torch.Size
    _offset: torch.Size

    @staticmethod
    def of(tensor: Tensor, shape: Sequence[int], offset: Sequence[int]) -> "Box":
        """The piece of a tensor of this shape that begins there."""
        box = Tensor._make_subclass(Box, tensor.detach())
        box.tensor, box._shape, box._offset = tensor.detach(), torch.Size(shape), torch.Size(offset)
        return box

    def size(self, *_: Any) -> torch.Size:  # type: ignore[override]
        """Of the whole tensor."""
        return self._shape

    @property
    def offset(self) -> torch.Size:
        """Where in it the piece begins."""
        return self._offset

    def with_tensor(self, tensor: Tensor) -> "Box":
        """The same piece, held elsewhere."""
        return Box.of(tensor, self._shape, self._offset)

    def __create_write_items__(self, fqn: str, _object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not self.tensor.numel():
            return []
        data = TensorWriteData(
            chunk=self.__create_chunk_list__()[0],
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=self._shape,
        )
        return [WriteItem(MetadataIndex(fqn, self._offset), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(self._offset, self.tensor.size())] if self.tensor.numel() else []

    def __get_tensor_shard__(self, _index: Any) -> Tensor:
        return self.tensor
