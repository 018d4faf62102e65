"""Control variates: SCAFFOLD (Karimireddy et al., 2020)."""

from dataclasses import dataclass
from typing import Literal

from torch import zeros_like

from ..algorithm import Around


@dataclass(frozen=True)
class ControlVariates(Around):
    """g - c_i + c; c_i+ = (option 2) the mean of the raw gradients seen, (option 1) grad f_i(x); c = the mean of all
    c_i"""

    option: Literal[1, 2] = 2
    over_all = frozenset({"dc"})

    def init(self, x):
        return {"c": zeros_like(x)}, {"ci": zeros_like(x)}

    def down(self, info, c, **rest):
        return self.inner.down(info, **rest) | {"c": c}

    def client(self, work, x, c, ci, **rest):
        work, seen = work.watch()
        corrected = work.adjust(lambda step, y, grad, ci, c: grad(y) - ci + c, ci=ci, c=c)
        up, mine = self.inner.client(corrected, x=x, **rest)
        new = seen.value if self.option == 2 else work.full_grad(x)
        return up | {"dc": new - ci}, mine | {"ci": ci}

    def commit(self, mine, dc, **sent):
        return self.inner.commit(mine, **sent) | {"ci": mine["ci"] + dc}

    def server(self, cohort, c, dc, **rest):
        return self.inner.server(cohort, **rest) | {"c": c + dc}
