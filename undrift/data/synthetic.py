"""Generated classification problems whose clients differ: LEAF's and FedProx's synthetic data.

A client's data are a function of the seed and its number, made when asked for: neither the order of the asking nor the
number of clients changes them, and ten million clients cost no more than ten. The test clients are 100 fixed ones with
numbers that no population reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from undrift.data.source import Samples, Source, join, length, move
from undrift.errors import BadInput
from undrift.rng import Stream, Use

OUTSIDE = 1 << 40  # the number of the first test client
TEST_CLIENTS = 100
RECENT = 128  # clients kept, so that one asked for several times in a round is made once,
RECENT_SAMPLES = 1 << 18  # and samples of them


class Draw(IntEnum):
    """What a draw of generated data is for."""

    SIZE = 1
    MODEL = 2
    CENTRE = 3
    INPUTS = 4
    NOISE = 5
    CLUSTER = 6
    SHARED = 7


class Generated(Source):
    """Clients made on demand; a problem says how many samples a client has and what they are."""

    countable = 1_000_000

    def __init__(self, clients: int, seed: int, classes: int, dim: int):
        for name, value, most in (("clients", clients, OUTSIDE), ("classes", classes, 1 << 20), ("dim", dim, 1 << 20)):
            if not 1 <= value <= most:
                raise BadInput(f"data.{name} is {value}, but must be from 1 to {most}")
        self.population, self.classes, self.dim, self.seed = clients, classes, dim, seed
        self._deviations = np.arange(1, dim + 1) ** -0.6  # of the inputs: variances j^-1.2
        self._recent: dict[int, Samples] = {}

    def _lengths(self, clients: np.ndarray) -> np.ndarray:
        """How many samples these clients have, int64."""
        raise NotImplementedError(f"{type(self).__name__} must define _lengths(clients)")

    def _make(self, i: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Client i's inputs [n, dim] and classes [n]."""
        raise NotImplementedError(f"{type(self).__name__} must define _make(i, n)")

    def size(self, i: int) -> int:
        return int(self._lengths(np.array([i]))[0])

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        return self._lengths(np.asarray(clients, dtype=np.int64))

    def client(self, i: int) -> Samples:
        found = self._recent.pop(i, None)
        if found is None:
            x, y = self._make(i, self.size(i))
            found = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)
        self._recent[i] = found  # now the latest
        while len(self._recent) > RECENT or sum(map(length, self._recent.values())) > RECENT_SAMPLES:
            self._recent.pop(next(iter(self._recent)))
        return move(found, self.device)

    def groups(self) -> Sequence[Samples]:
        return self._test_clients

    def test(self) -> Samples:
        return join(self._test_clients)

    @property
    def _test_clients(self) -> list[Samples]:
        if not hasattr(self, "_tests"):
            self._tests = [self.client(OUTSIDE + k) for k in range(TEST_CLIENTS)]
        return self._tests

    def to(self, device: torch.device | str) -> Generated:
        moved = super().to(device)
        moved._recent = {}
        if hasattr(moved, "_tests"):
            del moved._tests
        return moved

    def _draw(self, use: Draw) -> Stream:
        return Stream(self.seed, Use.DATA, use)

    def _inputs(self, i: int, n: int, centre: np.ndarray) -> np.ndarray:
        """[n, dim] from N(centre, diag(j^-1.2))."""
        return centre + self._draw(Draw.INPUTS).normal(n * self.dim, i).reshape(n, self.dim) * self._deviations


class Synthetic(Generated):
    """LEAF's synthetic data (Caldas et al., 2018).

    W_k = Q m_k with m_k ~ N(mean of the client's cluster, 0.1), inputs (1, x) with x ~ N(v_k, diag(j^-1.2)),
    v_k ~ N(B_k, 1), B_k ~ N(0, 1), y = argmax of x W_k + N(0, 0.1); min(int(lognormal(3, 2)) + 5, 1000) samples.
    """

    def __init__(self, seed: int, clients: int = 1000, classes: int = 10, dim: int = 60, clusters: int = 2):
        super().__init__(clients, seed, classes, dim)
        if clusters < 1:
            raise BadInput(f"data.clusters is {clusters}, but must be at least 1")
        rows = dim + 1
        self._q = self._draw(Draw.SHARED).normal(rows * classes * clusters).reshape(rows, classes, clusters)
        means = self._draw(Draw.CLUSTER).normal(clusters * (clusters + 1)).reshape(clusters, clusters + 1)
        self._means = means[:, :1] + means[:, 1:]  # N(loc, 1) with loc ~ N(0, 1), one of `clusters` numbers each

    def _lengths(self, clients: np.ndarray) -> np.ndarray:
        return np.minimum(_lognormal(self._draw(Draw.SIZE), clients, 3) + 5, 1000)

    def _make(self, i: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        clusters = len(self._means)
        cluster = int(self._draw(Draw.CLUSTER).below([clusters], i + 1)[0])  # lane 0 holds the means
        m = self._means[cluster] + 0.1 * self._draw(Draw.MODEL).normal(clusters, i)
        centre = self._draw(Draw.CENTRE).normal(self.dim + 1, i)
        x = self._inputs(i, n, centre[0] + centre[1:])
        w = np.einsum("dkc,c->dk", self._q, m)  # [dim + 1, classes]
        noise = 0.1 * self._draw(Draw.NOISE).normal(n * self.classes, i).reshape(n, self.classes)
        return x, (_logits(x, w) + noise).argmax(1)


class SyntheticProx(Generated):
    """FedProx's Synthetic(alpha, beta) (Li et al., 2020).

    W_k, b_k ~ N(u_k, 1) with u_k ~ N(0, alpha), x ~ N(v_k, diag(j^-1.2)) with v_k ~ N(B_k, 1), B_k ~ N(0, beta),
    y = argmax of x W_k + b_k; alpha and beta are standard deviations, as in the published code (u_k moves all logits
    alike, so that alpha changes no label). With `iid` all clients share one W, b ~ N(0, 1) and v = 0, whatever alpha
    and beta. int(lognormal(4, 2)) + 50 samples, 100,000 at most (the published 30 clients never come near; of ten
    million clients a few would have millions).
    """

    def __init__(
        self,
        seed: int,
        clients: int = 30,
        alpha: float = 1.0,
        beta: float = 1.0,
        iid: bool = False,
        classes: int = 10,
        dim: int = 60,
    ):
        super().__init__(clients, seed, classes, dim)
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 <= value < np.inf:
                raise BadInput(f"data.{name} is {value}, but must be 0 or more")
        self.alpha, self.beta, self.iid = alpha, beta, iid

    def _lengths(self, clients: np.ndarray) -> np.ndarray:
        return np.minimum(_lognormal(self._draw(Draw.SIZE), clients, 4) + 50, 100_000)

    def _make(self, i: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        weights = (self.dim + 1) * self.classes
        if self.iid:
            w, centre = self._draw(Draw.SHARED).normal(weights), np.zeros(self.dim)
        else:
            w = self._draw(Draw.MODEL).normal(weights + 1, i)
            w = self.alpha * w[0] + w[1:]
            centre = self._draw(Draw.CENTRE).normal(self.dim + 1, i)
            centre = self.beta * centre[0] + centre[1:]
        w = w.reshape(self.dim + 1, self.classes)
        x = self._inputs(i, n, centre)
        return x, _logits(x, w).argmax(1)


def _logits(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """[n, classes]. By einsum, not BLAS, whose sums may depend on the number of threads."""
    return w[0] + np.einsum("nd,dk->nk", x, w[1:])


def _lognormal(stream: Stream, clients: np.ndarray, mean: float) -> np.ndarray:
    """int(lognormal(mean, 2)) of each client."""
    return np.exp(mean + 2 * stream.normal(1, clients)[:, 0]).astype(np.int64)
