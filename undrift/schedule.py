"""The local learning rate by round."""

from __future__ import annotations

import math
from collections.abc import Callable


def rates(lr: float, table: dict | None, rounds: int) -> Callable[[int], float]:
    """rate(r) of round r = 0, 1, ...; `rounds` is the length of a cosine that names none."""
    match table:
        case None:
            return lambda r: lr
        case {"name": "exponential", "decay": decay}:
            return lambda r: lr * decay**r
        case {"name": "cosine", "final": final, "rounds": given}:
            n = given or rounds
            return lambda r: final + (lr - final) * (1 + math.cos(math.pi * min(r / n, 1))) / 2
        case {"name": "steps", "at": at, "factor": factor}:
            return lambda r: lr * factor ** sum(r >= a for a in at)
    raise ValueError(f"unknown schedule {table}")


def rests_on_rounds(table: dict | None) -> bool:
    """Whether a longer run would have had other rates from the start."""
    return table is not None and table["name"] == "cosine" and table["rounds"] is None
