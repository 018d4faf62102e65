"""What a few seeds allow one to say: Student's t, without scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev


def coverage(t: float, df: int) -> float:
    """P(|T| < t) for Student's t with whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    return _coverage(math.atan(t / math.sqrt(df)), df)


def _coverage(angle: float, df: int) -> float:
    # Finite sums, exact for whole degrees of freedom: each term is the last one times cos^2 and the next fraction.
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, df + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def t_quantile(df: int, level: float = 0.95) -> float:
    """The t that |T| stays below with probability `level`: 12.706 for one degree of freedom, 1.96 for very many."""
    low, high = 0.0, math.pi / 2  # of the angle atan(t / sqrt(df)), in which the coverage is smooth and bounded
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _coverage(middle, df) < level else (low, middle)
    return math.tan(low) * math.sqrt(df)


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None]:
    """The mean and half the width of its t interval: None for one value, which says nothing about chance."""
    if len(values) < 2:
        return fmean(values), None
    return fmean(values), t_quantile(len(values) - 1, level) * stdev(values) / math.sqrt(len(values))


def two_sided(t: float, df: int) -> float:
    """P(|T| >= |t|): how often chance alone gives a t at least as far from zero."""
    return max(0.0, 1.0 - coverage(abs(t), df))


def paired(differences: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean of paired differences, half its t interval, and p of a mean of zero: None and None for one pair."""
    mean, half = interval(differences)
    if half is None:
        return mean, None, None
    error = stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return mean, half, 1.0 if mean == 0 else 0.0
    return mean, half, two_sided(mean / error, len(differences) - 1)


def holm(ps: Sequence[float]) -> list[float]:
    """Each p after Holm's correction for so many tests: the smallest times n, the next times n - 1, never falling."""
    corrected, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = least
    return corrected
