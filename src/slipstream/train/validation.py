"""Judging on held-out samples: the same figure on any number of workers."""

import math
from collections.abc import Callable

import numpy as np
import torch

from slipstream.train import tasks
from slipstream.train.batches import Batches
from slipstream.train.worker import Worker


def judge(worker: Worker, batches: Batches, samples: np.ndarray, beat: Callable[[], None]) -> dict[str, float] | None:
    """Loss, and accuracy where the task has one, over these samples; each worker takes a part. None where one could not
    have its part."""
    job, world, model = worker.job, worker.world, worker.model
    sums = torch.zeros(3, dtype=torch.float64)
    mine = model.layout.share(world.rank, 0, len(samples))
    at_once = max(1, (job.train.evaluate.batch or job.train.batch) // model.layout.data)
    # Workers that sum together must go round equally often.
    rounds = math.ceil(math.ceil(len(samples) / model.layout.data) / at_once)
    with model.judging():
        for first in range(mine.start, mine.start + rounds * at_once, at_once):
            numbers = samples[first : min(first + at_once, mine.stop)]
            batch = batches.fetch_held_out(numbers if len(numbers) else samples[:1])
            inputs, targets = (worker.here(model.own_tokens(part)) for part in (batch.inputs, batch.targets))
            judged = worker.judge(inputs, targets, None if batch.begins is None else worker.here(batch.begins))
            if judged is not None and model.counts and len(numbers):
                loss, right = judged
                sums += torch.tensor([loss, tasks.weight(job.task, targets), right], dtype=torch.float64)
            beat()
    without = torch.tensor([float(batches.lost is not None)], dtype=torch.float64)
    loss, weight, right_answers, lost = world.sum(torch.cat((sums, without))).tolist()
    if lost:
        return None
    figures = {"val_loss": loss / max(1, weight)}
    if tasks.has_accuracy(job.task):
        figures["val_accuracy"] = right_answers / max(1, weight)
    return figures
