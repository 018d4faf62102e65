"""Finds the local rates of demo.toml and experiments/mild.toml: every method at every rate, on a validation share.

    python scripts/tune_demo.py undrift/demo.toml [--out runs/tune-demo]

A tenth of every client's data is held out, and the seed is one that no report shows. The rate with the best validation
accuracy (the mean of the evaluations in the last tenth of the rounds) wins. Goes on where it was left.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

from undrift import config
from undrift.comparison import jobs, play_all
from undrift.files import read_lines
from undrift.progress import CompareProgress

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SEED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("toml", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/tune-demo"))
    given = parser.parse_args()
    document = config.load(given.toml)
    methods = document.pop("compare")
    document = config.derive(document, {"data.validation": 0.1, "run.seed": SEED})
    document["compare"] = {
        f"{name} at {rate}": config.derive(settings, {"local.lr": rate})
        for name, settings in methods.items()
        for rate in GRID
    }
    todo = jobs(document, str(given.toml.resolve().parent), None, seeds=1)
    with CompareProgress(todo, quiet=False) as progress:
        failed = play_all(todo, None, given.out, resume=(given.out / "comparison.json").exists(), heard=progress.heard)
    if failed:
        sys.exit("\n".join(run.why for run in failed))
    for name in methods:
        found = {rate: validated(given.out, todo, f"{name} at {rate}") for rate in GRID}
        best = max(found, key=found.get)
        edge = " (at the edge of the grid)" if best in (GRID[0], GRID[-1]) else ""
        print(f"{name:12} local.lr = {best:<5} " + "  ".join(f"{r}: {v:.3f}" for r, v in found.items()) + edge)


def validated(out: Path, todo: list, label: str) -> float:
    [job] = [job for job in todo if job.label == label]
    rounds = job.document["run"]["rounds"]
    records = read_lines(out / job.folder / "metrics.jsonl")
    late = [r["validation_accuracy"] for r in records if 10 * r["round"] > 9 * rounds and "validation_accuracy" in r]
    return fmean(late) if late else 0.0  # it diverged


if __name__ == "__main__":
    main()
