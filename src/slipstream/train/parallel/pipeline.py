"""The pipeline axis: stages one after the other, micro-batches on their way through them, by torch's own schedules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.plan import Layout
from slipstream.train.parallel.groups import Groups

Around = Callable[[Tensor, Any], Any]
"""Makes the context in which the samples at these positions of the run go through a stage, by where their documents
begin, if that is asked for."""
_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
"""Their names in torch."""
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
_HEADER = 10


class Stage(nn.Module):
    """Some pieces of a model in a row. Every parameter keeps the name it has in the whole model."""

    def __init__(self, number: int, pieces: Sequence[tuple[str, nn.Module]], around: Around) -> None:
        super().__init__()
        self.number, self.names = number, [name for name, _ in pieces]
        self.pieces = nn.ModuleList(piece for _, piece in pieces)
        self._around = around

    def forward(self, x: Tensor, positions: Tensor, begins: Tensor | None = None) -> Tensor:
        with self._around(positions, begins):
            for piece in self.pieces:
                x = piece(x)
            return x

    def full_name(self, name: str) -> str:
        """What `named_parameters` calls `pieces.0.weight` is `head.weight` in the whole model."""
        _, number, rest = name.split(".", 2)
        return f"{self.names[int(number)]}.{rest}"


def cost(piece: nn.Module) -> float:
    """The work of a piece, in multiplications for each token: its matrices, but tables are only looked up."""
    tables = {id(weight) for part in piece.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()}
    width = sum(weight.shape[-1] for weight in piece.parameters())
    return width + sum(weight.numel() for weight in piece.parameters() if weight.dim() > 1 and id(weight) not in tables)


def own_stages(layout: Layout, index: int) -> list[int]:
    """The stages of one worker: with two to a worker, they go round the workers twice."""
    return list(range(index, layout.stages, layout.pipeline))


class Pipeline:
    """One worker's stages, and how micro-batches pass through them."""

    def __init__(self, stages: list[Stage], groups: Groups, device: torch.device) -> None:
        self.stages, self._layout, self._device = stages, groups.layout, device
        self._ranks = groups.ranks("pipeline")
        self._group = groups.along("pipeline")
        self._schedule: Any = None
        self._loss: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def holds_last(self) -> bool:
        """Whether the model's outputs come out here."""
        return self.stages[-1].number == self._layout.stages - 1

    def forward_backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        known: dict[str, Tensor],
        count: int,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> list[Tensor]:
        """Take so many micro-batches forward and backward; the loss of each, where the last stage is. `known` is what
        every stage knows of the samples."""
        self._loss = loss
        if self._schedule is None:
            self._schedule = self._make_schedule(count)
        given = (inputs,) if self.stages[0].number == 0 else ()
        losses: list[Tensor] = []
        wanted = {"target": targets, "losses": losses} if self.holds_last else {}
        self._schedule.step(*given, **wanted, **known, return_outputs=False)
        return losses

    def _make_schedule(self, count: int) -> Any:
        from torch.distributed import pipelining  # it takes a second, which other layouts need not pay
        from torch.distributed.pipelining import schedules

        stages = [
            pipelining.PipelineStage(stage, stage.number, self._layout.stages, self._device, group=self._group)
            for stage in self.stages
        ]
        # 1F1B wants at least as many micro-batches as stages; with fewer, all forwards come first anyway.
        few = self._layout.schedule == "1f1b" and count < self._layout.stages
        kind = getattr(schedules, _SCHEDULES["gpipe" if few else self._layout.schedule])
        single = self._layout.stages == self._layout.pipeline

        def call_loss(outputs: Tensor, targets: Tensor) -> Tensor:
            assert self._loss is not None, "set for this step"
            return self._loss(outputs, targets)

        return kind(stages[0] if single else stages, count, loss_fn=call_loss, scale_grads=False)

    def forward(self, inputs: Tensor, positions: Tensor, begins: Tensor | None = None) -> Tensor | None:
        """Take a batch forward alone, stage by stage; the outputs where the last stage is."""
        x: Tensor | None = None
        for number in range(self._layout.stages):
            holder = self._ranks[number % self._layout.pipeline]
            stage = next((stage for stage in self.stages if stage.number == number), None)
            if stage is None:
                continue
            if number == 0:
                x = inputs
            elif self._layout.pipeline > 1:
                x = self._receive(self._ranks[(number - 1) % self._layout.pipeline])
            assert x is not None, "the stage before gave something"
            x = stage(x, positions, begins)
            if number < self._layout.stages - 1:
                following = self._ranks[(number + 1) % self._layout.pipeline]
                assert holder != following, "neighbouring stages are on different workers"
                self._send(x, following)
        return x if self.holds_last else None

    def _send(self, x: Tensor, to: int) -> None:
        header = [_TYPES.index(x.dtype), x.dim(), *x.shape]
        dist.send(torch.tensor(header + [0] * (_HEADER - len(header)), device=self._device), to)
        dist.send(x.contiguous(), to)

    def _receive(self, source: int) -> Tensor:
        header = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
        dist.recv(header, source)
        kind, dims, *sizes = header.tolist()
        x = torch.empty(sizes[:dims], dtype=_TYPES[kind], device=self._device)
        dist.recv(x, source)
        return x
