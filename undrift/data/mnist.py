"""MNIST (LeCun, Cortes, Burges), split by a partition or by the people who wrote the digits."""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable

import numpy as np
import torch

from undrift.data.embedded import decoded, embedded
from undrift.data.source import ArraySource, Pixels

CLASSES = 10
STANDARD = Pixels(mean=(0.1307,), std=(0.3081,))  # of the 60,000 training images, as published

Split = Callable[[np.ndarray, int], list[np.ndarray]]  # labels and number of samples -> index lists by client


def mnist(partition: Split, normalise: bool = False) -> ArraySource:
    """MNIST, 60,000 and 10,000 grey images of 28 x 28 in 10 classes, by a partition."""
    a = _arrays()
    return _source(a, partition(a["labels"].astype(np.int64), len(a["labels"])), None, normalise)


def mnist_writers(normalise: bool = False) -> ArraySource:
    """MNIST with its 539 training writers as clients and its 297 test writers as groups."""
    a, writers = _arrays(), np.load(io.BytesIO(embedded("mnist-writers.npz")))
    return _source(a, _by_writer(writers["train"]), _by_writer(writers["test"]), normalise)


def _source(a: dict[str, np.ndarray], parts, groups, normalise: bool) -> ArraySource:
    test = _tensors(a["test_images"], a["test_labels"])
    by_group = None if groups is None else [_tensors(a["test_images"][g], a["test_labels"][g]) for g in groups]
    present = STANDARD if normalise else Pixels()
    return ArraySource(_tensors(a["images"], a["labels"]), parts, test, by_group, CLASSES, present)


def _tensors(images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(images)[:, None], torch.from_numpy(labels.astype(np.int64))


def _by_writer(writers: np.ndarray) -> list[np.ndarray]:
    """The images of each writer, in the order of the writers' numbers at NIST."""
    order = np.argsort(writers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(writers[order])) + 1)


def _arrays() -> dict[str, np.ndarray]:
    return decoded("mnist.xz", _decode)


def _decode(packed: bytes) -> dict[str, np.ndarray]:
    f = io.BytesIO(lzma.decompress(packed))
    return {name: np.load(f) for name in ("images", "labels", "test_images", "test_labels")}
