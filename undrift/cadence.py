"""When to save a checkpoint: every N rounds, or so seldom that it costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

SHORTEST = 1.0  # seconds between two saves
SHARE = 0.01  # of the time may go into saving


class Cadence:
    """Says when a save is due, for `run.checkpoint_every`."""

    def __init__(self, every: Literal["auto"] | int, clock: Callable[[], float] = time.monotonic):
        self._every = every
        self._clock = clock
        self._since = clock()
        self._wait = SHORTEST

    def due(self, round: int) -> bool:
        """Whether to save after `round` complete rounds."""
        if self._every == "auto":
            return self._clock() - self._since >= self._wait
        return round % self._every == 0

    def saved(self, cost: float) -> None:
        """Tells that a save has just ended that took `cost` seconds."""
        self._since = self._clock()
        self._wait = max(SHORTEST, cost / SHARE)
