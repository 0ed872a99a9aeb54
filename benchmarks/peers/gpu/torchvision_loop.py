"""torchvision's ResNet in a loop written by hand: bytes are copied while the device computes, and become numbers there.

The model is compiled and channels-last, products are bf16, SGD is fused, and nothing in the loop waits for a result.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from peer import DEVICE, ON_GPU, Clock, Images, autocast, here
from torch import Tensor, nn

AHEAD = 4
"""Batches in pinned memory: one is filled again only when the device has copied it."""


class Loader:
    """Random images as bytes and their classes: the copy of the next batch runs beside the computing of this one."""

    def __init__(self, shape: Images) -> None:
        self._images, self._classes = (torch.from_numpy(np.load(path)) for path in (shape.source, shape.target))
        size = (shape.batch, *self._images.shape[1:])
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=ON_GPU) for _ in range(AHEAD)]
        self._copied: list[torch.cuda.Event | None] = [None] * AHEAD
        self._beside = torch.cuda.Stream() if ON_GPU else None
        passes = -(-shape.steps * shape.batch // len(self._images))
        order = torch.cat([torch.randperm(len(self._images)) for _ in range(passes)])
        self._order = order[: shape.steps * shape.batch].split(shape.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        ahead = self._copy(0)
        for step in range(len(self._order)):
            batch = ahead
            if self._beside:
                now = torch.cuda.current_stream()
                now.wait_stream(self._beside)
                for part in batch:
                    part.record_stream(now)
            if step + 1 < len(self._order):
                ahead = self._copy(step + 1)
            yield batch

    def _copy(self, step: int) -> tuple[Tensor, Tensor]:
        chosen, place = self._order[step], step % AHEAD
        if event := self._copied[place]:
            event.synchronize()
        torch.index_select(self._images, 0, chosen, out=self._buffers[place])
        with torch.cuda.stream(self._beside):
            inputs, classes = self._buffers[place].to(DEVICE, non_blocking=True), here(self._classes[chosen])
            if self._beside:
                self._copied[place] = self._beside.record_event()
        return inputs, classes


def build(shape: Images) -> nn.Module:
    make = {18: torchvision.models.resnet18, 50: torchvision.models.resnet50}[shape.depth]
    classes = int(np.load(shape.target, mmap_mode="r").max()) + 1
    return make(num_classes=classes, zero_init_residual=True).to(DEVICE, memory_format=torch.channels_last)


def main() -> None:
    shape, clock = Images.read(), Clock()
    plain = build(shape)
    model = shape.compiled(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=shape.lr, momentum=shape.momentum, fused=True)
    for images, classes in Loader(shape):
        pixels = images.to(dtype=torch.bfloat16, memory_format=torch.channels_last)  # 0 to 255 are exact in bf16
        with autocast():
            loss = F.cross_entropy(model(pixels), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.lap(loss)
    clock.write()


if __name__ == "__main__":
    main()
