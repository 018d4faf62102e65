"""Optimizers on the server: FedAvgM (Hsu et al., 2019), FedOpt (Reddi et al., 2021), FedACG's lookahead (Kim et al.,
2024)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import zeros_like

from ..algorithm import Around
from .ranges import Momentum, Positive


@dataclass(frozen=True)
class ServerMomentum(Around):
    """v+ = beta v + dx; x+ = x + server_lr v+"""

    beta: Momentum = 0.9

    def init(self, x):
        return {"v": zeros_like(x)}, {}

    def server(self, cohort, v, dx, **rest):
        v = self.beta * v + dx
        return self.inner.server(cohort, dx=v, **rest) | {"v": v}


@dataclass(frozen=True)
class Adaptive(Around):
    """m+ = b1 m + (1-b1) dx; x+ = x + server_lr m+ / (sqrt(v+) + adaptivity); v = adaptivity^2 at the start
    adam: v+ = b2 v + (1-b2) dx^2;  yogi: v+ = v - (1-b2) dx^2 sign(v - dx^2);  adagrad: v+ = v + dx^2"""

    kind: Literal["adam", "yogi", "adagrad"] = "adam"
    b1: Momentum = 0.9
    b2: Momentum = 0.99
    adaptivity: Positive = 1e-3

    def init(self, x):
        return {"mean": zeros_like(x), "square": zeros_like(x) + self.adaptivity**2}, {}

    def server(self, cohort, mean, square, dx, **rest):
        m, d2 = self.b1 * mean + (1 - self.b1) * dx, dx**2
        match self.kind:
            case "adam":
                v = self.b2 * square + (1 - self.b2) * d2
            case "yogi":
                v = square - (1 - self.b2) * d2 * torch.sign(square - d2)
            case "adagrad":
                v = square + d2
        dx = m / (v.sqrt() + self.adaptivity)
        return self.inner.server(cohort, dx=dx, **rest) | {"mean": m, "square": v}


@dataclass(frozen=True)
class Lookahead(Around):
    """FedACG: send Phi = x + lam m and continue from Phi; m+ = x+ - x"""

    lam: Momentum = 0.85

    def init(self, x):
        return {"ahead": zeros_like(x)}, {}

    def down(self, info, x, ahead, **rest):
        return self.inner.down(info, x=x + self.lam * ahead, **rest)

    def server(self, cohort, x, ahead, **rest):
        new = self.inner.server(cohort, x=x + self.lam * ahead, **rest)
        return new | {"ahead": new["x"] - x}
