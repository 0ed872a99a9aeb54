"""The shortest torch program for each axis of a layout: `hand_written.py JOB TIMES AXIS`, in two processes."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from recipe import RANK, WORKERS, Recipe, Stopwatch, mean_loss, read_recipe
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[Tensor, Tensor], Tensor]
"""Forward and backward of a batch; its loss."""


def plain_step(model: nn.Module) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        return loss.detach()

    return step


def replicate(model: Any) -> tuple[nn.Module, Step]:
    wrapped = DistributedDataParallel(model)
    return wrapped, plain_step(wrapped)


def shard(model: Any) -> tuple[nn.Module, Step]:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model), plain_step(model)


def tensor(model: Any) -> tuple[nn.Module, Step]:
    enter = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "embed.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": enter,
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.feed_forward_norm": SequenceParallel(),
        "blocks.*.feed_forward": enter,
        "blocks.*.feed_forward.gate": ColwiseParallel(),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (WORKERS,)), plan)
    model.head.weight = model.embed.tokens.weight
    return model, plain_step(model)


def pipeline(model: Any) -> tuple[nn.Module, Step]:
    middle = len(model.blocks) // 2
    pieces = [model.embed, *model.blocks[:middle]] if RANK == 0 else [*model.blocks[middle:], model.norm, model.head]
    own = nn.Sequential(*pieces)
    schedule = Schedule1F1B(PipelineStage(own, RANK, 2, torch.device("cpu")), 2, loss_fn=mean_loss)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if RANK == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return own, step


AXES = {"replicate": replicate, "shard": shard, "tensor": tensor, "pipeline": pipeline}


def batch(recipe: Recipe, number: int, size: int) -> tuple[Tensor, Tensor]:
    rows = [recipe.data[(number * size + place) % len(recipe.data)] for place in range(size)]
    inputs, targets = zip(*rows, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def main() -> None:
    axis = sys.argv[3]
    dist.init_process_group("gloo")
    recipe, watch = read_recipe(), Stopwatch()
    model, step = AXES[axis](recipe.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.optimizer.lr, fused=axis in ("replicate", "pipeline"))
    size = recipe.batch if axis in ("replicate", "shard") else recipe.batch * WORKERS
    for number in range(recipe.steps):
        first = number * WORKERS + RANK if axis in ("replicate", "shard") else number
        loss = step(*batch(recipe, first, size))
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.lap(loss)
    watch.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
