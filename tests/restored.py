"""A worker that has read a checkpoint, without the others."""

from pathlib import Path

import torch

from slipstream.data import open_dataset
from slipstream.job import Job
from slipstream.plan import make_plan, this_machine
from slipstream.train.checkpoint import load
from slipstream.train.dry_run import _alone_in
from slipstream.train.models import build_to_split
from slipstream.train.models.dropout import own_dropout
from slipstream.train.parallel.split import SplitModel
from slipstream.train.update import Update


def restored(job: Job, checkpoint: Path, workers: int, rank: int) -> tuple[SplitModel, Update]:
    """One of so many workers, once it has read a checkpoint."""
    device, facts = torch.device("cpu"), open_dataset(job).facts
    plan = make_plan(job, this_machine(), workers)
    with _alone_in(workers, rank):
        plain = build_to_split(job, facts, device, torch.float32)
        keys = own_dropout(plain, job.seed)
        model = SplitModel(plain, job, plan, rank, device, keys, keys.of)
        update = Update(job.train, model, 100, fp16=False)
        load(checkpoint, model, update.optimizer, device, alone=True)
    return model, update
