"""Whole samples of a prepared dataset, for the task of a job."""

import math

import numpy as np

from slipstream.data.base import Batch, Facts
from slipstream.data.holding import Samples
from slipstream.data.paged import AnyShards


class PreparedSamples:
    """Sample i is item i. `where` is what the user calls the dataset."""

    def __init__(self, shards: AnyShards, holds: Samples, task: str, where: str) -> None:
        manifest = shards.manifest
        self._shards, self._regression = shards, task == "regression"
        self.facts = Facts(holds.inputs.shape, _outputs(holds, task, where), tokens=False, white=holds.white)
        self.together = manifest.page // manifest.dtype.itemsize
        """Samples of a page: those that are fetched at once."""

    def __len__(self) -> int:
        return self._shards.manifest.items

    def expect(self, indices: np.ndarray) -> None:
        """These samples will be fetched soon."""
        self._shards.expect(indices, 1)

    def fetch(self, indices: np.ndarray) -> Batch:
        import torch

        items = self._shards.rows(indices, 1)[:, 0]
        inputs, targets = items["inputs"], items["target"]
        # Copies: in an item, numbers may lie at any byte. Bytes become numbers on the device: a fourth to move.
        inputs = inputs.astype(np.uint8 if inputs.dtype == np.uint8 else np.float32)
        if self._regression:
            targets = targets.reshape(len(targets), -1).astype(np.float32)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets.copy()))


def _outputs(holds: Samples, task: str, where: str) -> int:
    if task == "regression":
        return math.prod(holds.target.shape)
    if task != "classification":
        raise ValueError(f"train.task {task} needs tokens; data.prepared {where} holds whole samples")
    if not holds.has_classes:
        raise ValueError(
            f"train.task classification needs classes, and the targets of data.prepared {where} are numbers; set "
            "train.task regression, or prepare it with targets that are integers"
        )
    return holds.outputs
