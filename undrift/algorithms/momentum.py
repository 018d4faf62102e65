"""Momentum inside the clients' steps: FedCM (Xu et al., 2021)."""

from dataclasses import dataclass

from torch import zeros_like

from ..algorithm import Around
from .ranges import Fraction, Positive


@dataclass(frozen=True)
class ClientMomentum(Around):
    """alpha g + (1-alpha) Delta; Delta+ = the mean of -dx_i / (lr |a_i|), |a_i| the number of steps under plain SGD.
    `raw`: x+ = x - raw Delta+, the paper's server rate in units of gradients; else x+ = x + server_lr mean dx."""

    alpha: Fraction = 0.1
    raw: Positive | None = None

    def init(self, x):
        return {"delta": zeros_like(x)}, {}

    def down(self, info, delta, **rest):
        return self.inner.down(info, **rest) | {"delta": delta}

    def client(self, work, delta, **rest):
        mixed = work.adjust(lambda step, y, grad, a, d: a * grad(y) + (1 - a) * d, a=self.alpha, d=delta)
        return self.inner.client(mixed, **rest)

    def receive(self, info, dx, **up):
        return self.inner.receive(info, dx=dx, **up) | {"slope": -dx / (info.lr * info.effort)}

    def server(self, cohort, delta, slope, dx, **rest):
        dx = dx if self.raw is None else -self.raw * slope
        return self.inner.server(cohort, dx=dx, **rest) | {"delta": slope}
