"""Residual networks for images (He et al. 2015, arXiv 1512.03385)."""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.job.models import ResnetModel

Norm = Callable[[int], nn.Module]
_STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


class Basic(nn.Module):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(channels, width, 3, stride), norm(width)
        self.conv2, self.norm2 = _conv(width, width, 3), norm(width)
        self.shortcut = _shortcut(channels, width, stride, norm)
        _start_as_identity(self.norm2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up. The 3×3 takes the stride: the 1×1 would skip three pixels of four."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        wide = width * self.expansion
        self.conv1, self.norm1 = _conv(channels, width, 1), norm(width)
        self.conv2, self.norm2 = _conv(width, width, 3, stride), norm(width)
        self.conv3, self.norm3 = _conv(width, wide, 1), norm(wide)
        self.shortcut = _shortcut(channels, wide, stride, norm)
        _start_as_identity(self.norm3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


class Resnet(nn.Module):
    """Images [B, channels, height, width] to logits [B, classes]."""

    def __init__(self, section: ResnetModel, channels: int, classes: int) -> None:
        super().__init__()
        block = Basic if section.depth == 18 else Bottleneck
        norm = nn.BatchNorm2d if section.norm == "batch" else _group_norm
        self.stem = _stem(section, channels, norm)
        blocks: list[nn.Module] = []
        channels = section.width
        for stage, count in enumerate(_STAGES[section.depth]):
            width = section.width * 2**stage
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(channels, width, stride, norm))
                channels = width * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):  # variance kept through ReLU: He et al. 2015, arXiv 1502.01852
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.blocks(self.stem(inputs)).mean(dim=(2, 3))
        logits: Tensor = self.head(features)
        return logits


def build_resnet(job: Job, facts: Facts) -> nn.Module:
    section = job.model
    assert isinstance(section, ResnetModel)
    if len(facts.inputs) != 3 or facts.tokens:
        raise ValueError(
            f"model.kind resnet takes images of (channels, height, width), and the data has samples of {facts.inputs}; "
            "use mlp for rows of numbers"
        )
    return Resnet(section, facts.inputs[0], facts.outputs)


def _stem(section: ResnetModel, channels: int, norm: Norm) -> nn.Module:
    if section.stem == "small":
        return nn.Sequential(_conv(channels, section.width, 3), norm(section.width), nn.ReLU())
    first = _conv(channels, section.width, 7, stride=2)
    return nn.Sequential(first, norm(section.width), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))


def _shortcut(channels: int, width: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and channels == width:
        return nn.Identity()
    return nn.Sequential(_conv(channels, width, 1, stride), norm(width))


def _start_as_identity(last_norm: nn.Module) -> None:
    """A zero scale in the last norm of a block eases the start (Goyal et al. 2017, arXiv 1706.02677, §5.1)."""
    nn.init.zeros_(last_norm.get_parameter("weight"))


def _conv(channels: int, width: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)  # the norm after it has a bias


def _group_norm(channels: int) -> nn.Module:
    # 16 channels in a group (Wu and He 2018, arXiv 1803.08494, §4.1): a fixed number of groups would leave a narrow
    # network on small images with groups of two numbers, whose norm amplifies rounding without bound.
    return nn.GroupNorm(math.gcd(channels, max(1, channels // 16)), channels)
