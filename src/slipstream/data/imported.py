"""The user's own map-style dataset."""

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.data.base import IGNORED, Batch, Dataset, Facts
from slipstream.data.importing import call_target, find_package
from slipstream.job import Job
from slipstream.job.data import ImportData

if TYPE_CHECKING:
    import torch

_COUNTS = ("classes", "outputs", "vocabulary")


def check_import(data: ImportData) -> None:
    find_package(data.target, "data.import")


def open_import(data: ImportData, job: Job) -> Dataset:
    samples = call_target(data.target, data.args, "data.import")
    return Imported(samples, f"data.import: {data.target}", job.task.kind)


class Imported:
    """Stacks the user's samples. `d[i]` must depend on i alone, or the loss would depend on who asks for it when."""

    def __init__(self, samples: Any, name: str, task: str) -> None:
        self._samples, self._name = samples, name
        self._tokens, self._regression = task in ("next-token", "masked-token"), task == "regression"
        for method in ("__len__", "__getitem__"):
            if not hasattr(samples, method):
                raise ValueError(f"{name}: a {type(samples).__name__} has no {method}, which a map-style dataset needs")
        if not len(samples):
            raise ValueError(f"{name}: the dataset is empty")
        inputs, target = self._sample(0)
        if self._tokens and inputs.ndim != 1:
            raise ValueError(
                f"{name}: sample 0 has inputs of shape {tuple(inputs.shape)}, but {task} takes a row of tokens"
            )
        outputs = target.numel() if self._regression else self._count(task)
        self.facts = Facts(inputs=tuple(inputs.shape), outputs=outputs, tokens=self._tokens)
        self._shapes = (inputs.shape, target.shape)

    def __len__(self) -> int:
        return len(self._samples)

    def fetch(self, indices: np.ndarray) -> Batch:
        import torch

        pairs = [self._sample(int(index)) for index in indices]
        for index, (inputs, target) in zip(indices, pairs, strict=True):
            if (shapes := (inputs.shape, target.shape)) != self._shapes:
                found, first = (" and ".join(str(tuple(shape)) for shape in pair) for pair in (shapes, self._shapes))
                raise ValueError(f"{self._name}: sample {index} has shapes {found}, but sample 0 has {first}")
        targets = torch.stack([target for _, target in pairs])
        if not self._regression:
            self._check_range(indices, targets)
        return Batch(torch.stack([inputs for inputs, _ in pairs]), targets)

    def _check_range(self, indices: np.ndarray, targets: "torch.Tensor") -> None:
        """On a GPU a class that does not exist ends the process, far from its cause."""
        bad = ((targets < 0) | (targets >= self.facts.outputs)) & (targets != IGNORED)
        if bad.any():
            sample, value = indices[int(bad.nonzero()[0, 0])], int(targets[bad][0])
            raise ValueError(
                f"{self._name}: sample {sample} has the target {value}, outside 0 to {self.facts.outputs - 1}"
            )

    def _sample(self, index: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        sample, where = self._samples[index], f"{self._name}: sample {index}"
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise ValueError(f"{where} is {_describe(sample)}; it must be a pair (inputs, target)")
        inputs = _tensor(sample[0], self._tokens, f"{where}: inputs")
        target = _tensor(sample[1], not self._regression, f"{where}: target")
        if self._tokens:
            return inputs, target
        if not self._regression and target.numel() != 1:
            raise ValueError(f"{where}: target has shape {tuple(target.shape)}; a class is one number")
        return inputs, target.reshape(-1) if self._regression else target.reshape(())

    def _count(self, task: str) -> int:
        for attribute in _COUNTS:
            value = getattr(self._samples, attribute, None)
            if isinstance(value, Sized):  # torchvision's `classes` is a list of names
                return len(value)
            if isinstance(value, (int, np.integer)):
                return int(value)
        attribute, what = ("vocabulary", "token ids") if self._tokens else ("classes", "classes")
        raise ValueError(
            f"{self._name}: {task} needs the number of {what}, and reading all samples to find it would take too long; "
            f"give the dataset an attribute `{attribute}` with that number"
        )


def _tensor(value: Any, whole: bool, where: str) -> "torch.Tensor":
    import torch

    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{where}: {_describe(value)} is not a tensor, an array or a number") from None
    if whole and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{where}: {tensor.dtype} found, but token ids and classes are whole numbers")
    return tensor.to(torch.int64 if whole else torch.float32)


def _describe(value: Any) -> str:
    length = f" of length {len(value)}" if isinstance(value, Sized) else ""
    return f"a {type(value).__name__}{length}"
