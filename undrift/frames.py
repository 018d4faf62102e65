"""Runs and comparisons as one pandas table, for one's own figures; pandas itself is optional."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BadInput
from .files import read_lines
from .report import read_runs

if TYPE_CHECKING:
    import pandas


def frame(*folders: str | Path, clients: bool = False) -> pandas.DataFrame:
    """A row for each round, or with `clients` for each logged line of a client, of all runs in these folders.

    The first columns are `label` and `seed`; a value that a round lacks, as between evaluations, is missing.
    """
    try:
        import pandas
    except ImportError as error:
        raise BadInput("undrift.frame needs pandas, which is not installed here: pip install pandas") from error
    if not folders:
        raise BadInput("undrift.frame takes at least one folder of a run or a comparison")
    file = "clients.jsonl" if clients else "metrics.jsonl"
    rows = [
        {"label": run.label, "seed": run.seed, **record}
        for folder in folders
        for run in read_runs(Path(folder))
        for record in read_lines(run.folder / file)
    ]
    first = ["label", "seed", "round", *(["client"] if clients else [])]
    columns = dict.fromkeys([*first, *(name for row in rows for name in row)])
    table = pandas.DataFrame(rows, columns=list(columns))
    numbers = [name for name in table.columns if table[name].dtype == object and name not in first]
    return table.astype(dict.fromkeys(numbers, "float64"))
