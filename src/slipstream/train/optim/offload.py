"""Optimiser state in main memory (Ren et al. 2021, arXiv 2101.06840): it visits the GPU a few weights at a time.

The update itself stays on the GPU, so that it is the same to the bit. While some weights are updated the state of the
next ones is on its way there, and that of the last ones on its way back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

Update = Callable[[torch.optim.Optimizer], None]
AT_ONCE = 2**28
"""Bytes of weights that are updated at once."""


class Offload:
    """Steps an optimiser whose state is at home in main memory."""

    def __init__(self, optimizer: torch.optim.Optimizer, update: Update, at_once: int = AT_ONCE) -> None:
        self._optimizer, self._update = optimizer, update
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._parts = list(_parts(weights, at_once))
        self._coming, self._going = _new_stream(weights[0]), _new_stream(weights[0])
        self._home: dict[Tensor, dict[str, Tensor]] = {weight: {} for weight in weights}

    def step(self) -> None:
        """Update all weights; when this returns the state is at home."""
        self._fetch(self._parts[0])
        for number, part in enumerate(self._parts):
            if self._coming:
                torch.cuda.current_stream().wait_stream(self._coming)
            if number + 1 < len(self._parts):
                self._fetch(self._parts[number + 1])
            self._update_only(part)
            self._send_home(part)
        if self._going:
            self._going.synchronize()

    def _update_only(self, part: Sequence[Tensor]) -> None:
        groups, chosen = self._optimizer.param_groups, set(part)
        only = [{**group, "params": [weight for weight in group["params"] if weight in chosen]} for group in groups]
        self._optimizer.param_groups = [group for group in only if group["params"]]
        try:
            self._update(self._optimizer)
        finally:
            self._optimizer.param_groups = groups

    def _fetch(self, part: Sequence[Tensor]) -> None:
        working = torch.cuda.current_stream() if self._coming else None
        with _on(self._coming):
            for weight in part:
                for slot, tensor in self._large(weight):
                    self._home[weight][slot] = tensor
                    here = tensor.to(weight.device, non_blocking=True, copy=True)
                    if working:
                        here.record_stream(working)
                    self._optimizer.state[weight][slot] = here

    def _send_home(self, part: Sequence[Tensor]) -> None:
        if self._going:
            self._going.wait_stream(torch.cuda.current_stream())
        with _on(self._going):
            for weight in part:
                for slot, tensor in self._large(weight):
                    home = self._home[weight].get(slot)
                    if home is None:
                        home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    home.copy_(tensor, non_blocking=True)
                    if self._going:
                        tensor.record_stream(self._going)
                    self._optimizer.state[weight][slot] = home

    def _large(self, weight: Tensor) -> list[tuple[str, Tensor]]:
        """The state that is as large as the weight; a count of steps stays where it is."""
        state = self._optimizer.state.get(weight, {})
        return [(slot, tensor) for slot, tensor in state.items() if tensor is not None and tensor.shape == weight.shape]


def _new_stream(weight: Tensor) -> "torch.cuda.Stream | None":
    return torch.cuda.Stream(weight.device) if weight.is_cuda else None  # type: ignore[no-untyped-call]


def _on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream else nullcontext()


def _parts(weights: Sequence[nn.Parameter], at_once: int) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    size = 0
    for weight in weights:
        size += weight.numel() * weight.element_size()
        if part and size > at_once:
            yield part
            part, size = [], weight.numel() * weight.element_size()
        part.append(weight)
    yield part
