"""The base: plain averaging, and training without a federation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..algorithm import Algorithm
from ..work import Work
from .ranges import Positive


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """x+ = x + server_lr sum_i p_i (y_i - x)   (McMahan et al., 2017)"""

    server_lr: Positive = 1.0
    solve: Callable = Work.descend

    def init(self, x):
        return {"x": x}, {}

    def down(self, info, x, **_):
        return {"x": x}

    def client(self, work, x):
        return {"dx": self.solve(work, x) - x}, {}

    def server(self, cohort, x, dx):
        return {"x": x + self.server_lr * dx}


@dataclass(frozen=True)
class Centralised(FedAvg):
    """All data in one place, as many steps as the cohort's together: the ceiling, not a federated method.
    Nothing travels."""

    sends = False
