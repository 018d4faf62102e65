"""FedADC (Ozfatura et al., 2021): the server's momentum inside the clients' steps."""

from dataclasses import dataclass

from torch import zeros_like

from ..algorithm import Around
from .ranges import Momentum, Positive


@dataclass(frozen=True)
class ADC(Around):
    """g + mbar, mbar = beta_l m / K (Nesterov: the gradient at y - lr mbar)
    m+ = -mean dx / lr + (beta_g - beta_l) m; x+ = x - alpha lr m+"""

    beta_g: Momentum = 0.9
    beta_l: Momentum = 0.9
    alpha: Positive = 1.0
    nesterov: bool = False

    def init(self, x):
        return {"m": zeros_like(x)}, {}

    def down(self, info, m, **rest):
        return self.inner.down(info, **rest) | {"m": m}

    def client(self, work, m, **rest):
        bar = self.beta_l * m / work.info.steps
        if self.nesterov:
            work = work.adjust(lambda step, y, grad, bar: grad(y - step.lr * bar) + bar, bar=bar)
        else:
            work = work.adjust(lambda step, y, grad, bar: grad(y) + bar, bar=bar)
        return self.inner.client(work, **rest)

    def server(self, cohort, m, dx, **rest):
        m = -dx / cohort.lr + (self.beta_g - self.beta_l) * m
        return self.inner.server(cohort, dx=-self.alpha * cohort.lr * m, **rest) | {"m": m}
