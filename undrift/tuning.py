"""The search before a comparison: every label at every setting of its grid, judged by data that it did not train on.

Tuning runs hold out a share of every client's data, use seeds that no table shows, and lie in OUT/tuning. What they
choose goes into comparison.json, with everything that was tried.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from . import config
from .errors import BadInput
from .experiment import method
from .job import Job, safe
from .report import Run, finite, read_run

SHARE = 0.1  # of every client's data, held out where data.validation is not set
AWAY = 10_000  # from run.seed to the first tuning seed; a comparison has no more seeds than that
NOT_TUNED = ("run.seed", "data.validation")  # the search sets them itself

Settings = dict[str, Any]  # values by dotted keys
Grid = dict[str, list]


@dataclass(frozen=True)
class Trial:
    """One label at one setting, a run for each tuning seed."""

    label: str
    settings: Settings
    jobs: list[Job]


@dataclass(frozen=True)
class Search:
    """All that is tried before the runs of the table."""

    grids: dict[str, Grid]  # of the labels that are tuned
    trials: list[Trial]

    @property
    def jobs(self) -> list[Job]:
        return [job for trial in self.trials for job in trial.jobs]

    def record(self, out: Path | None = None) -> dict[str, Any]:
        """What comparison.json says of the search; the labels' choices once its runs are done, in `out`."""
        first = self.trials[0].jobs
        asked = {"seeds": [job.seed for job in first], "validation": first[0].document["data"]["validation"]}
        return asked | {"labels": {label: self._choice(label, out) for label in self.grids} if out else {}}

    def _choice(self, label: str, out: Path) -> dict[str, Any]:
        trials = [trial for trial in self.trials if trial.label == label]
        runs = [[read_run(out / job.folder, label, job.seed) for job in trial.jobs] for trial in trials]
        key = judged_by(runs[0][0])
        sign = -1 if runs[0][0].lower(key) else 1
        values = [over_seeds([validated(run, key) for run in some]) for some in runs]
        # All of equal worth, or none with a value: the first of them.
        best = max(range(len(trials)), key=lambda i: float("-inf") if values[i] is None else sign * values[i])
        chosen = trials[best].settings
        return {
            "grid": self.grids[label],
            "metric": key,
            "tried": [
                {"settings": trial.settings, "value": value} for trial, value in zip(trials, values, strict=True)
            ],
            "chosen": chosen,
            "value": values[best],
            "edge": edges(self.grids[label], chosen),
        }


def search(
    todo: Sequence[Job], own: Mapping[str, Grid], shared: Grid, seeds: int = 1, folder: str | None = None
) -> Search | None:
    """The search before these runs: `shared` for every label, a label's `own` keys beside or instead of it; None where
    there is no grid."""
    first = {job.label: job for job in reversed(todo)}
    grids = {label: grid for label in dict.fromkeys(job.label for job in todo) if (grid := shared | own.get(label, {}))}
    trials = []
    for label, grid in grids.items():
        _refuse(first[label], grid)
        for key, values in grid.items():
            for value in values:
                _tried(first[label], {key: value}, folder)
        for values in itertools.product(*grid.values()):
            trials.append(_trial(first[label], dict(zip(grid, values, strict=True)), seeds, folder))
    return Search(grids, trials) if trials else None


def settle(todo: Sequence[Job], record: Mapping[str, Any], folder: str | None) -> list[Job]:
    """The runs of the table at the settings that were chosen, trained on all training data."""
    return [
        Job(job.label, job.seed, job.folder, _document(job, record["labels"][job.label]["chosen"], folder))
        if job.label in record["labels"]
        else job
        for job in todo
    ]


def judged_by(run: Run) -> str:
    """The validation value that decides: of the first metric, without any the loss."""
    keys = [key for record in run.records for key in record if key.startswith("validation_")]
    return next((key for key in keys if key != "validation_loss"), "validation_loss")


def validated(run: Run, key: str) -> float | None:
    """A run's mean over the evaluations in the last tenth of its rounds; None if it diverged or one is not finite."""
    late = [finite(r[key]) for r in run.records if key in r and 10 * r["round"] > 9 * run.planned]
    return None if run.diverged else over_seeds(late)


def over_seeds(values: Sequence[float | None]) -> float | None:
    """The mean, None where one value is missing: a mean over the survivors would flatter a setting."""
    return None if not values or None in values else fmean(values)


def edges(grid: Grid, chosen: Settings) -> list[str]:
    """The numeric axes of a grid at whose end the chosen value lies: the best may lie beyond."""
    return [
        key
        for key, values in grid.items()
        if len(values) > 1 and all(map(_is_number, values)) and chosen[key] in (min(values), max(values))
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse(job: Job, grid: Grid) -> None:
    data, run = job.document["data"], job.document["run"]
    if data["validation"] == 0:
        raise BadInput(
            f"--tune chooses by the validation share, so data.validation = 0 leaves {job.label} nothing to go by: "
            f"leave it out ({SHARE} in the tuning runs, none in the runs of the table) or set a share"
        )
    if run["keep_best"] and not data["validation"]:
        raise BadInput("run.keep_best needs a validation share to judge by, as in data.validation = 0.1")
    if safe(job.label) == "tuning":
        raise BadInput(f"{job.label} is where the tuning runs go: give this label another name")
    for key, values in grid.items():
        if key in NOT_TUNED or key.partition(".")[0] in ("compare", "report"):
            raise BadInput(f"--tune {key}: that is not a setting to tune")
        twice = [value for i, value in enumerate(values) if value in values[:i]]
        if twice:
            raise BadInput(f"--tune {key}: {json.dumps(twice[0])} stands there twice")


def _tried(job: Job, settings: Settings, folder: str | None) -> dict:
    """The document of a label with these settings; what cannot be is refused by the key as typed."""
    try:
        return _document(job, settings, folder)
    except BadInput as problem:
        said = ", ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        raise BadInput(f"--tune {said} does not fit {job.label}: {problem}") from None


def _document(job: Job, settings: Settings, folder: str | None) -> dict:
    experiment = config.parse(config.derive(job.document, settings), folder)
    method(experiment)
    return config.document(experiment)


def _trial(job: Job, settings: Settings, seeds: int, folder: str | None) -> Trial:
    document = _tried(job, settings, folder)
    share = document["data"]["validation"] or SHARE
    jobs = []
    for seed in range(job.seed + AWAY, job.seed + AWAY + seeds):
        changed = config.derive(document, {"run.seed": seed, "data.validation": share})
        whole = config.document(config.parse(changed, folder))
        jobs.append(Job(job.label, seed, f"tuning/{safe(job.label)}/{_name(settings)}/seed-{seed}", whole))
    return Trial(job.label, settings, jobs)


def _name(settings: Settings) -> str:
    """A folder's name for a setting, the same when the grid grows."""
    text = "_".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return f"{safe(text)[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
