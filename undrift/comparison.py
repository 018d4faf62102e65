"""Several methods on the same draws: every label at every seed, each a run of its own, side by side in workers."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from . import config
from .checkpoint import CURRENT
from .choose import cores
from .errors import BadInput, Interrupted, RunFailed
from .experiment import method
from .files import write
from .job import Job, safe
from .record import read_config
from .report import Row, contrasts, summary, write_report, write_summary
from .running import same_experiment
from .signals import Stop, stopping
from .tuning import Grid, Search, search, settle
from .workers import play

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Failed:
    """A run of a comparison that came to no end."""

    why: str
    exit_code: int
    tuning: bool = False  # it was to choose a setting, so that no run of the table has begun


def jobs(document: dict, folder: str | None, algorithms: list[str] | None, seeds: int) -> list[Job]:
    """All runs of a comparison, seed by seed; every label's configuration is checked before anything runs."""
    base = {k: v for k, v in document.items() if k != "compare"}
    labels = config.parse(document, folder).compare
    chosen = algorithms or list(labels)
    if not chosen:
        raise BadInput("there is nothing to compare: name methods with --algorithms, or give [compare.LABEL] tables")
    if len(set(chosen)) < len(chosen):
        raise BadInput(f"--algorithms: {next(c for c in chosen if chosen.count(c) > 1)} is named twice")
    first = config.parse(base, folder).run.seed
    made = []
    for seed in range(first, first + seeds):
        for label in chosen:
            settings = {k: v for k, v in labels.get(label, {"algorithm": {"name": label}}).items() if k != "tune"}
            mine = config.derive(config.derive(base, settings), {"run": {"seed": seed}})
            resolved = config.parse(mine, folder)
            if seed == first:
                method(resolved)
            made.append(Job(label, seed, f"{safe(label)}/seed-{seed}", config.document(resolved)))
    return made


def grids(document: dict, folder: str | None) -> dict[str, Grid]:
    """The grids that labels have of their own."""
    return {label: table["tune"] for label, table in config.parse(document, folder).compare.items() if "tune" in table}


def compare(
    experiment: config.Experiment,
    methods: list[str] | None = None,
    seeds: int = 5,
    out: str | Path = "runs/comparison",
    baseline: str | None = None,
    resume: bool = False,
    tune: Grid | None = None,
    tune_seeds: int = 1,
) -> list[Row]:
    """Compares methods by name, or the experiment's own labels, on the same draws; -> a row of the table for each.

    `tune`, as {"local.lr": [0.01, 0.1]}, is a grid for every label: the table then shows each at its best setting.
    """
    document, folder, out = config.document(experiment), experiment.folder, Path(out)
    todo = jobs(document, folder, methods, seeds)
    tried = search(todo, grids(document, folder), tune or {}, tune_seeds, folder)
    failed = play_all(todo, folder, out, baseline, resume, search=tried)
    if failed:
        raise RunFailed(failed[0].why)
    rows = summary([out])
    write_summary(out, rows, contrasts(out))
    write_report(out)
    return rows


def play_all(
    todo: list[Job],
    folder: str | None,
    out: Path,
    baseline: str | None = None,
    resume: bool = False,
    heard: Callable[[Job, dict], None] = lambda job, message: None,
    search: Search | None = None,
) -> list[Failed]:
    """Plays the runs of a comparison into `out`, after the search for their settings; -> those that failed."""
    labels = list(dict.fromkeys(job.label for job in todo))
    if baseline is not None and baseline not in labels:
        raise BadInput(f"--baseline {baseline} is not among the compared: {', '.join(labels)}")
    with held(out), stopping() as stop:
        begin(out, todo, baseline or labels[0], resume, search.record() if search else None)
        if search:
            failed = _play(search.jobs, folder, out, resume, heard, stop)
            if failed:
                return [Failed(f"tuning {run.why}", run.exit_code, tuning=True) for run in failed]
            choices = search.record(out)
            begin(out, todo, baseline or labels[0], True, choices)
            todo = settle(todo, choices, folder)
        return _play(todo, folder, out, resume, heard, stop)


def _play(
    todo: list[Job], folder: str | None, out: Path, resume: bool, heard: Callable[[Job, dict], None], stop: Stop
) -> list[Failed]:
    """Plays runs side by side, those that are done aside; -> those that failed."""
    lines = {job.folder: job for job in todo}
    command = shlex.join(["undrift", *sys.argv[1:]])
    finished = {job.folder for job in todo if resume and done(out / job.folder, job)}
    orders = [
        {
            "document": crowded(job.document), "folder": folder, "out": str(out / job.folder), "key": job.folder,
            "resume": resume, "label": job.label, "command": command,
        }
        for job in todo
        if job.folder not in finished
    ]  # fmt: skip
    for job in todo:
        if job.folder in finished:
            heard(job, {"done": True})
    failed = {}
    try:
        for order, message in play(orders, side_by_side(todo), stop):
            job = lines[order["key"]]
            heard(job, message)
            if "error" in message:
                failed[job.folder] = Failed(f"{job.label}, seed {job.seed}: {message['error']}", message["exit"])
    except Interrupted as signal:
        raise Interrupted(f"{signal}: the runs are saved, --resume goes on from there") from None
    return [failed[job.folder] for job in todo if job.folder in failed]


def side_by_side(todo: list[Job]) -> int:
    """How many runs at once: a core each, unless a run asks for more threads or for the one GPU."""
    run = todo[0].document["run"]
    if run["device"] != "cpu" and cuda():
        return 1
    return max(1, cores() // (1 if run["threads"] == "auto" else run["threads"]))


def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def crowded(document: dict) -> dict:
    """A run's configuration where other runs use the other cores."""
    run = document["run"]
    return document | {"run": run | {"threads": 1}} if run["threads"] == "auto" and not cuda() else document


class held:
    """The comparison's folder, for one process at a time."""

    def __init__(self, out: Path):
        self.out, self.lock = out, FileLock(out / ".lock")

    def __enter__(self):
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(blocking=False)
        except Timeout:
            raise BadInput(f"{self.out}: another process is running here") from None
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise BadInput(
                f"{self.out} cannot be a comparison's folder: {error.strerror}; choose another with --out"
            ) from error
        except OSError as error:
            raise RunFailed(f"{self.out} could not be made ({error.strerror or error})") from error

    def __exit__(self, *_):
        self.lock.release()


def clear(out: Path) -> None:
    """Removes a comparison, unless it is still going on."""
    if not (out / COMPARISON).exists():
        return
    with held(out):
        for path in out.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()


def begin(out: Path, todo: list[Job], baseline: str, resume: bool, tuning: dict | None = None) -> None:
    """Writes comparison.json, or finds there the comparison that goes on."""
    path = out / COMPARISON
    runs = [{"label": job.label, "seed": job.seed, "folder": job.folder} for job in todo]
    if path.exists():
        if not resume:
            raise BadInput(f"{out} holds a comparison: go on with it by --resume, or choose another folder with --out")
        gone = [run for run in runs_of(path) if run not in runs]
        if gone:
            raise BadInput(
                f"{path}: {gone[0]['label']} at seed {gone[0]['seed']} is not in this comparison; name it, or use --out"
            )
        if was_tuned(path) != (tuning is not None):
            how = "was tuned: name its --tune again" if was_tuned(path) else "was not tuned: leave --tune out"
            raise BadInput(f"{out}: the comparison in this folder {how}, or choose another folder with --out")
    elif (out / "config.toml").exists():
        raise BadInput(f"{out} holds a single run: choose another folder with --out")
    write(path, json.dumps({
        "format": 1,
        "command": shlex.join(["undrift", *sys.argv[1:]]),
        "baseline": baseline,
        "primary": todo[0].document["report"]["primary"],
        "tuning": tuning,
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": runs,
    }, indent=1).encode())  # fmt: skip


def runs_of(path: Path) -> list:
    """The runs that a comparison.json names."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is damaged: {error}") from error


def was_tuned(path: Path) -> bool:
    """Whether the comparison of a comparison.json that `runs_of` could read was tuned."""
    return json.loads(path.read_text(encoding="utf-8")).get("tuning") is not None


def done(run: Path, job: Job) -> bool:
    """Whether a run has come to the end that it is to come to; one that was something else is refused."""
    before = read_config(run)
    if before is None:
        return False
    same_experiment(before, config.parse(crowded(job.document)), run)
    longer = job.document["run"]["rounds"] > before["run"]["rounds"]
    try:
        return json.loads((run / "checkpoint" / CURRENT).read_text(encoding="utf-8"))["done"] and not longer
    except (OSError, ValueError, KeyError, TypeError):
        return False  # the run itself will say what is wrong
