"""Momentum from a history of models: GHBM, LocalGHBM and FedHBM (Zaccone et al., 2025).

Their terms are not scaled by the local rate; they are additions to the step and so reach the gradient divided by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import zeros_like

from ..algorithm import Around
from ..work import Work
from .ranges import Fraction, NotNegative, Positive


def push(work: Work, u, nesterov: bool = False) -> Work:
    """y <- y - lr g + u   (Nesterov: g at y + u)"""
    if nesterov:
        return work.adjust(lambda step, y, grad, u: grad(y + u) - u / step.lr, u=u)
    return work.adjust(lambda step, y, grad, u: grad(y) - u / step.lr, u=u)


@dataclass(frozen=True)
class GHBM(Around):
    """y <- y - lr g + beta / (tau K) (x_t - x_{t-tau})   (eq. 7)
    before round tau: x_{<0} = x_0 (`warmup` pad), or no term (zero)"""

    tau: int
    beta: NotNegative = 0.9
    warmup: Literal["pad", "zero"] = "pad"
    nesterov: bool = False
    always = frozenset({"past"})

    def init(self, x):
        return {"past": (x,) * self.tau}, {}  # x_{t-1}, ..., x_{t-tau}

    def down(self, info, x, past, **rest):
        ready = self.warmup == "pad" or info.round >= self.tau
        return self.inner.down(info, x=x, **rest) | {"trend": ready * (x - past[-1]) / self.tau}

    def client(self, work, trend, **rest):
        return self.inner.client(push(work, self.beta / work.info.steps * trend, self.nesterov), **rest)

    def server(self, cohort, x, past, **rest):
        return self.inner.server(cohort, x=x, **rest) | {"past": (x, *past[:-1])}


@dataclass(frozen=True)
class ServerGHBM(Around):
    """x+ = x + server_lr dx + beta / tau (x_t - x_{t-tau})   (C.8)"""

    tau: int
    beta: NotNegative = 0.9
    warmup: Literal["pad", "zero"] = "pad"
    always = frozenset({"past"})

    def init(self, x):
        return {"past": (x,) * self.tau}, {}

    def server(self, cohort, x, past, **rest):
        ready = self.warmup == "pad" or cohort.round >= self.tau
        new = self.inner.server(cohort, x=x, **rest)
        return new | {"x": new["x"] + ready * self.beta / self.tau * (x - past[-1]), "past": (x, *past[:-1])}


@dataclass(frozen=True)
class TheoryGHBM(Around):
    """beta g + (1-beta) m; G = the mean g; m+ = (1-beta) m + beta (the mean of the last tau G); x+ = x - rate m+
    (Algorithm 3). Before round tau the mean is over what there is (skip), or what there is not counts 0 (zero)."""

    tau: int
    rate: Positive
    beta: Fraction = 0.1
    missing: Literal["skip", "zero"] = "skip"

    def init(self, x):
        return {"m": zeros_like(x), "seen": (zeros_like(x),) * self.tau}, {}

    def down(self, info, m, **rest):
        return self.inner.down(info, **rest) | {"m": m}

    def client(self, work, m, **rest):
        work = work.adjust(lambda step, y, grad, b, m: b * grad(y) + (1 - b) * m, b=self.beta, m=m)
        return self.inner.client(work, **rest)

    def receive(self, info, dx, **up):
        return self.inner.receive(info, dx=dx, **up) | {"slope": -dx / (info.lr * info.effort)}

    def server(self, cohort, m, seen, slope, dx, **rest):
        seen = ((slope - (1 - self.beta) * m) / self.beta, *seen[:-1])
        n = self.tau if self.missing == "zero" else min(cohort.round + 1, self.tau)
        m = (1 - self.beta) * m + self.beta * sum(seen) / n
        return self.inner.server(cohort, dx=-self.rate * m, **rest) | {"m": m, "seen": seen}


@dataclass(frozen=True)
class LocalGHBM(Around):
    """y <- y - lr g + beta / (tau_i K) (p - a_i), tau_i = rounds since the last visit; nothing at the first
    p, a_i: the received model, and the one received then (LocalGHBM); `moving`: p = y, the present local model;
    `own_anchor`: a_i = the client's own final model of then. Both: FedHBM. `share`: in the place of 1 / tau_i."""

    beta: NotNegative = 0.9
    share: Fraction | None = None
    moving: bool = False
    own_anchor: bool = False

    def init(self, x):
        return {}, {"anchor": zeros_like(x)}

    def client(self, work, x, anchor, **rest):
        info = work.info
        weight = self.beta * (1 / info.age if self.share is None else self.share * info.visited) / info.steps
        if self.moving:
            work = work.adjust(lambda step, y, grad, w, a: grad(y) - w * (y - a) / step.lr, w=weight, a=anchor)
        else:
            work = push(work, weight * (x - anchor))
        up, mine = self.inner.client(work, x=x, **rest)
        return up, mine | {"anchor": x + up["dx"] if self.own_anchor else x}
