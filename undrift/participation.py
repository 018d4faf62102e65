"""Who takes part in a round, as functions of the seed and the round alone, in O(cohort) time and memory."""

from __future__ import annotations

import math

import numpy as np

from undrift.errors import BadInput
from undrift.registry import Registry
from undrift.rng import Stream, Use


class Participation:
    """`cohort(round)` says who takes part; a share `lost` of the uploads never arrives."""

    def __init__(self, population: int, seed: int, lost: float):
        if not 0 <= lost < 1:
            raise BadInput(
                f"participation.lost is {lost}, but the share of lost uploads lies between 0 and 1, without 1"
            )
        self.population, self.seed, self.share_lost = population, seed, lost

    def cohort(self, round: int) -> np.ndarray:
        """The clients of a round, sorted, int64, never empty."""
        raise NotImplementedError(f"{type(self).__name__} must define cohort(round)")

    def lost(self, round: int, clients: np.ndarray) -> np.ndarray:
        """[clients] bool: whose upload is lost in this round."""
        return Stream(self.seed, Use.LOST, round).uniform(1, clients)[:, 0] < self.share_lost


class Uniform(Participation):
    """`clients` of the population in each round, every set equally likely."""

    def __init__(self, population: int, seed: int, clients: int = 10, lost: float = 0.0):
        super().__init__(population, seed, lost)
        self.clients = _fitting(clients, population)

    def cohort(self, round: int) -> np.ndarray:
        return Stream(self.seed, Use.COHORT, round).subset(self.population, self.clients)


class Bernoulli(Participation):
    """Each client takes part with probability `rate`, or `clients` / population; a round without any is drawn anew."""

    def __init__(
        self, population: int, seed: int, rate: float | None = None, clients: float | None = None, lost: float = 0.0
    ):
        super().__init__(population, seed, lost)
        if (rate is None) == (clients is None):
            raise BadInput(
                "participation: bernoulli needs either rate (a probability) or clients (how many are expected)"
            )
        if rate is None:
            rate = _fitting(clients, population) / population
        if not 0 < rate <= 1:
            raise BadInput(f"participation.rate is {rate}, but a probability above 0 and at most 1 is needed")
        self.rate = rate

    def cohort(self, round: int) -> np.ndarray:
        if self.rate == 1:
            return np.arange(self.population)
        stream, expected = Stream(self.seed, Use.COHORT, round), self.rate * self.population
        block = math.ceil(expected + 5 * math.sqrt(expected)) + 4
        log_miss = math.log1p(-self.rate)
        found, last, lane = [], -1, 0
        while last < self.population:
            u = stream.uniform(block, lane)
            if lane == 0:  # the first gap is shorter than the population: the round is not empty
                u[0] *= -math.expm1(self.population * log_miss)
            gaps = np.minimum(np.floor(np.log1p(-u) / log_miss), self.population).astype(np.int64)
            if lane == 0:
                gaps[0] = min(gaps[0], self.population - 1)  # against rounding
            found.append(last + np.cumsum(gaps + 1))
            last, lane = int(found[-1][-1]), lane + 1
        chosen = np.concatenate(found)
        return chosen[chosen < self.population]


class Cyclic(Participation):
    """The groups of one fixed permutation in turn: group r mod period, about `clients` in each.

    The period is round(population / clients), which is GHBM's default tau; groups differ by at most one client.
    """

    def __init__(self, population: int, seed: int, clients: int = 10, lost: float = 0.0):
        super().__init__(population, seed, lost)
        self.period = max(1, round(population / _fitting(clients, population)))

    def cohort(self, round: int) -> np.ndarray:
        group = round % self.period
        least, more = divmod(
            self.population, self.period
        )  # the first `more` groups have one client more, as array_split
        start = group * least + min(group, more)
        places = np.arange(start, start + least + (group < more))
        return np.sort(Stream(self.seed, Use.COHORT).scattered(places, self.population))


def _fitting(clients, population: int):
    if not 0 < clients <= population:
        raise BadInput(
            f"participation.clients is {clients}, but the data have {population} clients; choose 1 to {population}"
            if clients > population
            else f"participation.clients is {clients}, but must be at least 1"
        )
    return clients


participations = Registry("participation")
participations.add("uniform", Uniform)
participations.add("bernoulli", Bernoulli)
participations.add("cyclic", Cyclic)
