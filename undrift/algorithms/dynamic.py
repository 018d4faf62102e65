"""Dynamic regularisation: FedDyn (Acar et al., 2021), AdaBest (Varno et al., 2022), FedDC (Gao et al., 2022)."""

from dataclasses import dataclass
from typing import Literal

from torch import zeros_like

from ..algorithm import Around
from .ranges import NotNegative, Positive


@dataclass(frozen=True)
class Dyn(Around):
    """g - h_i + alpha (y - x); h_i+ = h_i - alpha dx_i; h = the mean of all h_i; x+ = x + mean dx - h / alpha"""

    alpha: Positive = 0.1
    over_all = frozenset({"dh"})

    def init(self, x):
        return {"h": zeros_like(x)}, {"hi": zeros_like(x)}

    def client(self, work, x, hi, **rest):
        work = work.adjust(lambda step, y, grad, x, h, a: grad(y) - h + a * (y - x), x=x, h=hi, a=self.alpha)
        up, mine = self.inner.client(work, x=x, **rest)
        return up, mine | {"hi": hi}

    def commit(self, mine, dx, **sent):
        return self.inner.commit(mine, dx=dx, **sent) | {"hi": mine["hi"] - self.alpha * dx}

    def receive(self, info, dx, **up):
        return self.inner.receive(info, dx=dx, **up) | {"dh": -self.alpha * dx}

    def server(self, cohort, h, dh, **rest):
        h, new = h + dh, self.inner.server(cohort, **rest)
        return new | {"h": h, "x": new["x"] - h / self.alpha}


@dataclass(frozen=True)
class AdaBest(Around):
    """g - h_i; h_i+ = h_i / (t - t_i) - mu dx_i; bar+ = x + mean dx; x+ = bar+ - beta (bar - bar+)"""

    mu: NotNegative = 0.02
    beta: NotNegative = 0.85

    def init(self, x):
        return {"bar": x}, {"hi": zeros_like(x)}

    def client(self, work, hi, **rest):
        up, mine = self.inner.client(work.adjust(lambda step, y, grad, h: grad(y) - h, h=hi), **rest)
        return up, mine | {"hi": hi / work.info.age}

    def commit(self, mine, dx, **sent):
        return self.inner.commit(mine, dx=dx, **sent) | {"hi": mine["hi"] - self.mu * dx}

    def server(self, cohort, bar, **rest):
        new = self.inner.server(cohort, **rest)
        return new | {"bar": new["x"], "x": new["x"] - self.beta * (bar - new["x"])}


@dataclass(frozen=True)
class DC(Around):
    """g + alpha (y - x + h_i) - c_i + c; h_i+ = h_i + dx_i; x+ = x + mean dx + the mean of all h_i
    c_i+ = the mean over the steps of g + alpha (y - x + h_i), or (`variate` raw) of g; c = the mean of all c_i
    `drift` cohort, the paper's form: x+ = x + mean (dx_i + h_i+); h_i travels added to dx_i."""

    alpha: NotNegative = 0.1
    drift: Literal["all", "cohort"] = "all"
    variate: Literal["loss", "raw"] = "loss"
    over_all = frozenset({"dc", "dh"})

    def init(self, x):
        return {"c": zeros_like(x), "h": zeros_like(x)}, {"ci": zeros_like(x), "hi": zeros_like(x)}

    def down(self, info, c, **rest):
        return self.inner.down(info, **rest) | {"c": c}

    def client(self, work, x, c, ci, hi, **rest):
        work, raw = work.watch()
        work = work.adjust(lambda step, y, grad, x, h, a: grad(y) + a * (y - x + h), x=x, h=hi, a=self.alpha)
        work, loss = work.watch()
        work = work.adjust(lambda step, y, grad, ci, c: grad(y) - ci + c, ci=ci, c=c)
        up, mine = self.inner.client(work, x=x, **rest)
        seen = raw if self.variate == "raw" else loss
        dx = up["dx"] if self.drift == "all" else 2 * up["dx"] + hi
        return up | {"dx": dx, "dc": seen.value - ci}, mine | {"ci": ci, "hi": hi}

    def commit(self, mine, dx, dc, **sent):
        h = mine["hi"] + dx if self.drift == "all" else (mine["hi"] + dx) / 2
        return self.inner.commit(mine, dx=dx, **sent) | {"ci": mine["ci"] + dc, "hi": h}

    def receive(self, info, dx, **up):
        return self.inner.receive(info, dx=dx, **up) | {"dh": dx}

    def server(self, cohort, c, h, dc, dh, **rest):
        h, new = h + dh, self.inner.server(cohort, **rest)
        return new | {"c": c + dc, "h": h, "x": new["x"] + h if self.drift == "all" else new["x"]}
