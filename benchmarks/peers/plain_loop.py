"""A plain PyTorch loop with DDP, as a careful engineer writes it by hand."""

import torch
import torch.distributed as dist
from recipe import RANK, WORKERS, Stopwatch, mean_loss, read_recipe
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    if WORKERS > 1:
        dist.init_process_group("gloo")
    recipe, watch = read_recipe(), Stopwatch()
    model: nn.Module = DistributedDataParallel(recipe.model) if WORKERS > 1 else recipe.model
    optimizer = recipe.adamw()
    order = torch.randperm(len(recipe.data), generator=torch.Generator().manual_seed(0))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        first = (step * WORKERS + RANK) * recipe.batch
        pairs = [recipe.data[int(order[place % len(order)])] for place in range(first, first + recipe.batch)]
        inputs, targets = zip(*pairs, strict=True)
        return torch.stack(inputs), torch.stack(targets)

    for step in range(recipe.steps):
        inputs, targets = batch(step)
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        watch.lap(loss.detach())
    watch.write()
    if WORKERS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
