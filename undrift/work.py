"""One client's (or cohort's) local work. The driver owns the loop; a method only says what a gradient is.

Shapes: vectors [..., P], facts [..., 1], per-sample values [..., B]; the leading axes are () for one client, (C,) for a
cohort, (R, C) for a sweep. Nothing here looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, where, zeros_like

from .optim import SGD, Optimizer, repeat, zero
from .vector import Layout


class Batch(NamedTuple):
    """A mini-batch of every client: samples (tuple or dict of [..., B, *shape]), weight [..., B] (0: padding), and the
    counter [..., 4] that dropout draws from (None: no dropout)."""

    samples: Any
    weight: Tensor
    counter: Tensor | None = None


@dataclass(frozen=True)
class Local:
    """The base loop's options."""

    optimizer: Optimizer = SGD()
    clip: Any = None
    decay: Any = 0.0  # weight decay, outside every correction; a vector where only some coordinates move
    l2: Any = 0.0  # part of the clients' objective, inside everything
    guesses: Any = 0  # GEL: steps guessed after the last one; a number, or inf (SGD)
    target: Any = None  # instead: max(target - steps, 0)

    def guess(self, info: Info, lr, *memory):
        if self.target is None:
            if zero(self.guesses):
                return 0.0
            times = most = least = self.guesses
        else:
            times = (self.target - info.steps).clamp(min=0)
            most, least = (max(self.target - k, 0) for k in (info.shortest, info.longest))
        return self.optimizer.guess(lr, times, most, least, *memory)


@dataclass(frozen=True)
class Info:
    """Facts of one client (or of many side by side) in one round; tensors are [..., 1] in the vectors' dtype unless
    said."""

    round: int
    steps: Tensor
    longest: int  # the steps of the slowest and of the quickest client of the chunk
    shortest: int
    lr: Tensor  # of this round
    age: Tensor  # rounds since this client's state last counted; inf at a first visit
    visited: Tensor  # 0 at a first visit, then 1
    examples: Tensor
    weight: Tensor  # p_i
    layout: Layout
    cover: Tensor | None = None  # [..., P] bool: this client's block or slice; None: all coordinates
    draw: Callable[[str], Tensor] | None = None
    facts: Callable[[], Mapping[str, Tensor]] | None = None
    vectors: frozenset[str] | None = None  # the fields that are vectors; None while they are being learnt
    local: Local = Local()

    def uniform(self, name: str) -> Tensor:
        """[..., P] draws in [0, 1) from counters, the same in every driver."""
        return self.draw(name)

    @property
    def data(self) -> Mapping[str, Tensor]:
        """Side facts [..., n] that the data source gives for each client; class counts under "classes"."""
        return self.facts()

    def is_vector(self, name: str, width: int) -> bool:
        """Whether a field is as wide as the model: by name, once the names are learnt."""
        return width == self.layout.size if self.vectors is None else name in self.vectors

    @property
    def effort(self) -> Tensor:
        """|a_i|_1: how far the base loop goes under unit gradients at rate 1, guesses included (GEL, Lemma 1)."""
        one = torch.ones_like(self.steps)

        def step(k, y, *memory):
            move, *memory = self.local.optimizer.step(1, one, *memory)
            return y - move, *memory

        y, *memory = repeat(step, (0 * one, *self.local.optimizer.init(one)), self.steps, self.longest, self.shortest)
        return y - self.local.guess(self, 1, *memory)


@dataclass(frozen=True)
class Facts:
    """What `server` is told of the round; `log(name, value)` records a number."""

    round: int
    lr: Any
    population: int
    logged: dict[str, Tensor] = field(default_factory=dict)

    def log(self, name: str, value) -> None:
        self.logged[name] = value


@dataclass(frozen=True)
class Oracle:
    """All that a driver supplies: a gradient and mini-batches."""

    # gradient(losses, vectors, y, batch) -> (gradient [..., P] of the weighted mean loss, that loss [..., 1])
    gradient: Callable
    batch: Callable[[int], Batch]
    samples: Callable[[int], int]  # how many samples the clients that are still at work have in batch k
    full: Callable[[], list[tuple[Batch, int]]]  # all of a client's data in pieces, each with its number of samples
    compiled: Callable = staticmethod(lambda one: one)  # what becomes of a local step; a driver may trace or capture it


@dataclass
class Book:
    """What the driver notes down while clients work: never sent, and no bit of the run depends on it."""

    gradients: int = 0  # samples whose gradient was taken
    loss: Tensor | None = None  # [..., 1] sum over the steps of the raw loss at the points visited
    move: Tensor | None = None  # [..., P] what `descend` returned, less where it began
    logged: dict[str, Tensor] = field(default_factory=dict)


class Seen:
    """The mean over the steps of the gradients that passed. `value` is there after the run."""

    value: Tensor | None = None


class Step:
    """One local step: `lr`, and `grad(z)`, the gradient at any z on this mini-batch."""

    def __init__(self, work: Work, batch: Batch, lr: Tensor, l2, vectors: dict, passed: tuple):
        self.work, self.batch, self.lr, self.l2, self.vectors, self.passed = work, batch, lr, l2, vectors, passed
        self.first_loss: Tensor | None = None
        self.seen: dict[Seen, Tensor] = {}
        self.calls = 0

    def grad(self, z: Tensor) -> Tensor:
        return self._below(len(self.work.adjustments))(z)

    def _below(self, n: int) -> Callable[[Tensor], Tensor]:
        if n == 0:
            return self.raw
        f = self.work.adjustments[n - 1][0]
        return lambda z: f(self, z, self._below(n - 1), **self.passed[n - 1])

    def raw(self, z: Tensor) -> Tensor:
        """The bare gradient of the objective at z."""
        self.calls += 1
        g, loss = self.work.oracle.gradient(self.work.loss, self.vectors, z, self.batch)
        if self.first_loss is None:
            self.first_loss = loss
        return g if zero(self.l2) else g + self.l2 * z


def bare(net, y, batch):
    """Per-sample losses [B] of one client."""
    return net.losses(y, batch)


@dataclass(frozen=True)
class Work:
    info: Info
    oracle: Oracle
    book: Book = field(default_factory=Book)
    loss: Callable = bare
    vectors: dict = field(default_factory=dict)
    adjustments: tuple = ()  # (f, v), nearest to the raw gradient first: the outermost part's
    watchers: tuple = ()

    # -- what a part may change ------------------------------------------------
    def adjust(self, f: Callable, **v) -> Work:
        """Every gradient becomes f(step, y, grad, **v). All that changes between rounds, and every hyper-parameter,
        comes in through `v`; what f closes over is frozen when a step is compiled or captured."""
        v = {name: self._tensor(value) for name, value in v.items()}
        return replace(self, adjustments=(*self.adjustments, (f, v)))

    def watch(self) -> tuple[Work, Seen]:
        """This work, and the mean over the steps of the first gradient that passes here in each."""
        seen = Seen()

        def pass_on(step, y, grad):
            g = grad(y)
            step.seen.setdefault(seen, g)
            return g

        return replace(self.adjust(pass_on), watchers=(*self.watchers, seen)), seen

    def objective(self, f: Callable, **v) -> Work:
        """Per-sample losses become f(net, y, batch, loss, **v), where loss(y, batch) is the objective so far.
        Vectors and numbers in `v`, whatever their leading axes, arrive as one client's: never capture one in f."""
        below, old, new = self.loss, tuple(self.vectors), tuple(v)
        if clash := set(old) & set(new):
            raise TypeError(f"two parts pass {', '.join(sorted(clash))} to `objective`: give one of them another name")

        def loss(net, y, batch, **all_):
            def so_far(y, batch):
                return below(net, y, batch, **{k: all_[k] for k in old})

            return f(net, y, batch, so_far, **{k: all_[k] for k in new})

        return replace(self, loss=loss, vectors=self.vectors | {k: self._tensor(a) for k, a in v.items()})

    def log(self, name: str, value) -> None:
        """Record a number per client and round; it is never sent."""
        self.book.logged[name] = self._tensor(value)

    # -- what a base may do -----------------------------------------------------
    def full_grad(self, z: Tensor) -> Tensor:
        """The gradient at z over all of a client's data."""
        total, count = zeros_like(z), 0.0
        for batch, samples in self.oracle.full():
            n = batch.weight.sum(-1, keepdim=True)
            g, _ = self.oracle.gradient(self.loss, self.vectors, z, batch)
            total, count = total + n * g, count + n
            self.book.gradients += samples
        g = total / count
        return g if zero(self.info.local.l2) else g + self.info.local.l2 * z

    def run(self, body: Callable, *carry: Tensor, **given) -> tuple[Tensor, ...]:
        """body(step, *carry, **given) -> carry, info.steps times in each row; a row that has finished keeps its
        carry."""
        info, n = self.info, len(carry)
        passed = {
            "lr": info.lr,
            "l2": info.local.l2 if zero(info.local.l2) else self._tensor(info.local.l2),
            "adjustments": tuple(v for _, v in self.adjustments),
            "vectors": self.vectors,
            "given": {k: self._tensor(v) for k, v in given.items()},
        }

        def one(carry, batch, active, passed):  # -> carry, how many gradients it took of each sample
            step = Step(self, batch, passed["lr"], passed["l2"], passed["vectors"], passed["adjustments"])
            new = body(step, *carry[:n], **passed["given"])
            sums = (step.first_loss, *(step.seen.get(w) for w in self.watchers))
            totals = zip(carry[n:], sums, strict=True)
            new = (*new, *(total if s is None else total + s for total, s in totals))
            if active is not None:
                new = tuple(where(active, a, b) for a, b in zip(new, carry, strict=True))
            return new, step.calls

        one = self.oracle.compiled(one)
        carry = (*carry, zeros_like(info.steps), *(zeros_like(carry[0]) for _ in self.watchers))
        for k in range(info.longest):
            carry, calls = one(carry, self.oracle.batch(k), None if k < info.shortest else k < info.steps, passed)
            self.book.gradients += calls * self.oracle.samples(k)
        self.book.loss = carry[n]
        for watcher, total in zip(self.watchers, carry[n + 1 :], strict=True):
            watcher.value = total / info.steps
        return carry[:n]

    def descend(self, x: Tensor) -> Tensor:
        """The base loop: gradient, clip, weight decay, a step of the optimizer; after the last one its guess."""
        local = self.info.local
        numbers = {"clip": local.clip, "decay": local.decay}
        numbers = {k: v for k, v in numbers.items() if v is not None and not zero(v)}

        def body(step, y, *memory, clip=None, decay=None, **optimizer):
            g = step.grad(y)
            if clip is not None:
                g = g * (clip / g.norm(dim=-1, keepdim=True)).clamp(max=1)
            if decay is not None:
                g = g + decay * y
            move, *memory = local.optimizer.having(**optimizer).step(step.lr, g, *memory)
            return y + move, *memory

        y, *memory = self.run(body, x, *local.optimizer.init(x), **numbers, **local.optimizer.numbers())
        y = y + local.guess(self.info, self.info.lr, *memory)
        self.book.move = y - x
        return y

    def _tensor(self, value) -> Tensor:
        """Numbers become [1] tensors of the vectors' dtype: a bare float would be frozen into a compiled step."""
        return (
            value
            if isinstance(value, Tensor)
            else torch.full((1,), float(value), dtype=self.info.lr.dtype, device=self.info.lr.device)
        )
