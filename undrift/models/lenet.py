"""The convolutional network similar to LeNet-5 that the GHBM and FedBCGD papers train (Hsu et al., 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .shapes import Size, image


class LeNet(nn.Module):
    """Two 5 x 5 convolutions to 64 channels, each with max-pooling, then layers of 384, 192 and `classes`."""

    def __init__(self, channels: int, height: int, width: int, classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        self.fc1 = nn.Linear(64 * _after(height) * _after(width), 384)
        self.fc2 = nn.Linear(384, 192)
        self.fc3 = nn.Linear(192, classes)

    def forward(self, x: Tensor) -> Tensor:
        # ReLU and max-pooling commute: after the pool there is a quarter as much to do.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def _after(side: int) -> int:
    """What two unpadded 5 x 5 convolutions and two halvings leave of a side."""
    return ((side - 4) // 2 - 4) // 2


def lenet(shape, classes: Size) -> nn.Module:
    """The LeNet of the GHBM paper."""
    return LeNet(*image(shape, "lenet", smallest=16), classes)
