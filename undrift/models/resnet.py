"""Residual networks (He et al., 2016) for small images, with GroupNorm (Wu and He, 2018) in place of BatchNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import BadInput
from .shapes import Size, image


class Padded(nn.Module):
    """A shortcut without parameters (option A): every second pixel, and channels of zeros around the old ones."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        before = (width - channels) // 2
        self.stride, self.padding = stride, (0, 0, 0, 0, before, width - channels - before)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], self.padding)


def projected(channels: int, width: int, stride: int, groups: int) -> nn.Module:
    """A shortcut by a 1 x 1 convolution (option B)."""
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.GroupNorm(groups, width))


class Block(nn.Module):
    """Two 3 x 3 convolutions around which `shortcut` leads."""

    def __init__(self, channels: int, width: int, stride: int, groups: int, shortcut: nn.Module):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A 3 x 3 stem, one stage of `depth` blocks for each width, the mean over all pixels and a linear layer."""

    def __init__(self, channels: int, classes: int, widths: list[int], depth: int, groups: int, padded: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, widths[0])
        blocks, before = [], widths[0]
        for width in widths:
            for _ in range(depth):
                if width == before:
                    blocks.append(Block(width, width, 1, groups, nn.Identity()))
                else:
                    shortcut = Padded(before, width, 2) if padded else projected(before, width, 2, groups)
                    blocks.append(Block(before, width, 2, groups, shortcut))
                before = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))


def resnet20(shape, classes: Size, groups: Size = 2) -> nn.Module:
    """ResNet-20 for CIFAR (16, 32 and 64 channels, shortcuts without parameters) with `groups` groups in each norm."""
    channels = image(shape, "resnet20")[0]
    return ResNet(channels, classes, [16, 32, 64], 3, _divisor(groups, 16), padded=True)


def resnet18(shape, classes: Size, groups: Size = 2) -> nn.Module:
    """ResNet-18 (64 to 512 channels) with a 3 x 3 stem for small images and `groups` groups in each norm."""
    channels = image(shape, "resnet18")[0]
    return ResNet(channels, classes, [64, 128, 256, 512], 2, _divisor(groups, 64), padded=False)


def _divisor(groups: int, width: int) -> int:
    if width % groups:
        raise BadInput(f"model.groups must divide the {width} channels of the first layer, and {groups} does not")
    return groups
