"""An algorithm is arithmetic on vectors whose last axis is the parameters: [P], [C, P] or [R, C, P].

Fields of messages and states arrive as named arguments. What `survey` returns and what `client` returns first is all
that goes up, what `down` returns and a survey's mean all that comes down; what `client` returns second stays with the
client.
"""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import wire
from .errors import BadInput
from .vector import Deferred, Layout
from .work import Batch, Facts, Info, Local, Oracle, Work

Tree = dict[str, object]  # flat: name -> vector [..., P], side field [..., n], a tuple of vectors, or a leaf of `wire`


@dataclass(frozen=True)
class Algorithm:
    over_all = frozenset()  # mean fields taken over ALL clients: what did not arrive counts 0
    always = frozenset()  # server fields that move on even where nothing arrived: histories of models
    sends = True  # False: nothing travels (training on all data in one place)
    covered = False  # works on `info.cover`, the coordinates that each client is given in a round

    def init(self, x: Tensor) -> tuple[Tree, Tree]:
        """The fields that this part OWNS: the server's, one client's."""
        return {}, {}

    def local(self, info: Info, local: Local) -> Local:
        """This part's say in the base loop's options."""
        return local

    def survey(self, work: Work, **received) -> Tree:
        """A first exchange with the same cohort; its mean reaches `client` and `server` by name."""
        return {}

    def down(self, info: Info, **server) -> Tree:
        """What the server sends."""
        raise NotImplementedError

    def client(self, work: Work, **received_and_own) -> tuple[Tree, Tree]:
        """(upload, state); the state may rest on the upload only through `commit`."""
        raise NotImplementedError

    def commit(self, mine: Tree, **sent) -> Tree:
        """One client's state, given what of its upload really counted."""
        return mine

    def receive(self, info: Info, **upload) -> Tree:
        """Server side, one client, before the mean."""
        return upload

    def server(self, cohort: Facts, **own_and_mean) -> Tree:
        raise NotImplementedError

    def model(self, **server) -> Tensor:
        """What is evaluated, exported, kept as best."""
        return server["x"]


@dataclass(frozen=True)
class Around(Algorithm):
    """A part: one idea around `inner`. What it does not say, inner says."""

    inner: Algorithm = field(default=None, kw_only=True)

    @property
    def sends(self):
        return self.inner is None or self.inner.sends

    def local(self, info, local):
        return self.inner.local(info, local)

    def survey(self, work, **received):
        return self.inner.survey(work, **received)

    def down(self, info, **server):
        return self.inner.down(info, **server)

    def client(self, work, **received_and_own):
        return self.inner.client(work, **received_and_own)

    def commit(self, mine, **sent):
        return self.inner.commit(mine, **sent)

    def receive(self, info, **upload):
        return self.inner.receive(info, **upload)

    def server(self, cohort, **own_and_mean):
        return self.inner.server(cohort, **own_and_mean)

    def model(self, **server):
        return self.inner.model(**server)


@dataclass(frozen=True)
class Upload(Around):
    """A part that changes what travels. These go last: the others do arithmetic on what they find in an upload."""


@dataclass(frozen=True)
class Codec(Upload):
    """Re-codes every vector that a client sends."""

    def encode(self, info: Info, name: str, leaf):
        raise NotImplementedError

    def survey(self, work, **received):
        return self.coded(work.info, self.inner.survey(work, **received))

    def client(self, work, **received_and_own):
        upload, mine = self.inner.client(work, **received_and_own)
        return self.coded(work.info, upload), mine

    def coded(self, info: Info, tree: Tree) -> Tree:
        return {k: self.encode(info, k, v) if info.is_vector(k, wire.width(v)) else v for k, v in tree.items()}


def chain(algorithm: Algorithm | None) -> Iterator[Algorithm]:
    """The parts, outermost first."""
    while algorithm is not None:
        yield algorithm
        algorithm = getattr(algorithm, "inner", None)


def said(algorithm: Algorithm, what: str) -> frozenset[str]:
    """`over_all` or `always` of all parts."""
    return frozenset().union(*(getattr(part, what) for part in chain(algorithm)))


def start(algorithm: Algorithm, x: Tensor) -> tuple[Tree, Tree]:
    """All fields of all parts, the server's and a client's, at the beginning."""
    server, mine = {}, {}
    for part in chain(algorithm):
        ours, theirs = part.init(x)
        server, mine = ours | server, theirs | mine
    return server, mine


def stack(base: Algorithm, *parts: Around) -> Algorithm:
    """Innermost first, upload parts last."""
    for part in parts:
        if isinstance(base, Upload) and not isinstance(part, Upload):
            raise BadInput(f"{name_of(part)} after {name_of(base)}: parts that change what is uploaded go last")
        base = replace(part, inner=base)
    with suppress(Deferred):  # it needs the real layers or facts: `learn` is called with them before round 1
        learn(base, TOY)
    return base


# ---------------------------------------------------------------- a toy round: which names there are, and whose

TOY = Layout(("weight", "bias"), ((2,), (3,)), toy=True)


def name_of(part: Algorithm) -> str:
    return type(part).__name__


def learn(algorithm: Algorithm, layout: Layout, data=None) -> frozenset[str]:
    """Plays a round of each part around the bare base and of the whole (the gradient at y is y). Refuses two owners
    of any name; tells which fields are vectors: those as wide as the layout."""
    *parts, root = chain(algorithm)
    owner: dict[str, str] = {}
    shared = widths(root, layout, data).keys()
    for part in reversed(parts):
        for name in sorted(widths(replace(part, inner=root), layout, data).keys() - shared):
            if name in owner:
                raise BadInput(f"{name_of(part)} cannot join {owner[name]}: both own the name {name!r}")
            owner[name] = name_of(part)
    return frozenset(name for name, width in widths(algorithm, layout, data).items() if width == layout.size)


def vectors(algorithm: Algorithm, layout: Layout, data=None) -> frozenset[str]:
    """The fields that follow the width of the model: a real model may by chance be as wide as a side field."""
    first = (layout.shapes[0][0] + 1, *layout.shapes[0][1:]) if layout.shapes[0] else (2,)
    wider = replace(layout, shapes=(first, *layout.shapes[1:]))
    return learn(algorithm, layout, data) & learn(algorithm, wider, data)


def widths(algorithm: Algorithm, layout: Layout, data=None) -> dict[str, int]:
    """Every name in states, messages and uploads of one round, with its width."""
    x, one = torch.zeros(layout.size, dtype=torch.float64), torch.ones(1, dtype=torch.float64)

    def facts():
        if data is None:
            raise Deferred("data")
        return {k: v.to("cpu", torch.float64) for k, v in data().items()}

    info = Info(
        round=0, steps=one, longest=1, shortest=1, lr=one, age=one, visited=one, examples=one, weight=one,
        layout=layout, cover=x == 0, draw=lambda name: x, facts=facts,
    )  # fmt: skip
    info = replace(info, local=algorithm.local(info, Local()))
    batch = Batch((x,), one)
    oracle = Oracle(lambda losses, given, y, batch: (y, one), lambda k: batch, lambda k: 1, lambda: [(batch, 1)])
    work = Work(info, oracle)
    phase, part = "init", name_of(algorithm)
    try:
        server, mine = start(algorithm, x)
        phase = "down"
        message = wire.opened(algorithm.down(info, **server))
        phase = "survey"
        asked = wire.opened(algorithm.survey(work, **message))
        phase = "client"
        upload, state = algorithm.client(work, **message, **asked, **mine)
        upload = wire.opened(upload)
        same_names(f"{part}.client", "client state", state, mine)
        phase = "commit"
        same_names(f"{part}.commit", "client state", algorithm.commit(state, **upload), mine)
        phase = "receive"
        fields = algorithm.receive(info, **upload)
        phase = "server"
        new = algorithm.server(Facts(round=0, lr=one, population=1), **server, **asked, **fields)
        same_names(f"{part}.server", "server state", new, server)
        phase = "model"
        algorithm.model(**server)
    except (Deferred, BadInput, BdbQuit):
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        raise BadInput(f"{part}.{phase} fails in a trial round: {type(error).__name__}: {why}") from error
    trees = (server, mine, message, asked, upload, fields)
    return {k: last_axis(part, k, v) for tree in trees for k, v in tree.items()}


def last_axis(part: str, name: str, value) -> int:
    value = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(value, Tensor) or not value.dim():
        what = "a tensor without an axis" if isinstance(value, Tensor) else type(value).__name__
        raise BadInput(f"{part}: the field {name!r} must be a tensor [..., n], n = 1 for a number, and it is {what}")
    return value.shape[-1]


def same_names(where: str, what: str, new: Tree, old: Tree) -> None:
    if new.keys() != old.keys():
        lost, more = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
        says = [f"lacks {', '.join(lost)}"] * bool(lost) + [
            f"adds {', '.join(more)}, which `init` does not give"
        ] * bool(more)
        raise BadInput(f"{where}: the {what} it returns {' and '.join(says)}")
