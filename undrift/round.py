"""One round: sample, send, survey, clients, receive, mean, server. The same for one client at a time, a cohort, a
sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, where
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from . import wire
from .algorithm import Algorithm, said, start, vectors
from .cohort import Chunk, Plan, States, chunks
from .errors import BadInput
from .gradients import ENGINES
from .work import Batch, Book, Facts, Info, Local, Oracle, Work


def each(f: Callable, *trees: dict) -> dict:
    """f on the tensors of flat trees whose values may be tuples (histories)."""

    def one(*v):
        return tuple(map(one, *v)) if isinstance(v[0], tuple) else f(*v)

    return {k: one(*(t[k] for t in trees)) for k in trees[0]}


def piled_up(tensors) -> Tensor:
    """[R, ...] without a copy where R is 1."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def alike(batches: list[Batch]) -> list[Batch]:
    """Batches of one width: a narrower one repeats its first sample, with weight 0."""
    width = max(b.weight.shape[-1] for b in batches)

    def wider(b: Batch) -> Batch:
        more = width - b.weight.shape[-1]
        samples = tree_map(lambda t: torch.cat([t, t[:, :1].expand(-1, more, *t.shape[2:])], 1), b.samples)
        return b._replace(samples=samples, weight=pad(b.weight, (0, more)))

    return [b if b.weight.shape[-1] == width else wider(b) for b in batches]


def of_nothing(batch: Batch) -> Batch:
    return batch._replace(weight=0 * batch.weight)


@dataclass
class Mean:
    """Streaming means of what clients sent: weighted over those who sent the coordinate, or over all clients."""

    vectors: frozenset[str]
    over_all: frozenset[str]
    sums: dict[str, Tensor] = field(default_factory=dict)
    sent: Tensor | float = 0.0  # the weight that arrived, by coordinate
    arrived: Tensor | float = 0.0  # and of the uploads as such

    def add(self, c: Lot, tree: dict[str, Tensor], cover: Tensor | None, ok: Tensor) -> None:
        def total(v):
            return c.lead.total(where(ok, v, 0.0))

        covered = c.info.weight if cover is None else c.info.weight * cover
        self.sent, self.arrived = self.sent + total(covered), self.arrived + total(c.info.weight)
        for k, v in tree.items():
            w = c.share if k in self.over_all else covered if k in self.vectors else c.info.weight
            self.sums[k] = self.sums.get(k, 0.0) + total(w * v)

    def value(self) -> dict[str, Tensor]:
        def over(k, s):
            if k in self.over_all:
                return s
            weight = self.sent if k in self.vectors else self.arrived
            return s / where(weight > 0, weight, 1.0)

        return {k: over(k, s) for k, s in self.sums.items()}


@dataclass
class Lot:
    """A chunk at work: its facts, its data, and what it received."""

    chunk: Chunk
    clients: np.ndarray  # [R, C] ids
    info: Info
    share: Tensor
    work: Work
    received: dict[str, Tensor]

    @property
    def lead(self):
        return self.chunk.lead


@dataclass(frozen=True)
class Played:
    """A round that was played and does not count yet."""

    records: list[dict]  # of each replica: {"record": ..., "clients": what was logged}
    server: dict
    moved: list  # (replica, clients, rows): the states of those whose uploads counted


@dataclass
class Tally:
    """What a round cost and showed, [R] each: whole numbers, and sums over the uploads that counted."""

    floats_down: np.ndarray
    floats_up: np.ndarray
    bytes_down: np.ndarray
    bytes_up: np.ndarray
    gradients: np.ndarray
    loss: np.ndarray  # of all mini-batches
    steps: np.ndarray
    square: Tensor | float = 0.0  # sum p |move|^2
    move: Tensor | float = 0.0  # sum p move
    weight: Tensor | float = 0.0

    @classmethod
    def empty(cls, replicas: int) -> Tally:
        return cls(*(np.zeros(replicas, dtype=np.int64) for _ in range(5)), *(np.zeros(replicas) for _ in range(2)))

    def sent(self, way: str, c: Lot, leaves: dict, names: frozenset[str]) -> None:
        for k, leaf in leaves.items():
            counted = wire.count(leaf, vector=k in names)
            for what, n in zip(("floats", "bytes"), counted, strict=True):
                n = np.broadcast_to(n, c.lead.shape).reshape(c.lead.grid)
                getattr(self, f"{what}_{way}")[:] += np.where(c.chunk.real, n, 0).sum(1)

    def worked(self, c: Lot, book: Book, ok: Tensor) -> None:
        counted = c.lead.rows(ok)[..., 0].cpu().numpy()
        self.gradients += book.gradients
        if book.loss is not None:
            loss = c.lead.rows(book.loss)[..., 0].double().cpu().numpy()
            self.loss += np.where(counted, loss, 0).sum(1)
            self.steps += np.where(counted, c.lead.rows(c.info.steps)[..., 0].double().cpu().numpy(), 0).sum(1)
        if book.move is not None:
            p, move = where(ok, c.info.weight, 0.0), where(ok, book.move, 0.0)
            self.square = self.square + c.lead.total(p * move.square().sum(-1, keepdim=True))
            self.move, self.weight = self.move + c.lead.total(p * move), self.weight + c.lead.total(p)

    def divergence(self, replicas: int) -> np.ndarray:
        """sum p_i |y_i - mean y|^2 / |mean y - x|^2, NaN where nothing moved."""
        if not isinstance(self.weight, Tensor):
            return np.full(replicas, np.nan)
        mean = (self.move / self.weight).double()
        across = mean.square().sum(-1, keepdim=True)
        spread = (self.square / self.weight).double() - across
        return (spread.clamp(min=0) / across).reshape(replicas).cpu().numpy()


class Simulation:
    """An algorithm on its clients: the server's fields, the clients' states, and `play`, one round of them.

    `engine`: "loop" (one client at a time, [P]) or "vmap" ([C, P], at most `chunk` clients at once; [R, C, P] with
    `replicas`, one planner for each). `rate(round)` is the local learning rate.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        net,
        x: Tensor,
        planners: list,
        rate: Callable[[int], object],
        local: Local | None = None,
        engine: str = "loop",
        chunk: int = 64,
        replicas: bool = False,
        compiled: Callable = lambda one: one,
    ):
        self.algorithm, self.net, self.planners, self.rate = algorithm, net, planners, rate
        self.local = local or Local()
        self.batched, self.chunk, self.replicas, self.compiled = engine != "loop", chunk, replicas, compiled
        self.gradient = ENGINES[engine](net)
        self.vectors = vectors(algorithm, net.layout, planners[0].facts_of_one)
        self.over_all, self.always = said(algorithm, "over_all"), said(algorithm, "always")
        self.population = planners[0].population
        lead = (1,) * self.batched if not replicas else (len(planners), 1)
        self.server, mine = start(algorithm, x.expand(*lead, x.shape[-1]))
        self.states = [States(each(lambda v, r=r: self._one(v, r), mine)) for r in range(len(planners))]
        self.round = 0

    def _one(self, v: Tensor, r: int) -> Tensor:
        """A server vector's replica r as [P]."""
        return v.reshape(-1, v.shape[-1]).expand(len(self.planners), -1)[r]

    def model(self, r: int = 0, server: dict | None = None) -> Tensor:
        """[P] of replica r, of the present server or of one that was played."""
        return self._one(self.algorithm.model(**(server or self.server)), r)

    # -- a round ------------------------------------------------------------------

    def play(self) -> Played:
        """One round, of which nothing counts until `keep`. Where a GPU's memory does not suffice, in smaller chunks."""
        while True:
            try:
                return self._play()
            except torch.OutOfMemoryError:
                if self.chunk == 1:
                    raise
            torch.cuda.empty_cache()  # outside `except`: the traceback held the round's tensors
            self.chunk //= 2

    def _play(self) -> Played:
        plans = [p.round(self.round) for p in self.planners]
        tally, facts = Tally.empty(len(plans)), Facts(self.round, self._rate(), self.population)
        lots = [self._lot(plans, c, tally) for c in chunks(plans, self.chunk, self.batched, self.replicas)]
        asked = self._survey(lots, tally)
        mean, moved, counted, logged = Mean(self.vectors, self.over_all), [], [], []
        for c in lots:
            ok = self._clients(c, plans, asked, mean, tally, moved, logged)
            counted.append(c.lead.rows(ok)[..., 0].cpu().numpy())
            c.work = c.received = None  # a cohort's vectors are held a chunk at a time
        fields = mean.value()
        new = self.algorithm.server(facts, **self.server, **asked, **fields)
        records = self._records(plans, lots, counted, tally, facts, logged)
        return Played(records, self._moved_on(new, mean.sent > 0), moved)

    def keep(self, played: Played) -> None:
        """Make a played round count: the server moves on, and the clients whose uploads counted."""
        for r, clients, rows in played.moved:
            self.states[r].write(clients, rows, self.round)
        self.server, self.round = played.server, self.round + 1

    def _rate(self):
        lr = self.rate(self.round)
        like = next(iter(self.server.values()))
        like = like[0] if isinstance(like, tuple) else like
        return (
            torch.as_tensor(lr, dtype=like.dtype, device=like.device).reshape(-1, 1, 1)
            if self.replicas
            else torch.full((1,), float(lr), dtype=like.dtype, device=like.device)
        )

    def _lot(self, plans: list[Plan], chunk: Chunk, tally: Tally) -> Lot:
        lead, lr = chunk.lead, self._rate()

        def fact(values) -> Tensor:
            return lead.lay(torch.as_tensor(np.asarray(values, dtype=np.float64)).to(lr)[..., None])

        def laid(get) -> Tensor:
            """A tensor for each client -> [*lead, n]."""
            return lead.lay(torch.stack([torch.stack([get(r, int(i)) for i in row]) for r, row in enumerate(ids)]))

        ids = chunk.of(plans, "clients")
        steps = np.where(chunk.real, chunk.of(plans, "steps"), 0)
        ages = [[self.states[r].age(int(i), self.round) for i in row] for r, row in enumerate(ids)]
        info = Info(
            round=self.round,
            steps=fact(steps),
            longest=int(steps.max()),
            shortest=int(steps.min()),
            lr=lr.expand(*lead.shape, 1),
            age=fact(ages),
            visited=fact(np.isfinite(ages)),
            examples=fact(chunk.of(plans, "examples")),
            weight=fact(chunk.of(plans, "weight") * chunk.real),
            layout=self.net.layout,
            cover=laid(lambda r, i: plans[r].cover(i)) if plans[0].cover else None,
            draw=lambda name: laid(lambda r, i: plans[r].uniform(i, name)),
            facts=lambda: {
                k: laid(lambda r, i, k=k: plans[r].facts(i)[k].to(lr)) for k in plans[0].facts(int(ids[0, 0]))
            },
            vectors=self.vectors,
        )
        info = replace(info, local=self.algorithm.local(info, self.local))
        feeds = [plan.feed([int(i) for i in row], k) for plan, row, k in zip(plans, ids, steps, strict=True)]
        lot = Lot(chunk, ids, info, fact(chunk.of(plans, "share")), None, None)
        leaves = self.algorithm.down(info, **self.server)
        if self.algorithm.sends:
            tally.sent("down", lot, leaves, self.vectors)
        lot.received = each(lead.wide, wire.opened(leaves))
        lot.work = Work(info, self._oracle(lead, feeds))
        return lot

    def _oracle(self, lead, feeds: list) -> Oracle:
        def piled(batches):
            return tree_map(lambda *t: t[0] if t[0] is None else lead.lay(piled_up(t)), *alike(batches))

        def full():
            listed = [feed.full() for feed in feeds]
            most = max(map(len, listed))
            listed = [[*some, *[(of_nothing(some[0][0]), 0)] * (most - len(some))] for some in listed]
            return [(piled([b for b, _ in p]), np.array([n for _, n in p])) for p in zip(*listed, strict=True)]

        return Oracle(
            gradient=self.gradient,
            batch=lambda k: piled([feed.batch(k) for feed in feeds]),
            samples=lambda k: np.array([feed.samples(k) for feed in feeds]),
            full=full,
            compiled=self.compiled,
        )

    def _read(self, c: Lot, leaves: dict, way: str, tally: Tally) -> tuple[dict, Tensor | None, Tensor]:
        """The vectors as they arrive, the coordinates that they cover, which clients' are finite."""
        covers = [wire.mask(v) for k, v in leaves.items() if k in self.vectors] or [None]
        if any(m is not covers[0] for m in covers):
            raise BadInput("all vectors of one upload must cover the same coordinates")
        if self.algorithm.sends:
            tally.sent(way, c, leaves, self.vectors)
        tree = each(c.lead.wide, wire.opened(leaves))
        ok = c.info.steps > 0
        for v in tree.values():
            ok = ok & torch.isfinite(v).all(-1, keepdim=True)
        return tree, covers[0], ok

    def _survey(self, lots: list[Lot], tally: Tally) -> dict[str, Tensor]:
        mean = Mean(self.vectors, self.over_all)
        for c in lots:
            leaves = self.algorithm.survey(c.work, **c.received)
            if not leaves:
                return {}
            tree, cover, ok = self._read(c, leaves, "up", tally)
            mean.add(c, tree, cover, ok)
        asked = mean.value()
        if self.algorithm.sends:
            for c in lots:
                tally.sent("down", c, asked, self.vectors)
        return asked

    def _clients(self, c: Lot, plans, asked, mean: Mean, tally: Tally, moved: list, logged: list) -> Tensor:
        """The chunk's clients train; -> which uploads counted."""
        names = [
            [int(i) for i, real in zip(*row, strict=True) if real] for row in zip(c.clients, c.chunk.real, strict=True)
        ]
        rows = [state.read([int(i) for i in row]) for state, row in zip(self.states, c.clients, strict=True)]
        own = {k: c.lead.lay(piled_up([row[k] for row in rows])) for k in self.states[0].fields}
        leaves, mine = self.algorithm.client(c.work, **c.received, **each(c.lead.wide, asked), **own)
        sent, cover, ok = self._read(c, leaves, "up", tally)
        lost = c.lead.lay(torch.from_numpy(c.chunk.of(plans, "lost"))[..., None]).to(ok.device)
        ok = ok & ~lost
        mean.add(c, self.algorithm.receive(c.info, **sent), cover, ok)
        mine = self.algorithm.commit(mine, **sent)
        good = c.lead.rows(ok)[..., 0].cpu().numpy()
        for r, keep in enumerate(good):
            kept = {k: c.lead.rows(v)[r, torch.from_numpy(keep)] for k, v in mine.items()}
            moved.append((r, [int(i) for i in c.clients[r][keep]], kept))
        tally.worked(c, c.work.book, ok)
        for name, value in c.work.book.logged.items():
            values = c.lead.rows(value)[..., 0].double().cpu().numpy()
            for r, clients in enumerate(names):
                logged += [(r, i, name, float(v)) for i, v in zip(clients, values[r], strict=False)]
        return ok

    def _moved_on(self, new: dict, arrived: Tensor) -> dict:
        """A coordinate for which nothing arrived keeps its old value in every vector but the histories."""
        whole, any_ = bool(arrived.all()), arrived.any(-1, keepdim=True)

        def kept(name, new, old):
            if whole or name in self.always:
                return new
            return where(arrived if name in self.vectors else any_, new, old)

        return {k: each(lambda n, o, k=k: kept(k, n, o), {k: new[k]}, {k: old})[k] for k, old in self.server.items()}

    def _records(self, plans, lots, counted, tally: Tally, facts: Facts, logged: list) -> list[dict]:
        divergence = tally.divergence(len(plans))
        cohort = sum(c.chunk.real.sum(1) for c in lots)
        arrived = sum(ok.sum(1) for ok in counted)
        records = []
        for r in range(len(plans)):
            clients: dict[int, dict] = {}
            for at, i, name, value in logged:
                if at == r:
                    clients.setdefault(i, {"round": self.round + 1, "client": i})[name] = number(value)
            record = {
                "round": self.round + 1,
                **{
                    k: int(getattr(tally, k)[r])
                    for k in ("bytes_down", "bytes_up", "floats_down", "floats_up", "gradients")
                },
                "train_loss": number(tally.loss[r] / tally.steps[r] if tally.steps[r] else np.nan),
                "divergence": number(divergence[r]) if arrived[r] > 1 else None,
                "cohort": int(cohort[r]),
                "lost": int(cohort[r] - arrived[r]),
                **{k: number(float(self._one(torch.as_tensor(v).reshape(-1, 1), r))) for k, v in facts.logged.items()},
            }
            records.append({"record": record, "clients": [clients[i] for i in sorted(clients)]})
        return records


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return float(value) if np.isfinite(value) else None
