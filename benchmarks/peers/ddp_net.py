"""torch's DDP on the model, data and optimiser of a job: `ddp_net.py RUN RANK SIZE SCRATCH HOOK`, for each rank.

Samples, their order, first weights and rates are those of our own loop. What it finds goes into the run's files, as
ours does, so that both are read alike.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from slipstream.data import open_dataset
from slipstream.fleet.scratch import Scratch
from slipstream.job import load_job
from slipstream.plan import Plan
from slipstream.runs import Pulse, RunFolder, append_line
from slipstream.train.batches import Batches
from slipstream.train.models import build_model
from slipstream.train.optim import build_optimizer, step
from slipstream.train.optim.schedules import rate
from slipstream.train.optim.trust import plain_norm

POWERSGD: dict[str, Any] = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
"""As soon as it can begin: by default after 1,000 steps, of which such a run has fewer."""


def add_hook(model: Any, hook: str) -> None:
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        model.register_comm_hook(PowerSGDState(None, **POWERSGD), powerSGD_hook)


def mean_loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(inputs.long(), targets.long()) / targets.numel()
    return loss


@torch.no_grad()
def judge(model: Any, batches: Batches, rank: int, size: int) -> float:
    """On the samples on which our own loop judges; each worker takes a part."""
    samples = batches.held_out_samples(everything=False)
    mine = batches.fetch_held_out(samples[rank * len(samples) // size : (rank + 1) * len(samples) // size])
    model.eval()
    sums = torch.tensor([float(mean_loss(model, mine.inputs, mine.targets)) * len(mine.inputs), len(mine.inputs)])
    model.train()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def main() -> None:
    run, rank, size, scratch = RunFolder(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Scratch(Path(sys.argv[4]))
    job, plan = load_job(run.job), Plan.model_validate(yaml.safe_load(run.plan.read_text()))
    torch.set_num_threads(plan.threads)
    dist.init_process_group("gloo", init_method=scratch.rendezvous, rank=rank, world_size=size)
    dataset = open_dataset(job)
    batches = Batches(job, plan, dataset, rank)
    torch.manual_seed(job.seed)
    # PowerSGD's sums of several buckets begin in an order of their own on each host, which gloo does not forgive.
    megabytes = 1000 if sys.argv[5] == "powersgd" else None
    model = DistributedDataParallel(build_model(job, dataset.facts), bucket_cap_mb=megabytes)
    add_hook(model, sys.argv[5])
    optimizer = build_optimizer(job.train.optimizer, list(model.parameters()), plain_norm)
    if rank == 0:
        run.event("build")
    for number, share in enumerate(batches.from_sample(0, Pulse(scratch.pulse, rank)), 1):
        (micro,) = share.micro_batches
        loss = mean_loss(model, micro.inputs, micro.targets)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = job.train.optimizer.lr * rate(job.train.schedule, share.start, share.size, share.total)
        step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        line: dict[str, Any] = {"step": number, "loss": loss.item()}
        if batches.timeline.is_due(job.train.evaluate.every, number):
            line["val_loss"] = judge(model.module, batches, rank, size)
        if rank == 0:
            append_line(run.metrics, line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
