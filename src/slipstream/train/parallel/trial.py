"""A trial of a split that we do not know to be right: what the user describes, or a model carries, must give what the
whole model gives."""

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.data.base import Dataset
from slipstream.job import Job
from slipstream.job.models import HuggingFaceModel, ImportModel
from slipstream.job.train import SHORT
from slipstream.plan import Plan
from slipstream.train.batches import as_model_takes
from slipstream.train.parallel.split import SplitModel
from slipstream.train.precision import autocast, weight_dtype

_TOLERANCE = {"fp64": 1e-6, "fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 2e-2} | dict.fromkeys(SHORT, 5e-2)
"""How far outputs may be apart, as a part of the largest."""


class Trial:
    """Two samples through the whole model, and later through its parts."""

    def __init__(self, model: nn.Module, job: Job, plan: Plan, dataset: Dataset, device: torch.device) -> None:
        self._job, self._plan, self._expected = job, plan, None
        split = plan.layout.tensor > 1 or plan.layout.pipeline > 1
        if not split or not isinstance(job.model, ImportModel | HuggingFaceModel):
            return
        inputs = dataset.fetch(np.array([0, min(1, len(dataset) - 1)])).inputs.to(device)
        self._inputs = as_model_takes(inputs, job, dataset.facts.white, weight_dtype(plan))
        first, second = self._forward(model), self._forward(model)
        if torch.equal(first, second):  # a model that draws random numbers even here cannot be compared
            self._expected = first

    def compare(self, split: SplitModel) -> None:
        """Raise ValueError if the parts do not give what the whole gave. All workers take part."""
        if self._expected is None:
            return
        where = "model.split" if isinstance(self._job.model, ImportModel) else "layout.tensor"
        try:
            with split.judging(), autocast(self._plan):
                outputs = split.forward(self._inputs, torch.zeros(len(self._inputs), dtype=torch.int64))
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"{where}: split over {self._plan.layout}, the model cannot be run: {error}") from error
        if outputs is None:
            return
        off = self._off(outputs)
        if not off <= _TOLERANCE[self._plan.precision]:
            raise ValueError(
                f"{where}: split over {self._plan.layout}, the model gives other outputs than whole (off by {off:.1e} "
                "of the largest); does its forward do more than pass through the named modules in their order?"
            )

    def _off(self, outputs: Tensor) -> float:
        assert self._expected is not None, "there is something to compare with"
        if outputs.shape != self._expected.shape:
            return float("inf")
        largest = float(self._expected.abs().max()) or 1.0
        return float((outputs - self._expected).abs().max()) / largest

    def _forward(self, model: nn.Module) -> Tensor:
        training = model.training
        model.eval()
        with torch.no_grad(), autocast(self._plan):
            outputs: Tensor = model(self._inputs)
        model.train(training)
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
