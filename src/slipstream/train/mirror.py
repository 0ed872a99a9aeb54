"""A copy of a worker's tensors in main memory, made while the GPU computes on."""

import mmap
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from slipstream.train.parallel.parts import Box

State = Mapping[str, Tensor]
"""Weights and optimiser state as boxes, which only an update changes; and small tensors, which anything may change."""


class Mirror:
    """What is on a GPU is copied to the same memory each time, which is pinned: the GPU writes there by itself."""

    def __init__(self, device: torch.device) -> None:
        self._own_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._arrived: torch.cuda.Event | None = None
        self._pinned: dict[str, Tensor] = {}

    def prepare(self, state: State, pause: float = 0.0) -> None:
        """Have the memory at hand: it takes the system seconds to give so much of it. The driver launches nothing while
        it pins; so pages are made before, and there is a pause after each tensor."""
        for key, value in state.items():
            if isinstance(value, Box) and value.tensor.is_cuda and key not in self._pinned:
                self._pinned[key] = _pinned_like(value.tensor)
                time.sleep(pause)

    def copy(self, state: State) -> dict[str, Any]:
        """Copies of these tensors. Boxes of a GPU are complete once `wait` returns."""
        self.prepare(state)
        copies: dict[str, Any] = {key: self._copy_now(value) for key, value in state.items() if key not in self._pinned}
        if self._own_stream:
            self._own_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._own_stream):
                for key in state.keys() & self._pinned.keys():  # some are not there each time
                    box, memory = state[key], self._pinned[key]
                    assert isinstance(box, Box), "nothing else is pinned"
                    copies[key] = box.with_tensor(memory.copy_(box.tensor, non_blocking=True))
                self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._arrived.record()
        return copies

    def hold(self) -> None:
        """Let what the GPU is told from now on begin after the copies are made."""
        if self._arrived:
            self._arrived.wait()

    def wait(self) -> None:
        """Return when the copies are made."""
        if self._arrived:
            self._arrived.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        for memory in self._pinned.values():
            _cuda().cudaHostUnregister(memory.data_ptr())
        self._pinned.clear()

    def __del__(self) -> None:
        self.close()  # also where a run was left in the middle: pinned memory must not be freed as it is

    @staticmethod
    def _copy_now(value: Tensor) -> Tensor:
        if isinstance(value, Box):
            return value.with_tensor(value.tensor.to("cpu", copy=True))
        return value.detach().to("cpu", copy=True)


def _pinned_like(tensor: Tensor) -> Tensor:
    """Memory for such a tensor, on pages of its own: what is pinned must not overlap."""
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(pages, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
    memory = torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
    with suppress(RuntimeError):  # then the copy is as good, only later
        torch.cuda.check_error(int(_cuda().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    return memory


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
