"""FedProx (Li et al., 2020)."""

from dataclasses import dataclass

from ..algorithm import Around
from .ranges import NotNegative


@dataclass(frozen=True)
class Prox(Around):
    """g + mu (y - x), x the model received."""

    mu: NotNegative = 0.01

    def client(self, work, x, **rest):
        work = work.adjust(lambda step, y, grad, x, mu: grad(y) + mu * (y - x), x=x, mu=self.mu)
        return self.inner.client(work, x=x, **rest)
