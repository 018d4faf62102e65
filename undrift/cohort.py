"""Which clients run side by side, and what they keep between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# A chunk that is not full is padded to one of these, so that cohorts of varying size meet few shapes.
LADDER = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)


@dataclass(frozen=True)
class Plan:
    """One experiment's round: who takes part and with what. Arrays are aligned with `clients`."""

    clients: np.ndarray  # ids
    steps: np.ndarray
    examples: np.ndarray
    weight: np.ndarray  # p_i, of the cohort's mean
    share: np.ndarray  # of the population, for fields over all clients
    lost: np.ndarray  # bool: the upload will not arrive
    feed: Callable  # feed(clients, steps) -> Feed: their mini-batches; steps 0: padding
    uniform: Callable[[int, str], Tensor]  # uniform(client, name) -> [P] in [0, 1)
    facts: Callable[[int], dict[str, Tensor]]
    cover: Callable[[int], Tensor] | None = None  # cover(client) -> [P] bool


@dataclass(frozen=True)
class Lead:
    """The leading axes of a chunk: none, (C,) or (R, C)."""

    shape: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int]:
        """(R, C), 1 where there is no such axis."""
        return (1, 1, *self.shape)[-2:]

    def lay(self, v: Tensor) -> Tensor:
        """[R, C, ...] -> [*lead, ...]"""
        return v.reshape(*self.shape, *v.shape[2:])

    def wide(self, v: Tensor) -> Tensor:
        """A vector for all -> one for each: [*lead, n]."""
        return v.expand(*self.shape, v.shape[-1])

    def rows(self, v: Tensor) -> Tensor:
        """[*lead, n] (or fewer axes) -> [R, C, n]"""
        return self.wide(v).reshape(*self.grid, v.shape[-1])

    def total(self, v: Tensor) -> Tensor:
        """The sum over the clients, whose axis stays as 1."""
        return v.sum(-2, keepdim=True) if self.shape else v


@dataclass(frozen=True)
class Chunk:
    """Clients that run side by side: positions in each plan's cohort, [R, C]; -1 is padding."""

    lead: Lead
    picks: np.ndarray

    @property
    def real(self) -> np.ndarray:
        return self.picks >= 0

    def of(self, plans: list[Plan], field: str) -> np.ndarray:
        """[R, C] of a plan's array; padding repeats the last client."""
        return np.stack([getattr(p, field)[row] for p, row in zip(plans, self.picks, strict=True)])


def padded(n: int, size: int) -> int:
    return min((s for s in LADDER if s >= n), default=size) if n < size else size


def chunks(plans: list[Plan], size: int, batched: bool, replicas: bool) -> Iterator[Chunk]:
    """Clients of similar length together, at most `size` of them; one at a time where nothing is batched."""
    orders = [np.argsort(-p.steps, kind="stable") for p in plans]
    longest = max(len(order) for order in orders)
    size = size if batched else 1
    start = 0
    while start < longest:
        n = min(size, longest - start)
        c = padded(n, size)
        picks = np.full((len(plans), c), -1)
        for row, order in zip(picks, orders, strict=True):
            some = order[start : start + n]
            row[: len(some)] = some
        yield Chunk(Lead((len(plans), c) if replicas else (c,) if batched else ()), picks)
        start += n


class States:
    """What clients keep, only for those that have anything: rows [n, P] a field, and the round in which each last
    counted."""

    def __init__(self, fresh: dict[str, Tensor]):
        self.fresh = fresh  # [P] each: a client that was never seen
        self.row: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.fields = {k: v.new_empty(0, *v.shape) for k, v in fresh.items()}
        self.changed: set[int] = set()

    def read(self, clients: list[int]) -> dict[str, Tensor]:
        """{field: [C, P]}"""
        known = [i in self.row for i in clients]
        out = {}
        for k, stored in self.fields.items():
            rows = self.fresh[k].expand(len(clients), -1).clone()
            if any(known):
                rows[torch.tensor(known)] = stored[[self.row[i] for i in clients if i in self.row]]
            out[k] = rows
        return out

    def age(self, client: int, round: int) -> float:
        return round - self.last[client] if client in self.last else float("inf")

    def write(self, clients: list[int], rows: dict[str, Tensor], round: int) -> None:
        if not clients:
            return
        for i in clients:
            self.row.setdefault(i, len(self.row))
            self.last[i] = round
        self.changed.update(clients)
        index = torch.tensor([self.row[i] for i in clients])
        for k, stored in self.fields.items():
            if len(self.row) > len(stored):
                grown = stored.new_empty(max(2 * len(stored), len(self.row)), *stored.shape[1:])
                grown[: len(stored)] = stored
                self.fields[k] = stored = grown
            stored[index] = rows[k].to(stored)

    def rows(self, clients) -> dict[str, Tensor]:
        """The rows of these clients as a checkpoint holds them; {} where there are none."""
        clients = sorted(clients)
        if not clients:
            return {}
        index = [self.row[i] for i in clients]
        return {
            "clients": torch.tensor(clients),
            "last": torch.tensor([self.last[i] for i in clients]),
            **{k: stored[index] for k, stored in self.fields.items()},
        }

    def restore(self, rows: dict[str, Tensor]) -> None:
        if rows:
            for i, last in zip(rows["clients"].tolist(), rows["last"].tolist(), strict=True):
                self.row[i], self.last[i] = len(self.row), last
            self.fields = {k: rows[k].to(v.dtype) for k, v in self.fields.items()}
