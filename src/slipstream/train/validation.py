"""Judging on held-out samples: the same figure on any number of workers."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from slipstream.data.base import Batch
from slipstream.job import Job
from slipstream.plan import Plan
from slipstream.train import tasks
from slipstream.train.precision import autocast
from slipstream.train.world import World

Fetch = Callable[[np.ndarray], Batch]
"""Fetches held-out samples by their numbers, ready for the model."""


def judge(
    model: nn.Module, fetch: Fetch, samples: np.ndarray, job: Job, plan: Plan, world: World, beat: Callable[[], None]
) -> dict[str, float]:
    """Loss, and accuracy where the task has one, over these samples; each worker takes a part."""
    sums = torch.zeros(3, dtype=torch.float64)
    mine = plan.layout.share(world.rank, 0, len(samples))
    at_once = max(1, (job.train.evaluate.batch or job.train.batch) // world.size)
    model.eval()
    with torch.no_grad():
        for first in range(mine.start, mine.stop, at_once):
            batch = fetch(samples[first : min(first + at_once, mine.stop)])
            inputs, targets = batch.inputs.to(world.device), batch.targets.to(world.device)
            with autocast(plan):
                outputs = model(inputs)
            right = tasks.count_right(outputs, targets) if tasks.has_accuracy(job.task) else 0
            sums += torch.tensor(
                [float(tasks.loss_sum(job.task, outputs, targets)), tasks.weight(job.task, targets), right],
                dtype=torch.float64,
            )
            beat()
    model.train()
    loss, weight, right_answers = world.sum(sums).tolist()
    judged = {"val_loss": loss / max(1, weight)}
    if tasks.has_accuracy(job.task):
        judged["val_accuracy"] = right_answers / max(1, weight)
    return judged
