"""How labels differ from a baseline: paired at equal seeds, and in what they need to come as far as it does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from undrift.statistics import holm, paired

NEAR = 0.95  # the second target is this much of the baseline's final value


@dataclass(frozen=True)
class Difference:
    """A label less the baseline, on the primary measure, over the seeds that both have."""

    n: int
    mean: float
    half: float | None  # of its t interval; None for one seed
    p: float | None = None
    corrected: float | None = None  # p after Holm's correction; None where none was tested


@dataclass(frozen=True)
class Amount:
    """A median over seeds; where it lies beyond the end of the runs, the end that it lies beyond."""

    value: float
    beyond: bool = False


@dataclass(frozen=True)
class Reached:
    """What the runs of a label need to come to a target."""

    target: float
    k: int  # seeds that came there
    n: int
    rounds: Amount
    bytes: Amount
    gradients: Amount


@dataclass(frozen=True)
class Contrast:
    """A label against the baseline."""

    difference: Difference | None  # None for the baseline, and where no seed has both values
    reached: list[Reached]


def difference(mine: Mapping[int, float | None], base: Mapping[int, float | None]) -> Difference | None:
    """The paired difference of final values by seed; None where a common seed lacks one, for whom would it speak?"""
    seeds = [seed for seed in mine if seed in base]
    if not seeds or any(mine[seed] is None or base[seed] is None for seed in seeds):
        return None
    mean, half, p = paired([mine[seed] - base[seed] for seed in seeds])
    return Difference(len(seeds), mean, half, p)


def corrected(found: Mapping[str, Difference | None], tested: Sequence[str]) -> dict[str, Difference | None]:
    """The same with Holm's correction over the tested labels; the others are shown without p."""
    labels = [label for label in tested if found[label] is not None and found[label].p is not None]
    after = dict(zip(labels, holm([found[label].p for label in labels]), strict=True))
    return {
        label: one and replace(one, p=one.p if label in after else None, corrected=after.get(label))
        for label, one in found.items()
    }


def targets(final: float, lower: bool) -> list[float]:
    """A final value, and one that is a twentieth of it worse."""
    return [final, final + (1 - NEAR) * abs(final) * (1 if lower else -1)]


def reached(runs: Sequence[Sequence[Mapping]], key: str, target: float, lower: bool) -> Reached:
    """The first evaluation of each run (its records) that comes to the target, and the medians over the runs."""
    firsts = [_first(records, key, target, lower) for records in runs]
    ends = [records[-1] for records, first in zip(runs, firsts, strict=True) if first is None]

    def amount(of) -> Amount:
        middle = median(math.inf if first is None else of(first) for first in firsts)
        return Amount(middle) if math.isfinite(middle) else Amount(min(map(of, ends)), beyond=True)

    return Reached(
        target,
        sum(first is not None for first in firsts),
        len(runs),
        amount(lambda record: record["round"]),
        amount(lambda record: (record.get("bytes_down") or 0) + (record.get("bytes_up") or 0)),
        amount(lambda record: record.get("gradients") or 0),
    )


def _first(records: Sequence[Mapping], key: str, target: float, lower: bool) -> Mapping | None:
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value) and (value <= target if lower else value >= target):
            return record
    return None
