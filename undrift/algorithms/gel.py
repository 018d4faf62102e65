"""GEL: a client that made few steps guesses the rest (Kim et al., 2025)."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from ..algorithm import Around
from ..optim import SGD
from .ranges import Momentum


@dataclass(frozen=True)
class GEL(Around):
    """After its K steps the local optimizer takes n more with gradient 0: n = max(target - K, 0), or `guesses`
    ("inf": all there are).
    `momentum` makes the clients FedAvgCM's, SGD with that momentum; else the optimizer stays what [local] says."""

    guesses: int | Literal["inf"] = 0
    target: int | None = None
    momentum: Momentum | None = None

    def local(self, info, local):
        optimizer = local.optimizer if self.momentum is None else SGD(self.momentum)
        guesses = math.inf if self.guesses == "inf" else self.guesses
        guessing = replace(local, optimizer=optimizer, guesses=guesses, target=self.target)
        return self.inner.local(info, guessing)
