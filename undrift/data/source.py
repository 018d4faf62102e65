"""Where samples come from: what a data source answers, and the sources that wrap arrays or another source.

`Samples` is a tuple or a dict of tensors with the samples along the first axis. In a tuple the last is the target and
the others go to the module in their order; in a dict "target" is the target and the others go to the module by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from undrift.errors import BadInput, UndriftError
from undrift.rng import Stream, Use
from undrift.userfiles import users_failure

Samples = tuple[Tensor, ...] | dict[str, Tensor]
Fetch = Callable[[Tensor], Samples]  # row numbers of any shape [...] -> samples [..., *shape of one]

MANY = 10_000  # clients above which `check` looks at a few only


def each(f: Callable[..., Tensor], *samples: Samples) -> Samples:
    """f applied tensor by tensor to samples of one structure."""
    if isinstance(samples[0], dict):
        return {name: f(*(s[name] for s in samples)) for name in samples[0]}
    return tuple(f(*tensors) for tensors in zip(*samples, strict=True))


def tensors(samples: Samples) -> list[Tensor]:
    """The tensors of some samples, the target among them."""
    return list(samples.values()) if isinstance(samples, dict) else list(samples)


def target(samples: Samples) -> Tensor:
    """What is to be predicted."""
    return samples["target"] if isinstance(samples, dict) else samples[-1]


def length(samples: Samples) -> int:
    """How many samples these are."""
    return len(target(samples))


def take(samples: Samples, rows: Tensor) -> Samples:
    """The samples at these rows: [...] row numbers give tensors of shape [..., *shape of one]."""

    def pick(t: Tensor) -> Tensor:
        flat = rows.reshape(-1).to(t.device)
        return t.index_select(0, flat).reshape(*rows.shape, *t.shape[1:])

    return each(pick, samples)


def join(parts: Sequence[Samples]) -> Samples:
    """Several clients' samples one after another."""
    return each(lambda *leaves: torch.cat(leaves), *parts)


def move(samples: Samples, device: torch.device) -> Samples:
    """The samples on a device."""
    return each(lambda t: t.to(device), samples)


def class_counts(labels: np.ndarray, classes: int) -> Tensor:
    """[classes] float32: how often each class occurs."""
    return torch.from_numpy(np.bincount(labels, minlength=classes).astype(np.float32))


def summed(source: Source) -> int:
    """All training samples of all clients, some clients at a time: what they are drawn from takes memory."""
    starts = range(0, source.population, MANY)
    return sum(int(source.sizes(np.arange(a, min(a + MANY, source.population))).sum()) for a in starts)


class Source:
    """A data source. One's own needs `population`, `size` and `client`; everything else has a default here.

    Samples come on `device`; row numbers, labels and facts always on the host. `augment(samples, words)` changes the
    samples of mini-batches, and of nothing else, by four words of draws for each.
    """

    population: int
    classes: int | None = None
    augment: Callable[[Samples, Tensor], Samples] | None = None
    device = torch.device("cpu")
    countable = 100_000  # clients up to which their sizes are added up for `examples`

    def size(self, i: int) -> int:
        """How many training samples client i has."""
        raise NotImplementedError(f"{type(self).__name__} must define size(i)")

    def client(self, i: int) -> Samples:
        """All training samples of client i."""
        raise NotImplementedError(f"{type(self).__name__} must define client(i)")

    def test(self) -> Samples | None:
        """The test set."""
        return None

    def groups(self) -> Sequence[Samples] | None:
        """Test sets by group; groups need not be training clients."""
        return None

    def validation(self, i: int) -> Samples | None:
        """What was held out of client i's training samples."""
        return None

    def labels(self, i: int) -> np.ndarray | None:
        """The classes of client i's training samples in the order of `client(i)`; None without classes."""
        return None if self.classes is None else target(self.client(i)).cpu().numpy()

    def facts(self, i: int) -> dict[str, Tensor]:
        """Side facts of client i; class counts where there are classes."""
        labels = self.labels(i)
        return {} if labels is None else {"classes": class_counts(labels, self.classes)}

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        """The sizes of several clients, int64."""
        return np.fromiter((self.size(int(i)) for i in clients), np.int64, len(clients))

    @cached_property
    def examples(self) -> int | None:
        """All training samples of all clients; None where that cannot be said cheaply."""
        return summed(self) if self.population <= self.countable else None

    def open(self, clients: Sequence[int]) -> tuple[list[np.ndarray], Fetch]:
        """Row numbers, one int64 array per client in the order of `client(i)`, and what fetches samples by them."""
        parts = [self.client(int(i)) for i in clients]
        whole = join(parts)
        ends = np.cumsum([length(p) for p in parts])
        rows = [np.arange(end - length(p), end, dtype=np.int64) for p, end in zip(parts, ends, strict=True)]
        return rows, lambda numbers: take(whole, numbers)

    def to(self, device: torch.device | str) -> Source:
        """The same source with its samples on a device."""
        moved = copy.copy(self)
        moved.device = torch.device(device)
        return moved


@dataclass(frozen=True)
class Pixels:
    """uint8 images as the model sees them: pixels / 255, standardised where a mean and a deviation are given."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __call__(self, samples: Samples) -> Samples:
        images, labels = samples  # images [..., C, H, W]
        images = images.to(torch.float32).div_(255)
        if self.mean is not None:
            channel = (-1, 1, 1)
            images.sub_(images.new_tensor(self.mean).view(channel)).div_(images.new_tensor(self.std).view(channel))
        return images, labels


class ArraySource(Source):
    """Arrays and one index list per client.

    `present` turns what is stored (uint8 images) into what is handed out, `augment` changes that in mini-batches.
    """

    def __init__(
        self,
        arrays: Samples,
        parts: Sequence[np.ndarray],
        test: Samples | None = None,
        groups: Sequence[Samples] | None = None,
        classes: int | None = None,
        present: Callable[[Samples], Samples] = lambda samples: samples,
        augment: Callable[[Samples, Tensor], Samples] | None = None,
    ):
        self.arrays, self.classes, self.augment = arrays, classes, augment
        self.parts = [np.asarray(rows, dtype=np.int64) for rows in parts]
        self.population = len(self.parts)
        self._test, self._groups, self._present = test, groups, present
        self._labels = None if classes is None else target(arrays).cpu().numpy()

    def size(self, i: int) -> int:
        return len(self.parts[i])

    def client(self, i: int) -> Samples:
        return self._fetch(torch.from_numpy(self.parts[i]))

    def test(self) -> Samples | None:
        return None if self._test is None else self._present(self._test)

    def groups(self) -> list[Samples] | None:
        return None if self._groups is None else [self._present(g) for g in self._groups]

    def labels(self, i: int) -> np.ndarray | None:
        return None if self._labels is None else self._labels[self.parts[i]]

    def open(self, clients: Sequence[int]) -> tuple[list[np.ndarray], Fetch]:
        return [self.parts[i] for i in clients], self._fetch

    def to(self, device: torch.device | str) -> ArraySource:
        moved = super().to(device)
        moved.arrays = move(self.arrays, moved.device)
        moved._test = None if self._test is None else move(self._test, moved.device)
        moved._groups = None if self._groups is None else [move(g, moved.device) for g in self._groups]
        return moved

    def _fetch(self, rows: Tensor) -> Samples:
        return self._present(take(self.arrays, rows))


class Adapted(Source):
    """A user's own object seen as a `Source`: what it defines it answers, the rest by the defaults."""

    def __init__(self, own):
        self.own = own
        self.population = own.population
        self.classes = getattr(own, "classes", None)
        if hasattr(own, "examples"):
            self.examples = own.examples

    def size(self, i: int) -> int:
        return self.own.size(i)

    def client(self, i: int) -> Samples:
        return self._out(self.own.client(i))

    def test(self) -> Samples | None:
        return self._out(self.own.test()) if hasattr(self.own, "test") else None

    def groups(self) -> list[Samples] | None:
        found = self.own.groups() if hasattr(self.own, "groups") else None
        return None if found is None else [self._out(g) for g in found]

    def facts(self, i: int) -> dict[str, Tensor]:
        return {**super().facts(i), **(self.own.facts(i) if hasattr(self.own, "facts") else {})}

    def open(self, clients: Sequence[int]) -> tuple[list[np.ndarray], Fetch]:
        if not hasattr(self.own, "open"):
            return super().open(clients)
        rows, fetch = self.own.open(clients)
        return rows, lambda numbers: self._out(fetch(numbers))

    def _out(self, samples):
        if not isinstance(samples, (tuple, dict)):
            return samples  # None, or something that `check` refuses by name
        samples = each(lambda v: torch.from_numpy(v) if isinstance(v, np.ndarray) else v, samples)
        return samples if self.device.type == "cpu" else move(samples, self.device)


class HeldOut(Source):
    """A source without a share of each client's samples, kept for validation: one of two or more at least, not all."""

    def __init__(self, source: Source, share: float, seed: int):
        if not 0 < share < 1:
            raise BadInput(f"data.validation is {share}, but the held-out share lies between 0 and 1, both excluded")
        self.source, self.share, self.augment = source, share, source.augment
        self.population, self.classes, self.device = source.population, source.classes, source.device
        self._draws = Stream(seed, Use.HOLDOUT)

    def size(self, i: int) -> int:
        return int(self.sizes(np.array([i]))[0])

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        full = self.source.sizes(clients)
        return full - self._held(full)

    def client(self, i: int) -> Samples:
        rows, fetch = self.open([i])
        return fetch(torch.from_numpy(rows[0]))

    def validation(self, i: int) -> Samples:
        rows, fetch = self.source.open([i])
        return fetch(torch.from_numpy(rows[0][self._split(i, len(rows[0]))[0]]))

    def test(self) -> Samples | None:
        return self.source.test()

    def groups(self) -> Sequence[Samples] | None:
        return self.source.groups()

    def labels(self, i: int) -> np.ndarray | None:
        labels = self.source.labels(i)
        return None if labels is None else labels[self._split(i, len(labels))[1]]

    def facts(self, i: int) -> dict[str, Tensor]:
        return {**self.source.facts(i), **super().facts(i)}

    @cached_property
    def examples(self) -> int | None:
        if self.source.examples is None:
            return None
        return summed(self)

    def open(self, clients: Sequence[int]) -> tuple[list[np.ndarray], Fetch]:
        rows, fetch = self.source.open(clients)
        return [r[self._split(int(i), len(r))[1]] for i, r in zip(clients, rows, strict=True)], fetch

    def to(self, device: torch.device | str) -> HeldOut:
        moved = super().to(device)
        moved.source = self.source.to(device)
        return moved

    def _held(self, full):
        """How many are held out of `full` samples."""
        return np.where(full >= 2, np.clip(np.rint(self.share * full), 1, np.maximum(full - 1, 1)), 0).astype(np.int64)

    def _split(self, i: int, full: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of client i's samples are held out and which stay, both in their order."""
        order = self._draws.permutations(full, i)
        v = int(self._held(np.int64(full)))
        return np.sort(order[:v]), np.sort(order[v:])


class Pooled(Source):
    """All clients of a source as one: what `centralised` trains on."""

    def __init__(self, source: Source):
        if source.examples is None or source.population > self.countable:
            raise BadInput(
                f"data: {source.population} clients cannot be pooled into one, as the method centralised does; "
                f"take at most {self.countable} clients, or another method"
            )
        self.source, self.augment = source, source.augment
        self.population, self.classes, self.device = 1, source.classes, source.device

    def size(self, i: int) -> int:
        return self.source.examples

    def client(self, i: int) -> Samples:
        rows, fetch = self._opened
        return fetch(torch.from_numpy(rows))

    def validation(self, i: int) -> Samples | None:
        parts = [self.source.validation(c) for c in range(self.source.population)]
        return None if parts[0] is None else join(parts)

    def test(self) -> Samples | None:
        return self.source.test()

    def groups(self) -> Sequence[Samples] | None:
        return self.source.groups()

    def labels(self, i: int) -> np.ndarray | None:
        if self.classes is None:
            return None
        return np.concatenate([self.source.labels(c) for c in range(self.source.population)])

    def open(self, clients: Sequence[int]) -> tuple[list[np.ndarray], Fetch]:
        rows, fetch = self._opened
        return [rows for _ in clients], fetch

    def to(self, device: torch.device | str) -> Pooled:
        return Pooled(self.source.to(device))

    @cached_property
    def _opened(self) -> tuple[np.ndarray, Fetch]:
        rows, fetch = self.source.open(range(self.source.population))
        return np.concatenate(rows), fetch


def adapt(own, key: str = "data") -> Source:
    """A user's object that answers `population`, `size(i)` and `client(i)`, as a `Source`."""
    if isinstance(own, Source):
        return own
    missing = [name for name in ("population", "size", "client") if not hasattr(own, name)]
    if missing:
        raise BadInput(
            f"{key}: a data source has population, size(i) and client(i), but {type(own).__name__} has no {missing[0]}"
        )
    return Adapted(own)


def check(source: Source, key: str = "data") -> Source:
    """Calls through a source once; the first thing that is wrong is said in one sentence. Returns the source."""
    population = source.population
    if not isinstance(population, int) or isinstance(population, bool) or population < 1:
        raise BadInput(f"{key}: population is {population!r}, but must be the number of clients, a whole number from 1")
    some = np.unique(np.linspace(0, population - 1, min(population, 100 if population <= MANY else 4)).astype(np.int64))
    for i in range(population) if population <= MANY else some.tolist():
        _check_size(_call(key, f"size({i})", source.size, i), i, key)
    first = _call(key, "client(0)", source.client, 0)
    for i in some.tolist():
        mine = _call(key, f"client({i})", source.client, i) if i else first
        check_samples(mine, f"{key}: client {i}", source.classes, first)
        if length(mine) != source.size(i):
            raise BadInput(
                f"{key}: client {i} has {length(mine)} training samples, but size({i}) says {source.size(i)}"
            )
        facts = _call(key, f"facts({i})", source.facts, i)
        if not isinstance(facts, dict) or not all(isinstance(v, Tensor) for v in facts.values()):
            raise BadInput(f"{key}: facts({i}) must be a dict of tensors")
    for name, samples in _test_sets(source, key):
        check_samples(samples, f"{key}: {name}", source.classes, first)
    return source


def _test_sets(source: Source, key: str) -> Iterator[tuple[str, Samples]]:
    """What there is to be evaluated on, with names for messages."""
    test = _call(key, "test()", source.test)
    if test is not None:
        yield "the test set", test
    groups = _call(key, "groups()", source.groups)
    if groups is not None:
        yield from ((f"group {k}", g) for k, g in enumerate(groups))


def _call(key: str, what: str, f: Callable, *args):
    try:
        return f(*args)
    except UndriftError:
        raise
    except Exception as error:
        raise users_failure(error, key, what) from error


def _check_size(n, i: int, key: str) -> None:
    if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 0:
        raise BadInput(f"{key}: size({i}) is {n!r}, but must be a whole number of samples")
    if n == 0:
        raise BadInput(f"{key}: client {i} has no training samples; leave such clients out or give them at least one")


def check_samples(samples, who: str, classes: int | None, like: Samples) -> None:
    """Samples of the right form, not empty, shaped as client 0's are, labels within the classes."""
    if not isinstance(samples, (tuple, dict)):
        raise BadInput(f"{who} has {type(samples).__name__} samples, but a tuple or a dict of tensors is needed")
    if isinstance(samples, dict) and "target" not in samples:
        raise BadInput(f'{who} has a dict of samples without "target", the name of what is to be predicted')
    leaves = tensors(samples)
    if len(leaves) < 2:
        raise BadInput(f"{who} has samples of {len(leaves)} tensors, but an input and a target are needed")
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            raise BadInput(
                f"{who} has a {type(leaf).__name__} among its samples, but each part is a tensor [samples, ...]"
            )
    lengths = [len(leaf) for leaf in leaves]
    if len(set(lengths)) > 1:
        raise BadInput(f"{who} has sample tensors of unequal length: {', '.join(map(str, lengths))}")
    if lengths[0] == 0:
        raise BadInput(f"{who} has no samples")
    if _form(samples) != _form(like):
        raise BadInput(f"{who} has samples of form {_form(samples)}, but client 0 has {_form(like)}")
    labels = target(samples)
    if classes is not None and (labels.ndim != 1 or labels.is_floating_point()):
        raise BadInput(
            f"{who} has targets {labels.dtype} {list(labels.shape)}, but classes are whole numbers [samples]"
        )
    if classes is not None and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise BadInput(
            f"{who} has targets {int(labels.min())} to {int(labels.max())}, but classes go from 0 to {classes - 1}"
        )


def _form(samples: Samples) -> dict:
    """Names, dtypes and shapes of one sample."""
    named: Mapping = samples if isinstance(samples, dict) else dict(enumerate(samples))
    return {name: (str(t.dtype).removeprefix("torch."), *t.shape[1:]) for name, t in named.items()}
