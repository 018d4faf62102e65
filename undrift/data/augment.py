"""Images changed at random in training, by draws from counters: the same for any driver, chunk and device.

An augmentation takes a mini-batch as the model would see it, samples [..., B, *shape], and four words [..., B, 4] for
each sample (whole numbers from 0 to 2^32 - 1, int64), and returns the samples changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from undrift.data.source import Pixels, Samples

Augment = Literal["crop-flip"] | None


@dataclass(frozen=True)
class CropFlip:
    """A border of 4 black pixels, a crop of the old size anywhere in that, and every second one mirrored left to right.

    The border is black before images are standardised (He et al., 2016): `black` [C] is what `present` makes of 0.
    """

    black: Tensor
    border: int = 4

    def __call__(self, samples: Samples, words: Tensor) -> Samples:
        images, labels = samples  # images [..., B, C, H, W]
        (height, width), edge = images.shape[-2:], self.border
        black = self.black.to(images).view(-1, 1, 1)
        framed = black.expand(*images.shape[:-2], height + 2 * edge, width + 2 * edge).contiguous()
        framed[..., edge : edge + height, edge : edge + width] = images
        # The high bits of a word: word * n >> 32 is a whole number below n.
        top, left = (words[..., i, None] * (2 * edge + 1) >> 32 for i in (0, 1))
        columns = torch.arange(width, device=images.device)
        columns = torch.where(words[..., 2, None] >> 31 == 1, width - 1 - columns, columns) + left  # [..., B, W]
        rows = torch.arange(height, device=images.device) + top  # [..., B, H]
        at = (rows[..., :, None] * framed.shape[-1] + columns[..., None, :]).flatten(-2)
        flat = at[..., None, :].expand(*images.shape[:-2], height * width)
        return framed.flatten(-2).gather(-1, flat).view_as(images), labels


def augmentation(name: Augment, present: Pixels, channels: int) -> CropFlip | None:
    """What `data.augment` names, for images shown by `present`."""
    if name is None:
        return None
    dark = torch.zeros(1, channels, 1, 1, dtype=torch.uint8), torch.zeros(1)
    return CropFlip(present(dark)[0].flatten())
