"""Precision: in what arithmetic forward and backward run, and the loss scale that fp16 needs."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from slipstream.job import Job
from slipstream.job.train import SHORT
from slipstream.plan import Plan

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16} | dict.fromkeys(SHORT, torch.bfloat16)


def autocast(plan: Plan) -> AbstractContextManager[object]:
    """The context in which the model runs."""
    if plan.precision in _LOW:
        return torch.autocast(plan.device, dtype=_LOW[plan.precision])
    return nullcontext()


def compute_dtype(plan: Plan) -> torch.dtype:
    """What most of forward and backward is in."""
    return _LOW.get(plan.precision, weight_dtype(plan))


def weight_dtype(plan: Plan) -> torch.dtype:
    """Weights and optimiser state are fp32; fp64 is for checking."""
    return torch.float64 if plan.precision == "fp64" else torch.float32


def set_arithmetic(job: Job, plan: Plan) -> None:
    """Let fp32 matrix products use tf32, or not; and sums be taken in any order, or not."""
    if job.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its sums depend on what memory is free
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for finding bugs
    if job.train.deterministic != torch.are_deterministic_algorithms_enabled():  # it imports the compiler: a second
        torch.use_deterministic_algorithms(job.train.deterministic)
    torch.set_float32_matmul_precision("high" if plan.precision == "tf32" or plan.precision in _LOW else "highest")
    torch.backends.cudnn.allow_tf32 = plan.precision == "tf32"


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2017, arXiv 1710.03740).

    fp16 gradients underflow; so the loss is multiplied by as large a number as does not overflow. A step whose
    gradients overflowed is skipped and the scale halved; after a long while without one it is doubled.
    """

    PATIENCE = 2000
    LARGEST = 2.0**24

    def __init__(self, active: bool) -> None:
        self.active = active
        self.value = 2.0**16 if active else 1.0
        self.good_steps = 0

    def record(self, overflowed: bool) -> None:
        """Learn from one step."""
        if not self.active:
            return
        if overflowed:
            self.value, self.good_steps = max(1.0, self.value / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == self.PATIENCE:
            self.value, self.good_steps = min(self.LARGEST, self.value * 2), 0
