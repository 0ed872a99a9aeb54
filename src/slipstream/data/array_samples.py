"""Samples from two arrays: a pair of .npy files, or MNIST's."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.data.arrays import load_array
from slipstream.data.checks import existing_file
from slipstream.data.files import stamps
from slipstream.data.holding import Numbers, Samples
from slipstream.data.images import read_mnist
from slipstream.job.data import MnistData


class ArraySamples:
    """A row of inputs and its target are a sample."""

    costly = False

    def __init__(self, inputs: np.ndarray, targets: np.ndarray, holds: Samples, identity: dict[str, Any]) -> None:
        self._inputs, self._targets = inputs, targets
        self.holds, self.identity = holds, identity

    def __len__(self) -> int:
        return len(self._inputs)

    def reader(self, numbers: np.ndarray) -> Callable[[], np.ndarray]:
        return partial(self._read, numbers)

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        items = np.empty(len(numbers), self.holds.dtype)
        items["inputs"] = self._inputs[numbers]
        items["target"] = self._targets[numbers]
        return items


def npy_samples(source: str, target: str) -> ArraySamples:
    """Of two .npy files with as many rows. Raises ValueError."""
    paths = existing_file(source, "SOURCE"), existing_file(target, "--targets")
    inputs, targets = load_array(paths[0], "SOURCE"), load_array(paths[1], "--targets")
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets) or not len(inputs):
        shapes = [" × ".join(map(str, array.shape)) or "one number" for array in (inputs, targets)]
        raise ValueError(
            f"{source} holds {shapes[0]} and {target} {shapes[1]}: the first dimension of both must be the samples, "
            "at least one"
        )
    inputs = inputs[:, None] if inputs.ndim == 1 else inputs
    targets, outputs = _targets(targets, target)
    holds = Samples(_inputs(inputs), Numbers(_target_type(targets), targets.shape[1:]), outputs)
    return ArraySamples(inputs, targets, holds, _identity(*paths))


def mnist_samples(folder: str) -> ArraySamples:
    """Of MNIST's IDX files: bytes, which a model gets as numbers from 0 (black) to 1."""
    pixels, classes, paths = read_mnist(MnistData(source="mnist", path=folder))
    images, labels = pixels[:, None], classes.astype(np.int64)
    outputs = int(labels.max()) + 1
    holds = Samples(Numbers("|u1", images.shape[1:]), Numbers("<i8", ()), outputs, white=255)
    return ArraySamples(images, labels, holds, _identity(*paths))


def _inputs(inputs: np.ndarray) -> Numbers:
    """Types as wide as what a model is given, or narrower, stay as they are."""
    return Numbers("<f4" if inputs.dtype.itemsize > 4 else inputs.dtype.newbyteorder("<").str, inputs.shape[1:])


def _targets(targets: np.ndarray, name: str) -> tuple[np.ndarray, int]:
    """One integer for each sample is its class; all else is numbers to predict."""
    if targets.dtype.kind == "f" or targets.size != len(targets):
        numbers = targets[:, None] if targets.ndim == 1 else targets
        return numbers, math.prod(numbers.shape[1:])
    classes = targets.reshape(-1)
    if classes.min() < 0:
        row = int(np.argmin(classes))
        raise ValueError(
            f"--targets: {name} is {classes[row]} in row {row + 1:,}; classes are whole numbers from 0, and numbers to "
            "predict must be floating-point"
        )
    return classes, int(classes.max()) + 1


def _target_type(targets: np.ndarray) -> str:
    return "<f4" if targets.ndim > 1 else "<i8"


def _identity(*paths: Path) -> dict[str, Any]:
    return {"files": stamps(list(paths))}
