"""Mime (Karimireddy et al., 2021): the cohort's mean gradient corrects every step. It takes two exchanges a round."""

from dataclasses import dataclass

from ..algorithm import Around


@dataclass(frozen=True)
class Mime(Around):
    """g(y) - g(x) + c, both g on the same mini-batch; c = the mean of grad f_i(x) over the cohort"""

    def survey(self, work, x, **rest):
        return self.inner.survey(work, x=x, **rest) | {"full": work.full_grad(x)}

    def client(self, work, x, full, **rest):
        work = work.adjust(lambda step, y, grad, x, full: grad(y) - grad(x) + full, x=x, full=full)
        return self.inner.client(work, x=x, **rest)

    def server(self, cohort, full, **rest):
        return self.inner.server(cohort, **rest)
