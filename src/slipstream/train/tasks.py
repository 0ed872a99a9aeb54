"""Tasks: what is asked of the model, and how an answer is weighed.

A loss is a sum over what is predicted, never a mean: the loop divides by the weight of the whole batch, over all
micro-batches and workers, so that every token counts the same wherever it is computed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slipstream.data.base import IGNORED, Batch
from slipstream.job import Job
from slipstream.job.data import ImportData, PreparedData, TextData, TokenData
from slipstream.job.train import Classification, MaskedToken, NextToken, Regression
from slipstream.train.kernels.cross_entropy import overwriting_cross_entropy, shared_out_cross_entropy

AnyTask = NextToken | MaskedToken | Classification | Regression
LossSum = Callable[[Tensor, Tensor, Any, bool], Tensor]
_MANY = 2**22
"""Scores from which it is worth a GPU's while to save their memory: it takes a dozen kernels more."""


def _cross_entropy(outputs: Tensor, targets: Tensor, task: AnyTask, overwrite: bool) -> Tensor:
    if outputs.shape[:-1] != targets.shape:
        raise ValueError(
            f"the model's outputs have the shape {tuple(outputs.shape)}, but for targets of the shape "
            f"{tuple(targets.shape)} they must have one dimension more: a score for each class or token"
        )
    scores, targets = outputs.flatten(0, -2), targets.flatten()
    wide = scores if scores.dtype == torch.float64 else scores.float()
    label_smoothing = task.label_smoothing if isinstance(task, Classification) else 0.0
    few = wide.is_cuda and wide.numel() < _MANY
    if wide.requires_grad and not label_smoothing and not few and (overwrite or wide is not scores):
        return overwriting_cross_entropy(wide, targets)
    return F.cross_entropy(
        wide,
        targets,
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def _squared_error(outputs: Tensor, targets: Tensor, _task: AnyTask, _overwrite: bool) -> Tensor:
    if outputs.shape != targets.shape:
        raise ValueError(
            f"the model's outputs have the shape {tuple(outputs.shape)}, the targets {tuple(targets.shape)}; "
            "for regression they must be the same"
        )
    wide = outputs if outputs.dtype == torch.float64 else outputs.float()
    return F.mse_loss(wide, targets.to(wide.dtype), reduction="sum")


LOSSES: dict[type[AnyTask], LossSum] = {
    NextToken: _cross_entropy,
    MaskedToken: _cross_entropy,
    Classification: _cross_entropy,
    Regression: _squared_error,
}


def loss_sum(task: AnyTask, outputs: Tensor, targets: Tensor, overwrite: bool = False) -> Tensor:
    """The loss of some samples, summed over everything they predict. With `overwrite` it may reuse the outputs."""
    if not isinstance(outputs, Tensor):
        raise TypeError(f"the model returned a {type(outputs).__name__}; it must return one tensor of outputs")
    return LOSSES[type(task)](outputs, targets, task, overwrite)


def shared_out_loss_sum(outputs: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """The loss of tokens where this worker has the scores of some tokens alone, from number `first` on."""
    scores = outputs.flatten(0, -2)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return shared_out_cross_entropy(wide, targets.flatten(), first, group)


def weight_of_batch(job: Job, samples: int) -> float | None:
    """How much a whole batch predicts, where that follows from its size: then nobody need ask the others."""
    if isinstance(job.task, Classification) and not isinstance(job.data, ImportData):
        return float(samples)
    whole = isinstance(job.data, TokenData | PreparedData) or (isinstance(job.data, TextData) and job.data.pack)
    return float(samples * job.sequence) if whole and isinstance(job.task, NextToken) else None


def weight(task: AnyTask, targets: Tensor) -> int:
    """How many predictions the targets ask for: what a sum of losses is divided by."""
    if isinstance(task, Regression):
        return targets.numel()
    return int((targets != IGNORED).sum())


def has_accuracy(task: AnyTask) -> bool:
    """Whether a prediction is simply right or wrong."""
    return isinstance(task, Classification)


def count_right(outputs: Tensor, targets: Tensor) -> int:
    """How many predictions are right."""
    return int((outputs.argmax(-1) == targets).sum())


def hide_tokens(batch: Batch, positions: np.ndarray, job: Job, vocabulary: int, mask_id: int) -> Batch:
    """Hide tokens for masked-token training: of those chosen, 8 in 10 become the mask, 1 another token, 1 stays.

    Which ones is a function of the seed and the sample's position in the run (arXiv 1810.04805, section 3.1).
    """
    assert isinstance(job.task, MaskedToken)
    length = batch.inputs.shape[1]
    draws = np.empty((len(positions), 3, length))
    for row, position in enumerate(positions):
        draws[row] = np.random.Generator(np.random.Philox(key=[job.seed, int(position)])).random((3, length))
    chosen, fate, other = torch.from_numpy(draws).unbind(1)
    hidden = chosen < job.task.mask
    tokens, targets = batch.inputs.long(), batch.targets.long()  # those of a prepared dataset have 16 bits
    inputs = torch.where(hidden & (fate < 0.8), mask_id, tokens)
    inputs = torch.where(hidden & (fate >= 0.9), (other * vocabulary).long(), inputs)
    return Batch(inputs, torch.where(hidden, targets, IGNORED), batch.begins)
