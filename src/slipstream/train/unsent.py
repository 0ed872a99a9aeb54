"""What codes have left out so far, in a checkpoint.

Each worker has its own: `exchange/<parameter>/memory` is all of them, [workers, …], of which a worker writes its row.
On as many workers each reads its row again; on any other number the sum of all is shared out evenly, and goes into the
next sum of gradients as it would have. `exchange/<parameter>/change` is the same of changes of weights: where those are
not exchanged, it changes them at once.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.train.exchange.base import Kept
from slipstream.train.parallel.parts import Box, Summed
from slipstream.train.parallel.split import SplitModel


def unsent_boxes(model: SplitModel) -> dict[str, Tensor]:
    """What the exchange keeps, under flat names."""
    summed = {each.parameter: each for each in model.summed()}
    return dict(_box(kept, summed[kept.parameter]) for kept in model.exchange.kept())


def _box(kept: Kept, of: Summed) -> tuple[str, Box]:
    if kept.slot != "basis":
        return _key(of, kept.slot), Box.of(
            kept.tensor[None], (of.workers, *of.shape), (of.first + kept.worker, *of.offset)
        )
    # Directions belong to a matrix as it is cut here; on another layout they begin anew where they are not found.
    where = "-".join(map(str, (of.first, *of.offset)))
    return f"exchange/{of.name}/basis-{where}", Box.of(kept.tensor, kept.tensor.shape, [0] * kept.tensor.dim())


def _key(of: Summed, slot: str) -> str:
    return f"exchange/{of.name}/{slot}"


def share_out_unsent(path: Path, model: SplitModel, saved: dict[str, Any]) -> None:
    """What another number of workers had not sent yet."""
    memories = {kept.parameter: kept.tensor for kept in model.exchange.kept() if kept.slot != "basis"}
    for slot in ("memory", "change"):
        for each in (each for each in model.summed() if (key := _key(each, slot)) in saved):
            workers = int(saved[key].size[0])
            if each.parameter in memories and workers == each.workers:  # it is here already
                continue
            share = torch.zeros_like(each.parameter.detach())
            for worker in range(workers):
                share += _row(path, each, worker, key, saved[key])
            share /= each.workers
            if each.parameter in memories:
                memories[each.parameter].copy_(share)
            elif slot == "change":
                each.parameter.detach().sub_(share)
            else:  # backward adds to it
                each.parameter.grad = share


def _row(path: Path, each: Summed, worker: int, key: str, saved: Any) -> Tensor:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    row = each.parameter.detach().new_empty((1, *each.parameter.shape))
    box = Box.of(row, tuple(saved.size), (worker, *each.offset))
    load({key: box}, storage_reader=FileSystemReader(path), no_dist=True)
    return row[0]
