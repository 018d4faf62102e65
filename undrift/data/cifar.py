"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from a folder of the user's, in any of three layouts.

    official, binary    data_batch_1.bin to data_batch_5.bin and test_batch.bin; train.bin and test.bin
    official, pickled   the same names without .bin, read by a reader that runs nothing
    compact             cifar10-train-0.xz, ..., cifar10-test-0.xz, ...: lossless, about 8 MB for 5,000 images

The folder may also be the one that the official archives' folders lie in. All layouts give the same arrays. Official
files must all be there. Of the compact ones some will do: the data set then has as many images as they hold.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from undrift.data.augment import Augment, augmentation
from undrift.data.compact import read_compact
from undrift.data.embedded import kept
from undrift.data.mnist import Split
from undrift.data.pickled import read_pickle
from undrift.data.source import ArraySource, Pixels
from undrift.errors import BadInput

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
ENVIRONMENT = "UNDRIFT_DATA"


@dataclass(frozen=True)
class Cifar:
    """What tells the two data sets apart."""

    name: str
    classes: int
    train: tuple[str, ...]  # the official files
    test: tuple[str, ...]
    folders: tuple[str, ...]  # in the official archives
    head: int  # bytes before an image in the binary layout, the last of them its class
    labels: str  # in the pickled layout
    standard: Pixels  # of the 50,000 training images, as published


CIFAR10 = Cifar(
    "cifar10", 10, tuple(f"data_batch_{k}" for k in range(1, 6)), ("test_batch",),
    ("cifar-10-batches-bin", "cifar-10-batches-py"), 1, "labels",
    Pixels((0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)),
)  # fmt: skip
CIFAR100 = Cifar(
    "cifar100", 100, ("train",), ("test",), ("cifar-100-binary", "cifar-100-python"), 2, "fine_labels",
    Pixels((0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)),
)  # fmt: skip

Part = tuple[np.ndarray, np.ndarray]  # images [N, 3, 32, 32] and classes [N], both uint8
Read = Callable[[Cifar, Path], Part]
Files = tuple[list[Path], list[Path], Read]  # of the training images, of the test images, and how to read one


def cifar10(
    partition: Split, folder: Path | None = None, normalise: bool = False, augment: Augment = None
) -> ArraySource:
    """CIFAR-10, 50,000 and 10,000 colour images of 32 x 32 in 10 classes, by a partition."""
    return _source(CIFAR10, partition, folder, normalise, augment)


def cifar100(
    partition: Split, folder: Path | None = None, normalise: bool = False, augment: Augment = None
) -> ArraySource:
    """CIFAR-100, the same in 100 classes (the fine ones)."""
    return _source(CIFAR100, partition, folder, normalise, augment)


def _source(kind: Cifar, partition: Split, folder: Path | None, normalise: bool, augment: Augment) -> ArraySource:
    train, test, read = _files(kind, folder)
    a = kept(f"{kind.name}-{_digest([*train, *test])}", lambda: _decode(kind, train, test, read))
    labels, test_labels = (a[name].astype(np.int64) for name in ("labels", "test_labels"))
    present = kind.standard if normalise else Pixels()
    return ArraySource(
        (torch.from_numpy(a["images"]), torch.from_numpy(labels)),
        partition(labels, len(labels)),
        (torch.from_numpy(a["test_images"]), torch.from_numpy(test_labels)),
        None,
        kind.classes,
        present,
        augmentation(augment, present, SHAPE[0]),
    )


# Which files


def _files(kind: Cifar, folder: Path | None) -> Files:
    where, root = _root(kind, folder)
    incomplete = None
    for train, test, read in _layouts(kind, root):
        missing = [path for path in train + test if not os.path.isfile(path)]
        if not missing:
            return train, test, read
        if len(missing) < len(train + test):
            incomplete = incomplete or missing[0]
    if incomplete:
        raise BadInput(f"{where}: {incomplete} is missing; only a part of {kind.name} is there")
    archives = sorted(path.name for path in root.glob(f"cifar-{kind.classes}-*") if _packed(path))
    if archives:
        raise BadInput(f"{where}: {archives[0]} is an archive; unpack it there first (tar -xf {archives[0]})")
    below = " and ".join(kind.folders)
    raise BadInput(f"{where} holds no {kind.name}; looked for {_wanted(kind)}, there and in {below}")


def _root(kind: Cifar, folder: Path | None) -> tuple[str, Path]:
    """The folder, and how to name it in a message."""
    said = os.environ.get(ENVIRONMENT)
    if folder is None and not said:
        raise BadInput(
            f"data.folder is missing: {kind.name} does not come with undrift; name there, or in the environment "
            f"variable {ENVIRONMENT}, the folder that holds {_wanted(kind)}"
        )
    root = Path(said).expanduser() if folder is None else folder
    where = f"{ENVIRONMENT}: {root}" if folder is None else f"data.folder: {root}"
    if root.is_file() and _packed(root):
        raise BadInput(f"{where} is an archive; unpack it (tar -xf {root.name}) and name the folder")
    if not root.is_dir():
        raise BadInput(f"{where} is {'no folder' if root.exists() else 'not there'}")
    return where, root


def _layouts(kind: Cifar, root: Path) -> Iterator[Files]:
    """The files of each layout, as they would be in the folder and in those of the official archives."""
    for place in (root, *(root / name for name in kind.folders)):
        for suffix, read in ((".bin", _binary), ("", _pickled)):
            train, test = ([place / f"{name}{suffix}" for name in names] for names in (kind.train, kind.test))
            yield train, test, read
        train, test = (_chunks(place, f"{kind.name}-{half}") for half in ("train", "test"))
        yield train, test, _compact


def _chunks(place: Path, stem: str) -> list[Path]:
    """The compact files of a half in their order; the first, where there is none."""
    found = {m[1]: path for path in place.glob(f"{stem}-*.xz") if (m := re.fullmatch(rf"{stem}-(\d+)\.xz", path.name))}
    return [found[number] for number in sorted(found, key=int)] or [place / f"{stem}-0.xz"]


def _packed(path: Path) -> bool:
    return path.name.endswith((".tar.gz", ".tgz", ".tar", ".zip"))


def _wanted(kind: Cifar) -> str:
    train = kind.train[0] + (f" to {kind.train[-1].rpartition('_')[2]}" if len(kind.train) > 1 else "")
    return (
        f"{train} and {kind.test[0]} (with .bin or without), or {kind.name}-train-0.xz, {kind.name}-test-0.xz and so on"
    )


def _digest(files: list[Path]) -> str:
    """Of the files' names and contents: a copy elsewhere is the same data, a changed file is not."""
    whole = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as f:
                whole.update(path.name.encode() + hashlib.file_digest(f, "sha256").digest())
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror or error})") from error
    return whole.hexdigest()[:16]


# What is in them


def _decode(kind: Cifar, train: list[Path], test: list[Path], read: Read) -> dict[str, np.ndarray]:
    images, labels = _joined(kind, train, read)
    test_images, test_labels = _joined(kind, test, read)
    return {"images": images, "labels": labels, "test_images": test_images, "test_labels": test_labels}


def _joined(kind: Cifar, files: list[Path], read: Read) -> Part:
    parts = []
    for path in files:
        images, labels = read(kind, path)
        if not len(images) or len(images) != len(labels):
            raise BadInput(f"{path} is damaged: it holds {len(images)} images and {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= kind.classes:
            raise BadInput(f"{path} is damaged or not {kind.name}: it has classes {labels.min()} to {labels.max()}")
        parts.append((images, labels.astype(np.uint8)))
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _binary(kind: Cifar, path: Path) -> Part:
    raw = np.frombuffer(path.read_bytes(), np.uint8)
    record = kind.head + PIXELS
    if len(raw) % record:
        raise BadInput(f"{path} is damaged: its {len(raw)} bytes are no whole number of records of {record}")
    records = raw.reshape(-1, record)
    return records[:, kind.head :].reshape(-1, *SHAPE), records[:, kind.head - 1]


def _pickled(kind: Cifar, path: Path) -> Part:
    found = read_pickle(path)
    images, labels = found.get("data"), found.get(kind.labels)
    try:
        labels = np.array(labels, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        labels = None
    if not (_of_pixels(images) and labels is not None and labels.ndim == 1):
        raise BadInput(f'{path} is damaged or not {kind.name}: it has no "data" [N, {PIXELS}] and "{kind.labels}" [N]')
    return images.reshape(-1, *SHAPE), labels


def _of_pixels(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[1:] == (PIXELS,)


def _compact(kind: Cifar, path: Path) -> Part:
    images, labels = read_compact(path)
    if images.shape[1:] != SHAPE:
        raise BadInput(f"{path} is damaged or not {kind.name}: its images are {list(images.shape[1:])}")
    return images, labels
