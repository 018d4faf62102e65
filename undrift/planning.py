"""What a round of an experiment consists of, drawn from counters: cohort, local steps, mini-batches. One seed, one
plan, whatever the method."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils._pytree import tree_map

from .cohort import Plan
from .rng import WORD, Stream, Use
from .work import Batch

FULL_BATCH = 512  # samples of a client at once where its full gradient is taken


@dataclass(frozen=True)
class Effort:
    """How much a client trains in a round: epochs over its data, or a number of steps."""

    batch: int
    epochs: int | None = None
    steps: int | None = None
    drop_last: bool = False

    def per_epoch(self, examples: np.ndarray) -> np.ndarray:
        whole, rest = examples // self.batch, examples % self.batch
        return np.maximum(whole if self.drop_last else whole + (rest > 0), 1)

    def of(self, examples: np.ndarray) -> np.ndarray:
        if self.steps is not None:
            return np.full_like(examples, self.steps)
        return self.epochs * self.per_epoch(examples)


class Feed:
    """The mini-batches of some clients in one round. Each epoch is a fresh shuffle; the short last batch is kept."""

    def __init__(self, planner: Planner, round: int, clients: list[int], steps: np.ndarray):
        self.planner, self.round, self.clients, self.steps = planner, round, clients, steps
        rows, self.fetch = planner.source.open(clients)
        self.rows, self.sizes = rows, np.array([len(r) for r in rows])
        self.index = self._draw()  # [C, K, B] row numbers, -1 where a batch is short

    def _draw(self) -> np.ndarray:
        effort, longest = self.planner.effort, int(self.steps.max())
        width = min(effort.batch, int(self.sizes.max()))
        per_epoch = effort.per_epoch(self.sizes)
        index = np.full((len(self.clients), longest, width), -1)
        for epoch in range(int((-(-self.steps // per_epoch)).max())):
            stream = Stream(self.planner.seed, Use.BATCHES, self.round, epoch)
            orders = stream.permutations(self.sizes, np.array(self.clients))
            for c, (order, n, rows) in enumerate(zip(orders, per_epoch, self.rows, strict=True)):
                at = epoch * n
                take = min(n, self.steps[c] - at)
                if take <= 0:
                    continue
                flat = rows[order[: min(len(rows), take * effort.batch)]]
                block = np.full(take * width, -1)
                block[: len(flat)] = flat
                index[c, at : at + take] = block.reshape(take, width)
        return index

    def _at(self, k: int) -> np.ndarray:
        """[C, B]; nothing where all of these clients have finished and those of another experiment go on."""
        return self.index[:, k] if k < self.index.shape[1] else np.full((len(self.clients), 1), -1)

    def batch(self, k: int) -> Batch:
        index = self._at(k)
        counter = None
        if self.planner.dropout:
            key = Stream(self.planner.seed, Use.DROPOUT, self.round, k).key
            lanes = [(*key, i & WORD, i >> 32 & WORD) for i in self.clients]
            counter = torch.tensor(lanes, device=self.planner.device)
        return self._augmented(self._take(index[:, : max(1, int((index >= 0).sum(1).max()))], counter), k)

    def _augmented(self, batch: Batch, k: int) -> Batch:
        """A sample's draws depend on its client, its step and its place in the batch, whatever is drawn beside it."""
        if self.planner.source.augment is None:
            return batch
        clients, width = batch.weight.shape
        stream = Stream(self.planner.seed, Use.AUGMENT, self.round, k)
        words = stream.words(4 * width, np.array(self.clients)).reshape(clients, width, 4)
        words = torch.from_numpy(words).to(self.planner.device)
        return batch._replace(samples=self.planner.source.augment(batch.samples, words))

    def samples(self, k: int) -> int:
        """How many samples the clients that are still at work have in batch k."""
        return int((self._at(k) >= 0).sum())

    def full(self) -> list[tuple[Batch, int]]:
        """All of each client's data in pieces; of padding nothing is counted."""
        pieces = []
        for start in range(0, int(self.sizes.max()), FULL_BATCH):
            width = min(FULL_BATCH, int(self.sizes.max()) - start)
            index = np.full((len(self.clients), width), -1)
            for row, rows in zip(index, self.rows, strict=True):
                some = rows[start : start + width]
                row[: len(some)] = some
            pieces.append((self._take(index), int((index[self.steps > 0] >= 0).sum())))
        return pieces

    def _take(self, index: np.ndarray, counter=None) -> Batch:
        # Padding repeats a sample of its own batch: another client's might not be finite, and 0 times that is not 0.
        own = np.array([rows[:1] for rows in self.rows])
        filled = np.where(index < 0, np.where(index[:, :1] < 0, own, index[:, :1]), index)
        at = torch.from_numpy(filled).to(self.planner.device)
        samples = tree_map(self._cast, self.fetch(at))
        return Batch(samples, torch.from_numpy(index >= 0).to(self.planner.device, self.planner.dtype), counter)

    def _cast(self, t):
        t = t.to(self.planner.device)
        return t.to(self.planner.dtype) if t.is_floating_point() else t


@dataclass(frozen=True)
class Planner:
    """Plans the rounds of one experiment."""

    source: object
    participation: object
    effort: Effort
    seed: int
    size: int  # coordinates of the model, for draws over them
    weights: str = "examples"
    variates: str = "shares"
    dropout: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    as_many_as: Planner | None = None  # centralised training takes the steps of this plan's whole cohort

    @property
    def population(self) -> int:
        return self.source.population

    def facts_of_one(self) -> dict[str, torch.Tensor]:
        """What the facts of a client look like."""
        return self.source.facts(0)

    def round(self, r: int) -> Plan:
        clients = self.participation.cohort(r)
        examples = self.source.sizes(clients)
        by_examples = self.weights == "examples"
        uniform = np.ones(len(clients))
        share = uniform / self.population
        if by_examples and self.variates == "shares" and self.source.examples is not None:
            share = examples / self.source.examples
        return Plan(
            clients=clients,
            steps=self.steps(r, examples),
            examples=examples,
            weight=examples / examples.sum() if by_examples else uniform / len(clients),
            share=share,
            lost=self.participation.lost(r, clients),
            feed=lambda ids, steps: Feed(self, r, ids, steps),
            uniform=lambda i, name: self.noise(r, i, name),
            facts=self.source.facts,
        )

    def steps(self, r: int, examples: np.ndarray) -> np.ndarray:
        return (
            self.effort.of(examples) if self.as_many_as is None else self.as_many_as.round(r).steps.sum(keepdims=True)
        )

    def noise(self, round: int, client: int, name: str) -> torch.Tensor:
        stream = Stream(self.seed, Use.ROUNDING, round, zlib.crc32(name.encode()))
        return torch.from_numpy(stream.uniform(self.size, client)).to(self.device, self.dtype)
