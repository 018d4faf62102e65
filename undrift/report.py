"""From the folders of runs to a table, a page and a CSV file, by what the runs wrote: without torch or the data."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from undrift.contrasts import Amount, Contrast, Difference, corrected, difference, reached, targets
from undrift.errors import BadInput
from undrift.statistics import interval

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from rich.table import Table

# The tables of a configuration that say what is run; its other tables say with what (versions, digests, machine).
SETTINGS = ("data", "task", "model", "local", "algorithm", "participation", "run")
LOWER_IS_BETTER = ("loss", "divergence", "error", "mse", "rmse", "mae", "perplexity")
OTHERS = ("train_loss", "divergence")  # measures beside those of test, validation and clients
WORST = "_worst10"  # behind a metric of the clients: the mean over the worst tenth of them
NOTHING = "\N{EN DASH}"  # what stands in the place of a number
POINTS = 150  # a longer curve is drawn by the means of so many blocks of rounds
# Okabe and Ito's colours, told apart by the colour-blind, without the yellow that white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", (0, (1, 1)), (0, (5, 1, 1, 1)))  # for the labels after the colours are used up
CEILING = "#777777"
BYTES = ("B", "kB", "MB", "GB", "TB", "PB")

Measure = tuple[float | None, float | None]  # mean over seeds, half width of its interval


# ---- Reading ----


@dataclass(frozen=True)
class Run:
    """One run as its folder shows it: what it was asked, and what it has recorded so far."""

    label: str
    seed: int
    folder: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def rounds(self) -> int:
        return self.records[-1]["round"] if self.records else 0

    @property
    def planned(self) -> int:
        return self.config.get("run", {}).get("rounds", self.rounds)

    @property
    def diverged(self) -> bool:
        """Whether the last evaluation (without any, the last training loss) is not finite."""
        for key in ("test_loss", "validation_loss", "train_loss"):
            values = [record[key] for record in self.records if key in record]
            if values:
                return finite(values[-1]) is None
        return False

    @property
    def finished(self) -> bool:
        return self.diverged or self.rounds >= self.planned

    def lower(self, key: str) -> bool:
        """Whether less of a measure is better, as its metric says, or else its name."""
        better = self.config.get("recorded", {}).get("better", {})
        name = key.removesuffix(WORST).partition("_")[2]
        return better[name] == "lower" if name in better else lower_is_better(key)

    @property
    def ceiling(self) -> bool:
        """Whether this is `centralised`: what could be reached without federation, no rival of the other methods."""
        return "centralised" in (self.label, self.config.get("algorithm", {}).get("name"))


def read_runs(folder: Path) -> list[Run]:
    """The runs in a run's or a comparison's folder, in the order in which they were asked for."""
    comparison = read_comparison(folder)
    if comparison is not None:
        entries = [(entry["label"], entry["seed"], folder / entry["folder"]) for entry in comparison["runs"]]
        runs = [read_run(path, label, seed) for label, seed, path in entries if (path / "config.toml").exists()]
        for run in runs:  # what decides may have been said anew when the comparison went on
            run.config["report"] = {"primary": comparison["primary"]} if comparison.get("primary") else {}
        return runs
    if (folder / "config.toml").exists():
        return [read_run(folder, folder.resolve().name)]
    raise BadInput(f"{folder} holds neither a run (config.toml) nor a comparison (comparison.json)")


def read_run(folder: Path, label: str, seed: int | None = None) -> Run:
    """The run in a folder, under a label; a half last line of its metrics is one that was being written."""
    path = folder / "config.toml"
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    if seed is None:
        seed = config.get("run", {}).get("seed", 0)
    return Run(label, seed, folder, config, _read_records(folder / "metrics.jsonl"))


def read_comparison(folder: Path) -> dict[str, Any] | None:
    """What `undrift compare` wrote about a comparison's folder; None for any other folder."""
    path = folder / "comparison.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None


def _read_records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # Bytes, since a cut may fall into the middle of a character.
    *lines, last = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise BadInput(f"{path}, line {number} is not JSON: the file was changed after it was written") from None
    try:
        return [*records, json.loads(last)]
    except ValueError:
        return records


# ---- The summary ----


@dataclass(frozen=True)
class Row:
    """One label's line in the table: means over its seeds."""

    label: str
    seeds: int  # in the numbers of this row
    finished: bool  # whether they are of finished runs; if not, no run of this label has finished
    unfinished: int  # runs still going or killed
    diverged: int
    rounds: int
    planned: int
    evaluations: int  # that a final value is the mean of
    ceiling: bool
    lower: bool  # whether less of the primary measure is better
    measures: dict[str, Measure]  # test metrics, the primary one first, then test_loss, train_loss, divergence
    bytes_down: float | None
    bytes_up: float | None
    gradients: float | None
    seconds: float | None

    @property
    def primary(self) -> str:
        return next(iter(self.measures))


def summary(folders: Iterable[Path]) -> list[Row]:
    """One row per label over all runs in these folders, labels in the order in which they first appear."""
    runs = [run for folder in folders for run in read_runs(Path(folder))]
    seen: dict[tuple[str, int], Path] = {}
    for run in runs:
        other = seen.setdefault((run.label, run.seed), run.folder)
        if other != run.folder:
            raise BadInput(
                f"{other} and {run.folder} are both called '{run.label}' with seed {run.seed}: report on each alone"
            )
    return _rows(runs)


def _rows(runs: Sequence[Run]) -> list[Row]:
    keys = measured(runs)
    return [_row(group, keys) for group in by_label(runs).values()]


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each label, in the order of the labels' first appearance."""
    labels = dict.fromkeys(run.label for run in runs)
    return {label: [run for run in runs if run.label == label] for label in labels}


def counted(runs: Sequence[Run]) -> list[Run]:
    """The runs of one label that its numbers come from: those that finished, or all that began while none has."""
    return [run for run in runs if run.finished and run.records] or [run for run in runs if run.records]


def measured(runs: Sequence[Run]) -> list[str]:
    """The columns of final values: what decides (report.primary, or the task's first metric), the other test metrics,
    the worst tenth of the clients, the losses, divergence."""
    found = list(dict.fromkeys(key for run in runs for record in run.records for key in record))
    tests = [key for key in found if key.startswith("test_")] or [key for key in found if key.startswith("validation_")]
    losses = [key for key in (*tests, "train_loss", "divergence") if key in found and not _is_metric(key)]
    names = [metric if isinstance(metric, str) else metric["name"] for metric in _first_metrics(runs)]
    metrics = sorted(
        (key for key in tests if _is_metric(key)), key=lambda key: names[:1] != [key.split("_", maxsplit=1)[1]]
    )
    worst = [key for key in found if key.startswith("client_") and key.endswith(WORST)]
    keys = [*metrics, *worst, *losses] or ["train_loss"]
    return list(dict.fromkeys([_asked_for(runs, found), *keys])) if _asked_for(runs, found) else keys


def _asked_for(runs: Sequence[Run], found: Sequence[str]) -> str | None:
    """report.primary, where it is set and there is a value yet."""
    name = next((name for run in runs if (name := run.config.get("report", {}).get("primary"))), None)
    if name in found or not any(run.finished for run in runs):
        return name if name in found else None
    there = [key for key in found if key.startswith(("test_", "validation_", "client_")) or key in OTHERS]
    if name:
        raise BadInput(f"report.primary: no run has recorded {name} (there are: {', '.join(there)})")
    return None


def _is_metric(key: str) -> bool:
    return key.startswith(("test_", "validation_")) and not key.endswith("_loss")


def _first_metrics(runs: Sequence[Run]) -> list[Any]:
    return next((run.config["task"]["metrics"] for run in runs if run.config.get("task", {}).get("metrics")), [])


def _row(runs: Sequence[Run], keys: Sequence[str]) -> Row:
    used = counted(runs)
    return Row(
        label=runs[0].label,
        seeds=len(used),
        finished=any(run.finished for run in runs),
        unfinished=sum(not run.finished for run in runs),
        diverged=sum(run.diverged for run in runs),
        rounds=min((run.rounds for run in used), default=0),
        planned=max(run.planned for run in runs),
        evaluations=min((len(_late(run, keys[0])) for run in used), default=0),
        ceiling=runs[0].ceiling,
        lower=runs[0].lower(keys[0]),
        measures={key: _over_seeds([final(run, key) for run in used]) for key in keys},
        **{key: _total(used, key) for key in ("bytes_down", "bytes_up", "gradients", "seconds")},
    )


def final(run: Run, key: str) -> float | None:
    """A run's mean of the finite evaluations in the last tenth of its rounds, None where it has nothing finite to show.

    A diverged run stays in: with the worst value it ever had where more is better, with None where less is better.
    """
    values = [value for record in run.records if (value := finite(record.get(key))) is not None]
    if not values:
        return None
    if run.diverged:
        return None if run.lower(key) else min(values)
    late = [value for value in _late(run, key) if value is not None]
    return fmean(late) if late else values[-1]


def _late(run: Run, key: str) -> list[float | None]:
    return [finite(record[key]) for record in run.records if key in record and 10 * record["round"] > 9 * run.rounds]


def _over_seeds(values: Sequence[float | None]) -> Measure:
    # One seed without a value leaves the label without one: a mean over the survivors would flatter it.
    numbers = [value for value in values if value is not None]
    return interval(numbers) if numbers and len(numbers) == len(values) else (None, None)


def _total(runs: Sequence[Run], key: str) -> float | None:
    return _over_seeds([finite(run.records[-1].get(key)) for run in runs])[0]


def finite(value: Any) -> float | None:
    """A recorded number, or None for one that is missing, null or not finite."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def lower_is_better(key: str) -> bool:
    """Whether less of this measure is better, by the last word of its name."""
    return key.removesuffix(WORST).replace("-", "_").split("_")[-1] in LOWER_IS_BETTER


def best(rows: Sequence[Row]) -> Row | None:
    """The row with the best mean of the primary metric, ceilings aside; None where there is nothing to choose from."""
    rivals = [row for row in rows if not row.ceiling and row.measures[row.primary][0] is not None]
    if len(rivals) < 2:
        return None
    return (min if rivals[0].lower else max)(rivals, key=lambda row: row.measures[row.primary][0])


def contrasts(folder: Path) -> dict[str, Contrast]:
    """Every label of a comparison against its baseline; {} while the baseline has nothing to compare with."""
    comparison = read_comparison(Path(folder))
    runs = read_runs(Path(folder))
    return _contrasts(runs, comparison["baseline"]) if comparison and any(run.records for run in runs) else {}


def _contrasts(runs: Sequence[Run], baseline: str) -> dict[str, Contrast]:
    key = measured(runs)[0]
    groups = {label: [run for run in group if run.finished and run.records] for label, group in by_label(runs).items()}
    finals = {label: {run.seed: final(run, key) for run in group} for label, group in groups.items() if group}
    end = _over_seeds(list(finals[baseline].values()))[0] if baseline in finals else None
    if end is None:
        return {}
    lower = groups[baseline][0].lower(key)
    others = {label: difference(finals[label], finals[baseline]) for label in finals if label != baseline}
    # The ceiling is no rival: it is shown, not tested.
    tested = corrected(others, [label for label in others if not groups[label][0].ceiling])
    return {
        label: Contrast(
            tested.get(label),
            [reached([run.records for run in groups[label]], key, to, lower) for to in targets(end, lower)],
        )
        for label in finals
    }


def write_summary(folder: Path, rows: Sequence[Row], against: dict[str, Contrast] | None = None) -> Path:
    """Writes summary.csv: one row per label, plain numbers, empty where there is none; `against` the baseline."""
    out = io.StringIO(newline="")
    plain = ("seeds", "unfinished", "diverged", "rounds", "evaluations")
    totals = ("bytes_down", "bytes_up", "gradients", "seconds")
    keys = list(rows[0].measures) if rows else []
    writer = csv.writer(out)
    names = [name for key in keys for name in (key, f"{key}_half_width")]
    writer.writerow(["label", *plain, *names, *totals, *(CONTRASTED if against is not None else ())])
    for row in rows:
        values = [number for key in keys for number in row.measures[key]]
        beside = _contrasted(against.get(row.label)) if against is not None else ()
        counts, sums = ([getattr(row, name) for name in names] for names in (plain, totals))
        writer.writerow([row.label, *counts, *values, *sums, *beside])
    return _write(Path(folder) / "summary.csv", out.getvalue())


# The columns of a comparison's summary.csv behind the totals; a median beyond the runs' end is written ">end".
CONTRASTED = ["difference_seeds", "difference", "difference_half_width", "p", "p_holm"]
CONTRASTED += [
    f"{name}{to}"
    for to in ("", "_95")
    for name in ("target", "reached", "rounds_to_target", "bytes_to_target", "gradients_to_target")
]


def _contrasted(contrast: Contrast | None) -> list:
    if contrast is None:
        return [None] * len(CONTRASTED)
    one = contrast.difference
    cells = [one.n, one.mean, one.half, one.p, one.corrected] if one else [None] * 5
    for at in contrast.reached:
        amounts = (f">{x.value:g}" if x.beyond else x.value for x in (at.rounds, at.bytes, at.gradients))
        cells += [at.target, f"{at.k} of {at.n}", *amounts]
    return cells


def _write(path: Path, text: str) -> Path:
    # Replaced whole, so that a full disk or a kill leaves the page of before.
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8", newline="")
    os.replace(new, path)
    return path


# ---- Numbers and words for people ----


def in_words(key: str) -> str:
    """test_accuracy -> test accuracy, client_accuracy_worst10 -> client accuracy, worst tenth."""
    return key.replace(WORST, ", worst tenth").replace("_", " ")


def is_share(key: str) -> bool:
    """Whether a measure is a share of 1 that people read in per cent."""
    return key.removesuffix(WORST).endswith("accuracy")


def show_measure(key: str, measure: Measure) -> str:
    """A mean and its half width, to the digits that mean something: 85.3 ± 0.8 %, 0.412 ± 0.013."""
    mean, half = measure
    if mean is None:
        return NOTHING
    if is_share(key):
        return f"{100 * mean:.1f} %" if half is None else f"{100 * mean:.1f} ± {100 * half:.1f} %"
    if not half or not 1e-3 <= abs(mean) < 1e5:
        shown = f"{mean:#.3g}".rstrip(".")
        return shown if half is None else f"{shown} ± {half:.2g}"
    # Two digits of a half width that begins with 1 or 2, one of any other.
    digits = min(max(math.ceil(-math.log10(half / 3)), 0), 6)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def show_difference(key: str, one: Difference) -> str:
    """A signed mean difference and its half width: +3.2 ± 0.8 points for shares, -0.12 ± 0.03."""
    if is_share(key):
        return f"{100 * one.mean:+.1f}" + ("" if one.half is None else f" ± {100 * one.half:.1f}") + " points"
    return ("+" if one.mean >= 0 else "") + show_measure(key, (one.mean, one.half))


def show_p(p: float | None) -> str:
    """0.0312 -> 0.031; what is smaller than a thousandth is said to be."""
    return NOTHING if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def show_amount(amount: Amount, show: Callable[[float], str] = lambda number: f"{number:g}") -> str:
    """A median, or that it lies beyond the end: 120, > 300."""
    return ("> " if amount.beyond else "") + show(amount.value)


def show_settings(settings: dict[str, Any]) -> str:
    """local.lr = 0.1, algorithm.alpha = 0.05."""
    return ", ".join(f"{key} = {_value(value)}" for key, value in settings.items())


def show_bytes(number: float | None) -> str:
    """1234567 -> 1.23 MB, in powers of 1000."""
    return show_count(number, BYTES)


def show_count(number: float | None, units: Sequence[str] = ("", "k", "M", "G", "T", "P")) -> str:
    """1234567 -> 1.23 M."""
    if number is None:
        return NOTHING
    power = 0
    # 999.5 would be shown as 1e+03.
    while abs(number) >= 999.5 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {units[power]}".strip()


def show_seconds(seconds: float | None) -> str:
    """3725 -> 1 h 2 min."""
    if seconds is None:
        return NOTHING
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, hours = round(seconds / 60), round(seconds) // 3600
    return f"{minutes} min" if minutes < 120 else f"{hours} h {round(seconds - 3600 * hours) // 60} min"


def count_of(number: int, noun: str) -> str:
    """3 seeds, 1 seed."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def remark(row: Row) -> str:
    """What a reader must know about a row before trusting its numbers."""
    remarks = []
    if not row.seeds:
        remarks.append("no round yet")
    elif not row.finished:
        remarks.append(f"unfinished: round {row.rounds} of {row.planned}")
    elif row.unfinished:
        remarks.append(f"{row.unfinished} unfinished, left out")
    if row.diverged:
        remarks.append(f"{row.diverged} of {row.seeds} diverged")
    if row.ceiling:
        remarks.append("all data in one place")
    return "; ".join(remarks)


def describe(runs: Sequence[Run]) -> str:
    """What was run, in a few sentences, from the settings that all these runs share."""
    config = _nested(_common(_settings(run) for run in runs))
    data, model, local, who, run = (config.get(name, {}) for name in ("data", "model", "local", "participation", "run"))
    partition = data.get("partition", {})
    if any("partition" in run.config.get("data", {}) for run in runs):
        number = f"{partition['clients']} clients" if "clients" in partition else "clients"
        how = _named(partition, skip=("clients",)) if "name" in partition else partition.get("file", "varying means")
        split = f"split over {number} by {how}"
    else:
        split = "each client with the data that come with it"
    text = f"Data: {_named(data, skip=('partition', 'folder', 'seed'))}, {split}. Model: {_named(model)}."
    cohort = f"{who['clients']} clients" if "clients" in who else "the clients drawn"
    text += (
        f" In each of {run.get('rounds', 'the')} rounds {cohort} (participation {who.get('name', 'varies')}) train for "
    )
    amounts = [
        f"{local[key]} {word}" for key, word in (("steps", "local steps"), ("epochs", "local epochs")) if local.get(key)
    ]
    text += amounts[0] if amounts else "the local steps given below"
    return text + (f" on mini-batches of {local['batch']}." if "batch" in local else ".")


def _named(table: dict[str, Any], skip: Sequence[str] = ()) -> str:
    # What is off (0, false, empty) is not worth a reader's time.
    rest = [f"{key} {_value(value)}" for key, value in table.items() if value and key not in ("name", *skip)]
    return str(table.get("name", "varies")) + (f" ({', '.join(rest)})" if rest else "")


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def flat(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    """{"local": {"lr": 0.1}} -> {"local.lr": 0.1}."""
    lines: dict[str, Any] = {}
    for key, value in table.items():
        lines |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return lines


def _settings(run: Run) -> dict[str, Any]:
    lines = flat({name: run.config[name] for name in SETTINGS if name in run.config})
    lines.pop("run.seed", None)
    return lines


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Each label's settings that not all labels share, as lines of TOML."""
    settings = {label: _settings(group[0]) for label, group in by_label(runs).items()}
    common = _common(settings.values())
    return {
        label: [f"{key} = {_value(value)}" for key, value in lines.items() if key not in common]
        for label, lines in settings.items()
    }


def _common(tables: Iterable[dict[str, Any]]) -> dict[str, Any]:
    first, *others = tables
    return {key: value for key, value in first.items() if all(key in other and other[key] == value for other in others)}


def _nested(lines: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in lines.items():
        *tables, key = path.split(".")
        place = tree
        for name in tables:
            place = place.setdefault(name, {})
        place[key] = value
    return tree


def console_table(rows: Sequence[Row]) -> Table:
    """The summary for 80 columns of a terminal: test measures, the primary one's interval; the page has the rest."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    keys = [key for key in rows[0].measures if key.startswith(("test_", "validation_")) or key == rows[0].primary]
    for name in (*(in_words(key).replace(" ", "\n") for key in keys), "sent", "gradients", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    first = best(rows)
    for row in rows:
        # Text, not str: a label may hold what rich takes for markup.
        name = Text.assemble(row.label, (f"\n{remark(row)}" if remark(row) else "", "dim"))
        cells = [
            show_measure(key, row.measures[key] if key == row.primary else (row.measures[key][0], None)) for key in keys
        ]
        sent = None if row.bytes_down is None or row.bytes_up is None else row.bytes_down + row.bytes_up
        cells += [show_bytes(sent), show_count(row.gradients), show_seconds(row.seconds)]
        table.add_row(name, *(Text(cell) for cell in cells), style="bold" if row is first else None)
    return table


# ---- Plots ----


@dataclass(frozen=True)
class Plot:
    """One figure of the page: a measure against rounds or bytes."""

    key: str
    title: str
    caption: str
    against: str = "rounds"
    log: bool = False

    @property
    def factor(self) -> float:
        return 100.0 if is_share(self.key) else 1.0


@dataclass(frozen=True)
class Look:
    """How one label is drawn, the same in every plot."""

    colour: str
    dash: Any

    @property
    def css(self) -> str:
        return f"border-top: 3px {'solid' if self.dash == 'solid' else 'dashed'} {self.colour}"


def looks(runs: Sequence[Run]) -> dict[str, Look]:
    """A look for each label; ceilings are dashed and grey and use up no colour."""
    out, used = {}, 0
    for label, group in by_label(runs).items():
        if group[0].ceiling:
            out[label] = Look(CEILING, (0, (4, 2)))
        else:
            out[label] = Look(COLOURS[used % len(COLOURS)], DASHES[used // len(COLOURS) % len(DASHES)])
            used += 1
    return out


def plots(runs: Sequence[Run]) -> list[Plot]:
    """The figures that these runs have the records for."""
    primary = measured(runs)[0]
    name = in_words(primary)
    wanted = [
        Plot(primary, f"{name.capitalize()} against rounds", ""),
        Plot(
            primary,
            f"{name.capitalize()} against bytes",
            "What sends nothing is drawn at its last value." if any(run.ceiling for run in runs) else "",
            against="bytes",
        ),
        Plot("train_loss", "Training loss", "Mean raw loss of the mini-batches at the points visited."),
        Plot(
            "divergence",
            "Divergence",
            "How far the clients' models lie apart, relative to the step of their mean; means of logarithms.",
            log=True,
        ),
    ]
    return [plot for plot in wanted if any(finite(r.get(plot.key)) is not None for run in runs for r in run.records)]


@dataclass(frozen=True)
class Curve:
    """One label's line in its plot's units (per cent, decades of a logarithm); NaN where a seed is not finite."""

    x: np.ndarray  # [points]
    mean: np.ndarray
    half: np.ndarray | None  # half width of the interval; None for one seed

    @property
    def shown(self) -> np.ndarray:
        """The points that can be drawn."""
        import numpy as np

        return np.flatnonzero(np.isfinite(self.mean) & np.isfinite(self.x))


def curve(runs: Sequence[Run], plot: Plot) -> Curve:
    """The mean over these runs of one label at every round that all of them have recorded."""
    import numpy as np

    tables = [{r["round"]: r for r in run.records if plot.key in r} for run in runs]
    rounds = sorted(set(tables[0]).intersection(*tables[1:]))  # where one seed ends, the mean ends
    x = np.array(rounds, dtype=float)
    if plot.against == "bytes":
        sent = [[_number(t[r].get("bytes_down")) + _number(t[r].get("bytes_up")) for r in rounds] for t in tables]
        x = np.mean(sent, axis=0)
    y = np.array([[_number(table[r][plot.key]) for r in rounds] for table in tables], dtype=float)
    y = np.log10(np.where(y > 0, y, np.nan)) if plot.log else y * plot.factor
    if len(rounds) > POINTS:
        blocks = np.array_split(np.arange(len(rounds)), POINTS)
        x = np.array([x[block].mean() for block in blocks])
        y = np.stack([y[:, block].mean(axis=1) for block in blocks], axis=1)
    half = None
    if len(runs) > 1:
        half = np.array([interval(column)[1] if np.isfinite(column).all() else np.nan for column in y.T.tolist()])
    return Curve(x, y.mean(axis=0), half)


def _number(value: Any) -> float:
    number = finite(value)
    return math.nan if number is None else number


def draw(runs: Sequence[Run], plot: Plot) -> str:
    """One plot as an <svg> element."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",  # text stays text: small, searchable, in the page's own font
        "svg.hashsalt": f"{plot.key} {plot.against}",  # the same records give the same file
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
    }
    groups = by_label(runs)
    curves = {label: curve(used, plot) for label, group in groups.items() if (used := counted(group))}
    curves = {label: line for label, line in curves.items() if len(line.shown)}
    look = looks(runs)
    width, height = 4.9, 3.2  # inches: legible on a telephone, and two stand side by side on a desk
    room = 0.07 * max(len(_short(label)) for label in groups) + 0.4 if len(groups) > 1 else 0.15
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0.6 / width, 0.45 / height, (width - 0.6 - room) / width, (height - 0.53) / height))
        _frame(axes, plot, list(curves.values()))
        for label, line in curves.items():
            _draw_line(axes, plot, line, look[label])
        if len(groups) > 1:
            _name_ends(axes, {label: line.mean[line.shown[-1]] for label, line in curves.items()}, look)
        out = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _inline(out.getvalue(), plot.title)


def _frame(axes: Axes, plot: Plot, curves: Sequence[Curve]) -> None:
    """Axes, ticks and limits."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    axes.grid(color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_ylabel(in_words(plot.key) + (" (%)" if plot.factor == 100 else ""), labelpad=3)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=plot.against == "rounds"))
    axes.set_xlabel("round", labelpad=2)
    if plot.against == "bytes":
        most = max((np.nanmax(line.x) for line in curves), default=0.0)
        power = min(max(int(math.log10(max(most, 1.0)) / 3), 0), len(BYTES) - 1)
        axes.xaxis.set_major_formatter(lambda number, _: f"{number / 1000**power:g}")
        axes.set_xlabel(f"{BYTES[power]} sent, down and up", labelpad=2)
    # Limits by the lines: the t interval of two seeds is wide, and one run that blows up would flatten all others.
    low, high = min(np.nanmin(line.mean) for line in curves), max(np.nanmax(line.mean) for line in curves)
    starts = [line.mean[line.shown[0]] for line in curves]
    if plot.log:
        high = min(high, max(low, *starts) + 2)
    elif lower_is_better(plot.key):
        high = min(high, 3 * max(low, *starts))
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = low - room, high + room
    axes.set_ylim(low, high)
    if plot.log:
        axes.set_yticks(_log_ticks(low, high))
        axes.yaxis.set_major_formatter(lambda number, _: f"{10.0**number:.3g}")


def _log_ticks(low: float, high: float) -> list[float]:
    """At least two round numbers between 10^low and 10^high, as logarithms, or else the ends."""
    decades = range(math.floor(low), math.ceil(high), math.ceil((high - low) / 8))
    for tenths in ((10,), (10, 20, 50), range(10, 100, 10), range(10, 100, 5), range(10, 100)):
        ticks = [decade - 1 + math.log10(step) for decade in decades for step in tenths]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) > 1:
            return inside
    return [low, high]


def _draw_line(axes: Axes, plot: Plot, line: Curve, look: Look) -> None:
    import numpy as np

    shown = line.shown
    if plot.against == "bytes" and line.x[shown[-1]] == 0:
        # It sends nothing: a height, not a curve.
        axes.axhline(line.mean[shown[-1]], color=look.colour, linestyle=look.dash, linewidth=1.3)
        return
    axes.plot(line.x, line.mean, color=look.colour, linestyle=look.dash, linewidth=1.5, solid_joinstyle="round")
    if len(shown) == 1:
        axes.plot(line.x[shown], line.mean[shown], "o", color=look.colour, markersize=3)
    if line.half is not None:
        low, high = axes.get_ylim()
        half = np.where(2 * line.half < high - low, line.half, np.nan)  # a wider one would only hide the others
        axes.fill_between(line.x, line.mean - half, line.mean + half, color=look.colour, alpha=0.15, linewidth=0)


def _name_ends(axes: Axes, ends: dict[str, float], look: dict[str, Look]) -> None:
    """Writes each label at the height of its line's end, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    order = sorted(ends, key=ends.__getitem__)
    gap = min(0.06, 1.0 / len(order))
    heights = [min(max((ends[label] - low) / (high - low), 0.0), 1.0) for label in order]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    limit = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = limit = min(heights[i], limit)
        limit -= gap
    for label, y in zip(order, heights, strict=True):
        style = {"transform": axes.transAxes, "clip_on": False}
        axes.plot([1.02, 1.09], [y, y], color=look[label].colour, linestyle=look[label].dash, linewidth=2, **style)
        # A label is no formula, whatever dollar signs it has.
        axes.text(1.11, y, _short(label), va="center", fontsize=8.5, parse_math=False, **style)


def _short(label: str) -> str:
    # A line feed would make two lines of it, a tab and other controls are nothing that a plot can show.
    label = "".join(letter if letter.isprintable() else " " for letter in label)
    # Long ones are names of modules, and their ends tell them apart.
    return label if len(label) <= 16 else label[:4] + "…" + label[-11:]


def _inline(svg: str, title: str) -> str:
    """An SVG file as an element of a page: without its prolog, named for screen readers, its size left to the page."""
    body = svg[svg.index("<svg") :]
    view = re.search(r'viewBox="[^"]*"', body).group()
    inside = re.sub(r'<g id="[^"]*"', "<g", body[body.index(">") + 1 :])  # four plots would repeat these ids
    return f'<svg {view} role="img" aria-label="{escape(title)}" xmlns:xlink="http://www.w3.org/1999/xlink">{inside}'


# ---- The page ----


def write_report(folder: Path) -> Path:
    """Writes report.html into a run's or a comparison's folder: one file that needs nothing else."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = Path(folder)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "bytes": show_bytes,
        "count": show_count,
        "seconds": show_seconds,
        "measure": show_measure,
        "words": in_words,
        "remark": remark,
        "counted": count_of,
        "settings": show_settings,
        "value": _value,
        "p": show_p,
        "amount": show_amount,
        "difference": show_difference,
    }
    page = environment.get_template("report.html.jinja").render(_page(folder))
    return _write(folder / "report.html", page)


def _page(folder: Path) -> dict[str, Any]:
    from markupsafe import Markup

    runs = read_runs(folder)
    if not any(run.records for run in runs):
        raise BadInput(f"{folder} has no round to report on yet")
    comparison = read_comparison(folder)
    rows = _rows(runs)
    first = runs[0]
    against = _contrasts(runs, comparison["baseline"]) if comparison and len(rows) > 1 else {}
    return {
        "title": folder.resolve().name,
        "comparison": comparison,
        "rows": rows,
        "best": best(rows),
        "tuning": _tuning(comparison, rows),
        "contrasts": against,
        "pairs": {label: one.difference for label, one in against.items() if one.difference},
        "tested": sum(one.difference is not None and one.difference.p is not None for one in against.values()),
        "looks": looks(runs),
        "about": describe(runs),
        "labels": listed([row.label for row in rows]),
        "intervals": any(row.seeds > 1 for row in rows),
        "seeds": _asked(runs, comparison),
        "missing": len(comparison["runs"]) - len(runs) if comparison else 0,
        "primary": rows[0].primary,
        "evaluations": sorted({row.evaluations for row in rows if row.evaluations}),
        "figures": [(plot, Markup(draw(runs, plot))) for plot in plots(runs)],
        "blocked": POINTS if max(len(run.records) for run in runs) > POINTS else None,
        "differences": differences(runs),
        "first": first,
        "config": (first.folder / "config.toml").read_text(encoding="utf-8"),
        "environment": _environment(first, comparison),
    }


def _tuning(comparison: dict[str, Any] | None, rows: Sequence[Row]) -> dict[str, Any] | None:
    """The search that chose the settings, as comparison.json has it, and the labels that it left alone."""
    if not (comparison and comparison.get("tuning") and comparison["tuning"]["labels"]):
        return None
    found = comparison["tuning"]
    alone = [row.label for row in rows if row.label not in found["labels"]]
    return found | {"alone": listed(alone) if alone else ""}


def _asked(runs: Sequence[Run], comparison: dict[str, Any] | None) -> int:
    labels = [entry["label"] for entry in comparison["runs"]] if comparison else [run.label for run in runs]
    return max(labels.count(label) for label in labels)


def _environment(run: Run, comparison: dict[str, Any] | None) -> dict[str, Any]:
    """Versions, machine and command line, from wherever the folder keeps them."""
    lines = flat({key: value for key, value in run.config.items() if key not in (*SETTINGS, "format", "compare")})
    if comparison:
        lines |= flat({key: comparison[key] for key in ("machine", "started", "command") if key in comparison})
    return {key: value if isinstance(value, str) else _value(value) for key, value in lines.items()}
