"""Writing checkpoints beside training, by torch's distributed checkpoint (DCP), and restoring them on any layout."""

import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slipstream.runs.checkpoints import Progress, describe, prune, seal
from slipstream.train.exchange.local import Local
from slipstream.train.mirror import Mirror
from slipstream.train.own import OWN, load_own, written
from slipstream.train.parallel.parts import Box
from slipstream.train.parallel.split import SplitModel
from slipstream.train.unsent import share_out_unsent, unsent_boxes
from slipstream.train.world import World

_FILES = 4
"""That a worker with a GPU writes at once: one alone takes half a minute for a billion parameters and their state."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Those before it are untouched."""


def _dcp() -> ModuleType:
    """Loaded when the first checkpoint is written or read: it would add half a second to every start."""
    import torch.distributed.checkpoint as dcp

    return dcp


def load(path: Path, model: SplitModel, optimizer: Optimizer, at_home: torch.device, alone: bool) -> None:
    """Restore weights and optimiser state in place; any layout may read what any other has written.

    `at_home` is where state as large as its weight lives.
    """
    dcp = _dcp()
    reader = dcp.FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    state = _weights(model)
    sizes = {key.removeprefix(OWN): tuple(saved[key].size)[key.startswith(OWN) :] for key in saved}
    for part in model.parts:
        for key in (key for key in sizes if key.startswith(f"optimizer/{part.name}/")):
            slot = key.rpartition("/")[2]
            # Also its count of steps: torch's fused optimisers want that beside the weight.
            whole = sizes[key] == part.shape and bool(part.shape)
            kind = saved[key if key in saved else OWN + key].properties.dtype
            if whole:  # it lies in memory as its weight does
                pinned = at_home != part.weight.device
                tensor = torch.empty_like(part.weight, dtype=kind, device=at_home, pin_memory=pinned)
            else:
                tensor = torch.empty(sizes[key], dtype=kind, device=part.weight.device)
            optimizer.state[part.weight][slot] = tensor
            state[key] = Box.of(tensor, part.shape, part.offset) if whole else tensor
    shared = {key: value for key, value in state.items() if key in saved or OWN + key not in saved}
    shared |= {key: box for key, box in unsent_boxes(model).items() if key in saved and saved[key].size == box.size()}
    dcp.load(shared, storage_reader=reader, no_dist=alone)
    if any(key.startswith(OWN) for key in saved):
        load_own(path, state, model, saved)
    elif isinstance(model.exchange, Local):
        model.exchange.begin_anew()
    share_out_unsent(path, model, saved)
    model.share_parts()


def load_plain(path: Path, model: nn.Module) -> None:
    """Restore the weights of a whole model on one worker, whatever layout has written them."""
    dcp = _dcp()
    names = dict(model.named_parameters()) | {
        name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()
    }
    state = {f"model/{name}": tensor.detach() for name, tensor in names.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def _weights(model: SplitModel) -> dict[str, Any]:
    parts = {f"model/{part.name}": Box.of(part.weight.detach(), part.shape, part.offset) for part in model.parts}
    return {**parts, **{f"model/{name}": buffer for name, buffer in model.buffers().items()}}


def _state(model: SplitModel, optimizer: Optimizer) -> dict[str, Any]:
    """All tensors of a run under flat names, pieces as boxes of the whole."""
    state = _weights(model)
    for part in model.parts:
        for slot, tensor in optimizer.state.get(part.weight, {}).items():
            if tensor is not None:
                whole = tensor.shape == part.weight.shape and bool(part.shape)
                state[f"optimizer/{part.name}/{slot}"] = Box.of(tensor, part.shape, part.offset) if whole else tensor
    return written(state, model) | unsent_boxes(model)


class Checkpointer:
    """Writes checkpoints in a thread of its own, one at a time, and keeps the newest few; or none at all."""

    def __init__(self, folder: Path, keep: int, world: World, writes: bool = True) -> None:
        self._folder, self._keep, self._world, self._writes = folder, keep, world, writes
        self._files = _FILES if world.device.type == "cuda" else 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._mirror = Mirror(world.device)

    def prepare(self, model: SplitModel, optimizer: Optimizer) -> None:
        """Make room for copies of the state, while training goes on."""
        if not self._writes:
            return
        self._pending = self._thread.submit(self._mirror.prepare, _state(model, optimizer), pause=0.02)

    def save(self, progress: Progress, model: SplitModel, optimizer: Optimizer) -> None:
        """Copy the state, which takes a moment, and write the copy while training goes on."""
        if not self._writes:
            return
        self.wait()
        copies = self._mirror.copy(_state(model, optimizer))
        self._pending = self._thread.submit(self._write, progress, copies)

    def hold(self) -> None:
        """Called before weights change: what is being copied stays as it is until it is copied."""
        self._mirror.hold()

    def check(self) -> None:
        """Raise if the write in the background has failed."""
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when the last checkpoint is whole; raise if it failed."""
        if self._pending is None:
            return
        try:
            self._pending.result()
        except BaseException as error:  # DCP's CheckpointException is no Exception
            raise CheckpointError(_explain(error, self._folder)) from error
        finally:
            self._pending = None

    def close(self) -> None:
        """Finish writing."""
        self.wait()
        self._thread.shutdown()
        self._mirror.close()

    def _write(self, progress: Progress, state: dict[str, Any]) -> None:
        self._mirror.wait()
        dcp = _dcp()
        path = self._folder / f"step-{progress.step:08d}"
        if self._world.rank == 0 and path.exists():
            shutil.rmtree(path)  # the unfinished work of an earlier launch
        self._world.wait_for_all(self._world.checkpoint_group)  # nobody writes into what is being removed
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(path, overwrite=True, thread_count=self._files),
            process_group=self._world.checkpoint_group,
            no_dist=self._world.size == 1,
        )
        # Each worker describes what it has written itself: the others may not see it, if they share no disk.
        found = self._world.gather(describe(path, f"__{self._world.rank}_*"), self._world.checkpoint_group)
        if self._world.rank == 0:
            files = describe(path, ".metadata")
            for some in found:
                files |= some
            seal(path, progress, files)
            prune(self._folder, self._keep)


def _explain(error: BaseException, folder: Path) -> str:
    """The first cause, in a sentence: DCP wraps the failures of all workers, and torch's writer hides the disk's."""
    causes = list(getattr(error, "failures", {}).values())
    cause = causes[0][0] if causes else error
    trouble = None if isinstance(cause, OSError) else _disk_trouble(folder)
    return f"the checkpoint could not be written to {folder}: {trouble or f'{type(cause).__name__}: {cause}'}"


def _disk_trouble(folder: Path) -> OSError | None:
    """Why nothing can be written here, if so."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            probe.write(bytes(2**17))
            probe.flush()
    except OSError as error:
        return error
    return None
