"""Data sets by name, and `make`, which builds the one that a [data] table names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.cifar import cifar10, cifar100
from undrift.data.mnist import mnist, mnist_writers
from undrift.data.partition import Parts, partition
from undrift.data.shakespeare import Shakespeare
from undrift.data.source import (
    ArraySource,
    HeldOut,
    Pooled,
    Samples,
    Source,
    adapt,
    check,
    check_samples,
    each,
    length,
    target,
)
from undrift.data.synthetic import Synthetic, SyntheticProx
from undrift.errors import BadInput
from undrift.registry import Registry, checked
from undrift.userfiles import locate

__all__ = ["ArraySource", "HeldOut", "Pooled", "Samples", "Source", "adapt", "check", "datasets", "make"]

datasets = Registry("data set")
datasets.add("mnist", mnist, "60,000 handwritten digits, 28 x 28, 10 classes; needs a partition")
datasets.add(
    "mnist-writers", mnist_writers, "MNIST with its 539 training writers as clients, 297 test writers as groups"
)
datasets.add("cifar10", cifar10, "60,000 colour images, 32 x 32, 10 classes; needs data.folder and a partition")
datasets.add("cifar100", cifar100, "60,000 colour images, 32 x 32, 100 classes; needs data.folder and a partition")
datasets.add("shakespeare", Shakespeare, "next character in the plays, 1,129 roles as clients")
datasets.add("synthetic", Synthetic, "LEAF's generated classification, any number of clients")
datasets.add("synthetic-prox", SyntheticProx, "FedProx's generated Synthetic(alpha, beta), any number of clients")


class Partitioner:
    """The split that [data] asks for: `partitioner(labels, n)` gives one index list per client, the same each time."""

    def __init__(self, table: Any, seed: int, folder: str | Path | None, key: str, name: str):
        self.table, self.seed, self.folder, self.key, self.name = table, seed, folder, f"{key}.partition", name
        self.used = False

    def __call__(self, labels: np.ndarray | None, n: int) -> Parts:
        self.used = True
        if self.table is None:
            raise BadInput(
                f"{self.key} is missing: {self.name} does not come by client; say how to split it, for example "
                f'partition = {{name = "dirichlet", alpha = 0.3, clients = 100}}'
            )
        return partition(self.table, labels, n, self.seed, self.folder, self.key)


def make(table: Mapping[str, Any], *, seed: int, folder: str | Path | None = None, key: str = "data") -> Source:
    """The source that a [data] table names: name, partition, folder, and the data set's own options."""
    options = dict(table)
    data_folder = _data_folder(options, folder, key)
    split = Partitioner(options.pop("partition", None), seed, folder, key, _shown(options.get("name")))
    given = {"seed": seed, "folder": data_folder, "partition": split}
    made = datasets.build(options, key=key, folder=folder, given=given, also=["partition", "folder"])
    source = made
    if not (isinstance(made, Source) and _ours(options["name"])):
        arrays = _arrays(made)
        source = check(adapt(made, key) if arrays is None else _from_arrays(*arrays, split, key), key)
    if split.table is not None and not split.used:
        raise BadInput(f"{split.key}: {split.name} comes by client and takes no partition; leave it out")
    return source


def _data_folder(options: dict[str, Any], folder: str | Path | None, key: str) -> Path | None:
    """Takes `folder` out of the options of a data set that is read from one; the path that it names."""
    name = options.get("name")
    if "folder" not in options:
        return None
    if not _takes(datasets.find(name, f"{key}.name", folder) if isinstance(name, str) else name, "folder"):
        if _ours(name):
            raise BadInput(f"{key}.folder: {name} comes with undrift and is read from no folder; leave it out")
        return None  # its signature refuses what is left among the options
    typed = checked(str, options.pop("folder"), f"{key}.folder")
    return locate(os.path.expanduser(typed), f"{key}.folder", folder)


def _takes(make: Any, name: str) -> bool:
    try:
        return name in inspect.signature(make).parameters
    except (TypeError, ValueError):  # made already, or compiled
        return False


def _ours(name: Any) -> bool:
    return isinstance(name, str) and name in datasets.names()


def _shown(name: Any) -> str:
    return name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)


def _arrays(made: Any) -> tuple[Samples, Samples | None] | None:
    """Plain arrays of training samples, (x, y) or {"x": ..., "target": ...}, alone or as a pair (training, test)."""
    if _plain(made):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and all(map(_plain, made)):
        return made
    return None


def _plain(value: Any) -> bool:
    leaves = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return len(leaves) > 0 and all(isinstance(leaf, np.ndarray | Tensor) for leaf in leaves)


def _from_arrays(train: Samples, test: Samples | None, split: Partitioner, key: str) -> ArraySource:
    try:
        train, test = (None if s is None else each(torch.as_tensor, s) for s in (train, test))
    except TypeError as error:  # an array of objects or of texts
        raise BadInput(f"{key}: arrays of samples must hold numbers ({error})") from error
    check_samples(train, f"{key}: the training set", None, train)
    labels, classes = None, None
    if _is_class(target(train)):
        train, test = (None if s is None else _with_long_target(s) for s in (train, test))
        labels = target(train).numpy(force=True)
        classes = 1 + max(int(target(s).max()) for s in (train, test) if s is not None and length(s))
    return ArraySource(train, split(labels, length(train)), test, None, classes)


def _is_class(labels: Tensor) -> bool:
    whole = not labels.is_floating_point() and not labels.is_complex() and labels.dtype != torch.bool
    return whole and labels.ndim == 1 and int(labels.min()) >= 0


def _with_long_target(samples: Samples) -> Samples:
    if isinstance(samples, dict):
        return {**samples, "target": samples["target"].long()}
    return (*samples[:-1], samples[-1].long())
