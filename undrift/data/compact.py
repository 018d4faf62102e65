"""Compact files of colour images: lossless, about half the size of the pixels, read with NumPy alone.

An .xz stream of two .npy blobs, classes [N] and residuals [3, N, H, W], both uint8. The planes are G, R - G and B - G.
A pixel's residual is what its prediction from the left, the upper and the upper left pixel (the median edge predictor;
zeros outside the image) leaves, signs folded in (0, -1, 1, -2, ...), modulo 256.
"""

from __future__ import annotations

import io
import lzma
from pathlib import Path

import numpy as np

from undrift.errors import BadInput


def read_compact(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 3, H, W] and classes [N], both uint8."""
    try:
        unpacked = io.BytesIO(lzma.decompress(path.read_bytes()))
        labels, residuals = (np.lib.format.read_array(unpacked, allow_pickle=False) for _ in range(2))
    except (lzma.LZMAError, EOFError, ValueError) as error:
        raise BadInput(f"{path} is damaged: it cannot be unpacked") from error
    if (labels.dtype, residuals.dtype, labels.ndim, residuals.ndim) != (np.uint8, np.uint8, 1, 4) or len(
        residuals
    ) != 3:
        raise BadInput(f"{path} is damaged: it does not hold classes and colour images")
    return _pixels(residuals), labels


def _pixels(residuals: np.ndarray) -> np.ndarray:
    residuals = ((residuals >> 1) ^ (0 - (residuals & 1)).astype(np.uint8)).view(np.int8)
    residuals = np.ascontiguousarray(residuals.transpose(2, 3, 0, 1)).astype(np.int16)  # [H, W, 3, N]
    height, width, planes, n = residuals.shape
    a = np.zeros((height + 1, width + 1, planes, n), np.int16)
    for i in range(height):
        for j in range(width):
            left, up, corner = a[i + 1, j], a[i, j + 1], a[i, j]
            pixel = residuals[i, j] + np.clip(left + up - corner, np.minimum(left, up), np.maximum(left, up))
            pixel[0] &= 255
            pixel[1:] = ((pixel[1:] + pixel[0]) & 255) - pixel[0]
            a[i + 1, j + 1] = pixel
    a = a[1:, 1:]
    a[:, :, 1:] += a[:, :, :1]
    return np.ascontiguousarray(a[:, :, [1, 0, 2]].transpose(3, 2, 0, 1).astype(np.uint8))
