"""FedNova (Wang et al., 2020): clients that made more steps weigh no more for it."""

from dataclasses import dataclass

from ..algorithm import Around


@dataclass(frozen=True)
class Nova(Around):
    """x+ = x + (sum_i p_i |a_i|) sum_i p_i dx_i / |a_i|, |a_i| the client's effort, guesses included"""

    def receive(self, info, **up):
        up = self.inner.receive(info, **up)
        return up | {"dx": up["dx"] / info.effort, "effort": info.effort}

    def server(self, cohort, dx, effort, **rest):
        return self.inner.server(cohort, dx=effort * dx, **rest)
