from dataclasses import dataclass

from undrift import Around


@dataclass(frozen=True)
class SlowPull(Around):
    """g + mu (y - s): a pull towards s, a slow average of the server's models; s+ = rho s + (1 - rho) x"""

    mu: float = 0.1
    rho: float = 0.9

    def init(self, x):
        return {"slow": x}, {}

    def down(self, info, slow, **rest):
        return self.inner.down(info, **rest) | {"slow": slow}

    def client(self, work, slow, **rest):
        work = work.adjust(lambda step, y, grad, s, mu: grad(y) + mu * (y - s), s=slow, mu=self.mu)
        return self.inner.client(work, **rest)

    def server(self, cohort, x, slow, **rest):
        return self.inner.server(cohort, x=x, **rest) | {"slow": self.rho * slow + (1 - self.rho) * x}
