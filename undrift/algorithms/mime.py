"""Mime (Karimireddy et al., 2021): the cohort's mean gradient corrects every step. It takes two exchanges a round."""

from dataclasses import dataclass

from torch import zeros_like

from ..algorithm import Around
from .ranges import Momentum


@dataclass(frozen=True)
class Mime(Around):
    """g(y) - g(x) + c, both g on the same mini-batch; c = the mean of grad f_i(x) over the cohort: all whose first
    upload came, also those whose second one is lost"""

    def survey(self, work, x, **rest):
        return self.inner.survey(work, x=x, **rest) | {"full": work.full_grad(x)}

    def client(self, work, x, full, **rest):
        work = work.adjust(lambda step, y, grad, x, full: grad(y) - grad(x) + full, x=x, full=full)
        return self.inner.client(work, x=x, **rest)

    def server(self, cohort, full, **rest):
        return self.inner.server(cohort, **rest)


@dataclass(frozen=True)
class MimeMomentum(Around):
    """(1-beta) (g(y) - g(x) + c) + beta m; m+ = (1-beta) c + beta m"""

    beta: Momentum = 0.9

    def init(self, x):
        return {"m": zeros_like(x)}, {}

    def survey(self, work, x, **rest):
        return self.inner.survey(work, x=x, **rest) | {"full": work.full_grad(x)}

    def down(self, info, m, **rest):
        return self.inner.down(info, **rest) | {"m": m}

    def client(self, work, x, m, full, **rest):
        def corrected(step, y, grad, x, full, m, b):
            return (1 - b) * (grad(y) - grad(x) + full) + b * m

        return self.inner.client(work.adjust(corrected, x=x, full=full, m=m, b=self.beta), x=x, **rest)

    def server(self, cohort, m, full, **rest):
        return self.inner.server(cohort, **rest) | {"m": (1 - self.beta) * full + self.beta * m}


@dataclass(frozen=True)
class MimeLite(Around):
    """(1-beta) g + beta m; m+ = (1-beta) c + beta m; grad f_i(x) travels with the upload"""

    beta: Momentum = 0.9

    def init(self, x):
        return {"m": zeros_like(x)}, {}

    def down(self, info, m, **rest):
        return self.inner.down(info, **rest) | {"m": m}

    def client(self, work, x, m, **rest):
        work = work.adjust(lambda step, y, grad, m, b: (1 - b) * grad(y) + b * m, m=m, b=self.beta)
        up, mine = self.inner.client(work, x=x, **rest)
        return up | {"full": work.full_grad(x)}, mine

    def commit(self, mine, full, **sent):
        return self.inner.commit(mine, **sent)

    def server(self, cohort, m, full, **rest):
        return self.inner.server(cohort, **rest) | {"m": (1 - self.beta) * full + self.beta * m}
