"""The report against folders made up here: what a reader sees must be what the records say."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import math
import random
import subprocess
import sys
from statistics import fmean, stdev

import pytest
from rich.console import Console

from undrift.contrasts import Amount, Difference, reached, targets
from undrift.errors import BadInput
from undrift.report import (
    NOTHING,
    Plot,
    _log_ticks,
    best,
    by_label,
    console_table,
    contrasts,
    curve,
    describe,
    differences,
    draw,
    finite,
    looks,
    lower_is_better,
    plots,
    read_runs,
    show_amount,
    show_bytes,
    show_count,
    show_difference,
    show_measure,
    show_p,
    show_seconds,
    summary,
    write_report,
    write_summary,
)
from undrift.statistics import coverage, holm, interval, paired, t_quantile, two_sided

# Student's t, two-sided 95 %, from printed tables.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
TABLE |= {11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093, 20: 2.086}
TABLE |= {21: 2.080, 22: 2.074, 23: 2.069, 24: 2.064, 25: 2.060, 26: 2.056, 27: 2.052, 28: 2.048, 29: 2.045, 30: 2.042}
TABLE |= {100: 1.984}

CONFIG = """format = 1
[data]
name = "mnist"
partition = {{name = "one-class", clients = 100}}
[task]
loss = "cross-entropy"
metrics = ["accuracy"]
[model]
name = "mlp"
hidden = [64]
[local]
lr = {lr}
steps = 12
batch = 50
[algorithm]
name = "{name}"
[participation]
name = "uniform"
clients = 10
[run]
rounds = {rounds}
seed = {seed}
eval_every = 10
[versions]
undrift = "0.1"
torch = "2.13"
"""


def records(seed, top, rounds, *, sends=True, metric="accuracy", diverges=False, every=10):
    """Lines of metrics.jsonl as a plausible run writes them."""
    draw = random.Random(f"{seed} {top}")
    for t in range(1, rounds + 1):
        broken = diverges and t > 0.6 * rounds
        record = {"round": t, "cohort": 10, "lost": 0, "gradients": 6000 * t, "seconds": 0.02 * t}
        record |= {"bytes_down": 2_035_440 * t if sends else 0, "bytes_up": 2_035_440 * t if sends else 0}
        record["train_loss"] = None if broken else 2.3 * math.exp(-t / 60) + 0.2 + draw.gauss(0, 0.03)
        record["divergence"] = None if broken or not sends else 40 * math.exp(-t / 90) + draw.random()
        if t % every == 0 or t == rounds:
            value = top * (1 - math.exp(-t / 40)) + draw.gauss(0, 0.01)
            record[f"test_{metric}"] = 0.098 if broken else min(max(value, 0.05), 0.99)
            record["test_loss"] = None if broken else 2.3 * (1 - value) + 0.1
        yield record


def make_run(folder, name="fedavg", seed=0, top=0.85, rounds=100, lr=0.1, written=None, **more):
    """Writes a run's folder, `written` rounds of it where it was killed there, and returns its records."""
    folder.mkdir(parents=True)
    config = CONFIG.format(name=name, seed=seed, rounds=rounds, lr=lr)
    if more.get("metric"):
        config = config.replace('"accuracy"', f'"{more["metric"]}"')
    (folder / "config.toml").write_text(config)
    lines = list(records(seed, top, rounds, **more))[:written]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + ('{"round": 99, "trai' if written else ""))
    return lines


def make_comparison(folder, runs, **more):
    """Writes a comparison's folder; `runs` is a list of (label, seed, settings of make_run)."""
    folder.mkdir()
    entries, made = [], {}
    for label, seed, settings in runs:
        place = f"run-{len(made)}/seed-{seed}"
        made[label, seed] = make_run(folder / place, seed=seed, **settings)
        entries.append({"label": label, "seed": seed, "folder": place})
    page = {"format": 1, "command": "undrift compare demo.toml", "baseline": runs[0][0], "machine": {"cores": 2}}
    page |= {"started": "2026-11-02T10:00:00", "runs": entries, **more}
    (folder / "comparison.json").write_text(json.dumps(page))
    return made


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Five labels, three seeds: one ceiling, one with a diverged seed, one with a run still going."""
    folder = tmp_path_factory.mktemp("reports") / "demo"
    runs = []
    for seed in range(3):
        runs += [
            ("fedavg", seed, {"name": "fedavg", "top": 0.85}),
            ("fedacg", seed, {"name": "fedacg", "top": 0.94, "lr": 0.05}),
            ("fedcm", seed, {"name": "fedcm", "top": 0.90, "diverges": seed == 1}),
            ("scaffold", seed, {"name": "scaffold", "top": 0.92, "written": 37 if seed == 2 else None}),
            ("centralised", seed, {"name": "centralised", "top": 0.97, "sends": False}),
        ]
    return folder, make_comparison(folder, runs)


class Page(html.parser.HTMLParser):
    """The page's text, its links, and whether its tags close in the order in which they were opened."""

    void = ("meta", "link", "br", "img", "input", "hr", "path", "use")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def read_page(folder):
    return Page(write_report(folder).read_text(encoding="utf-8"))


# ---- Statistics ----


@pytest.mark.parametrize("df", TABLE)
def test_quantiles_are_those_of_the_tables(df):
    assert t_quantile(df) == pytest.approx(TABLE[df], abs=5.1e-4)
    assert coverage(t_quantile(df), df) == pytest.approx(0.95, abs=1e-12)


def test_quantile_at_another_level():
    assert t_quantile(4, 0.99) == pytest.approx(4.604, abs=5e-4)
    assert t_quantile(1, 0.5) == pytest.approx(1.0)  # Cauchy's quartile


def test_interval_of_five_values():
    values = [0.1, 0.4, 0.2, 0.7, 0.35]
    mean, half = interval(values)
    assert mean == pytest.approx(0.35)
    assert half == pytest.approx(2.776445 * stdev(values) / math.sqrt(5), rel=1e-6)


@pytest.mark.parametrize(("t", "df", "p"), [(12.706, 1, 0.05), (2.776, 4, 0.05), (4.604, 4, 0.01), (8.610, 4, 0.001)])
def test_p_of_t_is_that_of_the_tables(t, df, p):
    assert two_sided(t, df) == two_sided(-t, df) == pytest.approx(p, rel=1e-3)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.7, 9.0])
def test_p_of_t_by_its_closed_forms(t):
    # One degree of freedom is Cauchy's distribution; two and four have algebraic ones.
    assert two_sided(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t))
    assert two_sided(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t))
    z = t / math.sqrt(4 + t * t)
    assert two_sided(t, 4) == pytest.approx(1 - z * (3 - z * z) / 2)


def test_a_paired_test_by_hand():
    # Mean 3, variance 2.5, standard error sqrt(0.5): t = 4.2426 with four degrees of freedom.
    mean, half, p = paired([1, 2, 3, 4, 5])
    assert (mean, half) == (3, pytest.approx(2.776445 * math.sqrt(0.5), rel=1e-6))
    assert p == pytest.approx(0.013236, abs=1e-6)
    assert paired([-1, -2, -3, -4, -5])[2] == pytest.approx(p)


def test_pairs_that_allow_no_test_or_a_trivial_one():
    assert paired([0.5]) == (0.5, None, None)
    assert paired([0.0, 0.0, 0.0]) == (0.0, 0.0, 1.0)
    assert paired([0.25, 0.25]) == (0.25, 0.0, 0.0)


def test_holms_correction_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm's textbook example
    assert holm([0.5, 0.02, 0.6]) == pytest.approx([1.0, 0.06, 1.0])
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_one_value_has_no_interval():
    assert interval([3.0]) == (3.0, None)


# ---- The summary ----


def test_a_row_is_the_mean_over_seeds_of_the_last_tenth(demo):
    folder, made = demo
    row = next(row for row in summary([folder]) if row.label == "fedacg")
    for key, late in (("test_accuracy", [99]), ("test_loss", [99]), ("train_loss", range(90, 100))):
        finals = [fmean(made["fedacg", seed][t][key] for t in late) for seed in range(3)]
        mean, half = row.measures[key]
        assert mean == pytest.approx(fmean(finals))
        assert half == pytest.approx(4.302653 * stdev(finals) / math.sqrt(3), rel=1e-6)
    assert (row.seeds, row.rounds, row.evaluations, row.diverged, row.unfinished) == (3, 100, 1, 0, 0)
    assert (row.bytes_down, row.bytes_up, row.gradients) == (203_544_000, 203_544_000, 600_000)
    assert row.seconds == pytest.approx(2.0)


def test_the_last_tenth_is_counted_in_rounds(tmp_path):
    lines = make_run(tmp_path / "run", rounds=205, every=10)
    (row,) = summary([tmp_path / "run"])
    assert row.evaluations == 3  # rounds 190, 200 and 205: more than 184.5
    assert row.measures["test_accuracy"][0] == pytest.approx(
        fmean(lines[t - 1]["test_accuracy"] for t in (190, 200, 205))
    )
    assert row.measures["test_accuracy"][1] is None


def test_labels_keep_their_order_and_the_first_metric_leads(demo):
    rows = summary([demo[0]])
    assert [row.label for row in rows] == ["fedavg", "fedacg", "fedcm", "scaffold", "centralised"]
    assert {row.primary for row in rows} == {"test_accuracy"}
    assert best(rows).label == "fedacg"  # centralised is the ceiling, no rival


def test_a_diverged_seed_stays_in_with_its_worst_value(demo):
    folder, made = demo
    row = next(row for row in summary([folder]) if row.label == "fedcm")
    assert (row.seeds, row.diverged) == (3, 1)
    worst = min(line["test_accuracy"] for line in made["fedcm", 1] if "test_accuracy" in line)
    others = [made["fedcm", seed][99]["test_accuracy"] for seed in (0, 2)]
    assert row.measures["test_accuracy"][0] == pytest.approx(fmean([*others, worst]))
    assert row.measures["test_loss"] == (None, None)  # never a mean over the survivors
    assert row.measures["divergence"] == (None, None)


def test_a_run_still_going_waits_outside_the_row(demo):
    folder, made = demo
    row = next(row for row in summary([folder]) if row.label == "scaffold")
    assert (row.seeds, row.unfinished, row.rounds) == (2, 1, 100)
    assert row.measures["test_accuracy"][0] == pytest.approx(
        fmean(made["scaffold", seed][99]["test_accuracy"] for seed in (0, 1))
    )


def test_a_killed_run_alone_is_reported_as_far_as_it_came(tmp_path):
    lines = make_run(tmp_path / "killed", written=37)
    (row,) = summary([tmp_path / "killed"])
    assert (row.seeds, row.unfinished, row.rounds, row.planned) == (1, 1, 37, 100)
    assert row.measures["test_accuracy"] == (lines[29]["test_accuracy"], None)  # no evaluation in the last tenth
    assert "unfinished: round 37 of 100" in read_page(tmp_path / "killed").text


def test_a_record_cut_inside_a_character_is_ignored(tmp_path):
    lines = make_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write('{"round": 101, "é'.encode()[:-1])
    assert read_runs(tmp_path / "run")[0].records == lines


def test_a_damaged_line_is_named(tmp_path):
    make_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], "{oops\n", *lines[5:]]))
    with pytest.raises(BadInput, match=r"metrics\.jsonl, line 5 is not JSON"):
        summary([tmp_path / "run"])


@pytest.mark.parametrize("file", ["config.toml", "comparison.json"])
def test_an_unreadable_file_is_named(tmp_path, file):
    (tmp_path / file).write_text("=")
    with pytest.raises(BadInput, match=file):
        summary([tmp_path])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match="neither a run"):
        summary([tmp_path])


def test_a_run_without_a_round_is_refused(tmp_path):
    make_run(tmp_path / "run", rounds=1)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(BadInput, match="no round to report on yet"):
        write_report(tmp_path / "run")


def test_runs_of_one_name_are_not_taken_for_seeds(tmp_path):
    make_run(tmp_path / "a" / "seed-0")
    make_run(tmp_path / "b" / "seed-0")
    with pytest.raises(BadInput, match="both called 'seed-0' with seed 0"):
        summary([tmp_path / "a" / "seed-0", tmp_path / "b" / "seed-0"])


def test_several_folders_make_one_summary(tmp_path, demo):
    make_run(tmp_path / "mine", top=0.5)
    rows = summary([demo[0], tmp_path / "mine"])
    assert [row.label for row in rows][-2:] == ["centralised", "mine"]


def test_a_metric_where_less_is_better(tmp_path):
    runs = [("a", 0, {"top": 0.3, "metric": "rmse"}), ("b", 0, {"top": 0.6, "metric": "rmse"})]
    make_comparison(tmp_path / "c", runs)
    rows = summary([tmp_path / "c"])
    assert rows[0].primary == "test_rmse"
    assert best(rows).label == "a"


def test_a_task_without_a_metric_is_judged_by_its_loss(tmp_path):
    lines = make_run(tmp_path / "run")
    for line in lines:
        line.pop("test_accuracy", None)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = summary([tmp_path / "run"])
    assert row.primary == "test_loss"
    assert "Test loss against rounds" in read_page(tmp_path / "run").text


def test_the_first_metric_of_the_task_leads(tmp_path):
    lines = make_run(tmp_path / "run", metric="auroc")
    lines = [{"test_f1": 0.5, **line} if "test_auroc" in line else line for line in lines]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = summary([tmp_path / "run"])
    assert list(row.measures) == ["test_auroc", "test_f1", "test_loss", "train_loss", "divergence"]


def test_summary_csv_says_what_the_rows_say(demo, tmp_path):
    rows = summary([demo[0]])
    with write_summary(tmp_path, rows).open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["label"] for line in lines] == [row.label for row in rows]
    for line, row in zip(lines, rows, strict=True):
        for key, (mean, half) in row.measures.items():
            assert line[key] == ("" if mean is None else str(mean))
            assert line[f"{key}_half_width"] == ("" if half is None else str(half))
        assert int(line["seeds"]) == row.seeds
        assert int(line["diverged"]) == row.diverged
        assert float(line["bytes_up"]) == row.bytes_up


def test_labels_stand_in_the_csv_as_typed(tmp_path):
    label = 'my_file:Mine, "the\nsecond"'
    make_comparison(tmp_path / "c", [(label, 0, {})])
    with write_summary(tmp_path, summary([tmp_path / "c"])).open(newline="", encoding="utf-8") as file:
        assert next(csv.DictReader(file))["label"] == label


def test_no_evaluation_yet(tmp_path):
    make_run(tmp_path / "run", written=4)
    (row,) = summary([tmp_path / "run"])
    assert row.primary == "train_loss"
    assert "Training loss" in read_page(tmp_path / "run").text


# ---- Words and numbers ----


def test_numbers_are_for_people():
    assert show_measure("test_accuracy", (0.8534, 0.0081)) == "85.3 ± 0.8 %"
    assert show_measure("test_accuracy", (0.8534, None)) == "85.3 %"
    assert show_measure("test_loss", (0.41237, 0.01312)) == "0.412 ± 0.013"
    assert show_measure("test_loss", (12.41237, 3.2)) == "12 ± 3"
    assert show_measure("test_loss", (0.32771, 0.0072)) == "0.328 ± 0.007"
    assert show_measure("test_loss", (0.5, 0.0)) == "0.500 ± 0"
    assert show_measure("test_loss", (3.1e12, 4e11)) == "3.10e+12 ± 4e+11"
    assert show_measure("test_loss", (0.45, None)) == "0.450"
    assert show_measure("test_loss", (450.2, None)) == "450"
    assert show_measure("test_loss", (None, None)) == NOTHING
    assert show_bytes(999) == "999 B"
    assert show_bytes(999_700) == "1 MB"
    assert show_bytes(203_544_000) == "204 MB"
    assert show_bytes(0) == "0 B"
    assert show_count(600_000) == "600 k"
    assert show_count(None) == NOTHING
    assert [show_seconds(s) for s in (2.04, 99.94, 400, 7300, 3599.6, None)] == [
        "2.04 s",
        "99.9 s",
        "7 min",
        "2 h 1 min",
        "60 min",
        NOTHING,
    ]


def test_what_is_not_a_finite_number_is_none():
    assert [finite(value) for value in (1, 0.5, None, math.nan, math.inf, "1")] == [1.0, 0.5, None, None, None, None]


def test_direction_of_a_measure():
    keys = ("test_loss", "test_squared-error", "client_rmse_worst10", "test_accuracy", "test_auroc")
    assert [lower_is_better(key) for key in keys] == [True, True, True, False, False]


def test_the_worst_tenth_of_the_clients_is_a_column(tmp_path):
    lines = make_run(tmp_path / "run")
    lines = [line | {"client_accuracy_mean": 0.8, "client_accuracy_worst10": 0.4} for line in lines]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = summary([tmp_path / "run"])
    assert list(row.measures)[:3] == ["test_accuracy", "client_accuracy_worst10", "test_loss"]
    page = read_page(tmp_path / "run").text
    assert "client accuracy, worst tenth" in page and "40.0 %" in page


def test_a_setting_that_varies_is_not_described(tmp_path):
    make_comparison(tmp_path / "c", [("a", 0, {}), ("b", 0, {}), ("c", 0, {})])
    path = tmp_path / "c" / "run-0" / "seed-0" / "config.toml"
    path.write_text(path.read_text().replace('"one-class"', '"iid"').replace("steps = 12", "steps = 24"))
    words = describe(read_runs(tmp_path / "c"))
    assert "split over 100 clients by varying means" in words
    assert "the local steps given below on mini-batches of 50" in words


def test_what_differs_between_labels(demo):
    lines = differences(read_runs(demo[0]))
    assert lines["fedacg"] == ["local.lr = 0.05", 'algorithm.name = "fedacg"']
    assert lines["fedavg"] == ["local.lr = 0.1", 'algorithm.name = "fedavg"']  # the seed is no setting


def test_the_terminal_shows_the_table(demo):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(console_table(summary([demo[0]])))
    text = console.export_text()
    assert "1 of 3 diverged" in text
    assert "407 MB" in text  # down and up
    assert all(label in text for label in ("fedavg", "fedacg", "fedcm", "scaffold", "centralised"))


def test_the_table_fits_a_terminal_of_80_columns(demo):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(console_table(summary([demo[0]])))
    text = console.export_text()
    assert all(label in text for label in ("fedacg", "scaffold", "centralised"))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_the_terminal_takes_no_label_for_markup(tmp_path):
    make_comparison(tmp_path / "c", [("[red]a[/]", 0, {})])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(console_table(summary([tmp_path / "c"])))
    assert "[red]a[/]" in console.export_text()


# ---- Plots ----


def test_a_curve_is_the_mean_over_seeds_with_its_interval(demo):
    folder, made = demo
    runs = by_label(read_runs(folder))["fedavg"]
    line = curve(runs, Plot("test_accuracy", "", "", against="bytes"))
    values = [100 * made["fedavg", seed][19]["test_accuracy"] for seed in range(3)]
    assert len(line.x) == 10
    assert line.x[1] == 2 * 2_035_440 * 20
    assert line.mean[1] == pytest.approx(fmean(values))
    assert line.half[1] == pytest.approx(4.302653 * stdev(values) / math.sqrt(3), rel=1e-6)


def test_a_logarithmic_curve_is_a_mean_of_logarithms(demo):
    folder, made = demo
    line = curve(by_label(read_runs(folder))["fedacg"], Plot("divergence", "", "", log=True))
    assert line.mean[6] == pytest.approx(fmean(math.log10(made["fedacg", seed][6]["divergence"]) for seed in range(3)))


def test_a_curve_breaks_where_a_seed_is_not_finite_and_ends_where_one_ends(demo):
    groups = by_label(read_runs(demo[0]))
    assert list(curve(groups["fedcm"], Plot("train_loss", "", "")).shown) == list(range(60))
    assert curve(groups["scaffold"], Plot("train_loss", "", "")).x[-1] == 37


def test_a_long_curve_is_drawn_by_means_of_blocks(tmp_path):
    lines = make_run(tmp_path / "run", rounds=450)
    line = curve(read_runs(tmp_path / "run"), Plot("train_loss", "", ""))
    assert len(line.x) == 150
    assert line.x[1] == 5
    assert line.mean[1] == pytest.approx(fmean(lines[t]["train_loss"] for t in (3, 4, 5)))
    assert line.half is None


@pytest.mark.parametrize(
    ("low", "high"), [(-3.2, 2.1), (0.3, 1.6), (1.2, 1.5), (1.31, 1.37), (-12, 60), (1.301, 1.302)]
)
def test_a_logarithmic_axis_has_a_few_ticks(low, high):
    ticks = _log_ticks(low, high)
    assert 2 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)


def test_a_label_has_one_colour_in_every_plot(demo):
    runs = read_runs(demo[0])
    look = looks(runs)
    assert len({(entry.colour, str(entry.dash)) for entry in look.values()}) == 5
    for plot in plots(runs):
        svg = draw(runs, plot).lower()
        assert all(look[label].colour.lower() in svg for label in ("fedavg", "fedacg", "fedcm", "scaffold"))


def test_more_labels_than_colours_differ_by_their_dashes(tmp_path):
    make_comparison(tmp_path / "c", [(f"m{i}", 0, {"rounds": 20}) for i in range(16)])
    look = looks(read_runs(tmp_path / "c"))
    assert len({(entry.colour, str(entry.dash)) for entry in look.values()}) == 16


def test_a_run_that_blows_up_still_leaves_a_page(tmp_path):
    lines = make_run(tmp_path / "run", rounds=40)
    for line in lines[20:30]:
        line["train_loss"] = line["divergence"] = 1e300
    for line in lines[30:]:
        line["train_loss"] = line["divergence"] = math.nan  # written as NaN, which JSON does not know and Python reads
        line["test_loss"] = math.inf
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summary([tmp_path / "run"])[0].diverged == 1
    assert "1 of 1 diverged" in read_page(tmp_path / "run").text


# ---- Against the baseline ----


def test_differences_are_paired_by_seed(demo):
    folder, made = demo
    found = contrasts(folder)
    late = {label: [made[label, seed][99]["test_accuracy"] for seed in range(3)] for label in ("fedavg", "fedacg")}
    mean, half, p = paired([b - a for a, b in zip(late["fedavg"], late["fedacg"], strict=True)])
    one = found["fedacg"].difference
    assert (one.n, one.mean, one.half, one.p) == (3, pytest.approx(mean), pytest.approx(half), pytest.approx(p))
    assert found["scaffold"].difference.n == 2  # its third seed is still going
    assert found["fedavg"].difference is None
    assert found["centralised"].difference.p is None  # the ceiling is no rival
    tested = [found[label].difference for label in ("fedacg", "fedcm", "scaffold")]
    assert [d.corrected for d in tested] == pytest.approx(holm([d.p for d in tested]))


def test_what_it_takes_to_reach_the_baseline(demo):
    folder, made = demo
    end = fmean(made["fedavg", seed][99]["test_accuracy"] for seed in range(3))
    found = contrasts(folder)
    for at, target in zip(found["fedacg"].reached, (end, 0.95 * end), strict=True):
        firsts = [
            next(line for line in made["fedacg", seed] if line.get("test_accuracy", 0) >= target) for seed in range(3)
        ]
        assert (at.target, at.k, at.n) == (pytest.approx(target), 3, 3)
        assert at.rounds == Amount(sorted(line["round"] for line in firsts)[1])
        assert at.bytes == Amount(2 * 2_035_440 * at.rounds.value)
        assert at.gradients == Amount(6000 * at.rounds.value)


def test_a_median_never_leaves_out_those_that_did_not_arrive():
    def run(at, end=100):
        return [{"round": r, "bytes_up": r, "gradients": 2 * r, "m": float(r >= at)} for r in range(10, end + 1, 10)]

    one = reached([run(20), run(40), run(900)], "m", 1.0, lower=False)
    assert (one.k, one.n, one.rounds, one.gradients) == (2, 3, Amount(40), Amount(80))
    one = reached([run(20), run(900), run(900, end=60)], "m", 1.0, lower=False)
    assert (one.k, one.rounds, one.bytes) == (1, Amount(60, beyond=True), Amount(60, beyond=True))
    assert reached([run(20), run(40)], "m", 1.0, lower=False).rounds == Amount(30)
    assert reached([run(20), run(900)], "m", 1.0, lower=False).rounds == Amount(100, beyond=True)
    assert reached([run(20)], "m", 0.0, lower=True).rounds == Amount(10)


def test_the_near_target_is_the_worse_one():
    assert targets(0.8, lower=False) == pytest.approx([0.8, 0.76])
    assert targets(0.8, lower=True) == pytest.approx([0.8, 0.84])
    assert targets(-2.0, lower=False) == pytest.approx([-2.0, -2.1])


def test_a_label_without_a_final_value_has_no_difference(tmp_path):
    runs = [("a", s, {"metric": "rmse"}) for s in range(2)]
    runs += [("b", s, {"metric": "rmse", "top": 0.6, "diverges": s == 1}) for s in range(2)]
    make_comparison(tmp_path / "c", runs)
    assert contrasts(tmp_path / "c")["b"].difference is None
    assert "has no difference" in read_page(tmp_path / "c").text


def test_the_primary_measure_can_be_named(tmp_path):
    runs = [(label, seed, {"top": top}) for label, top in (("a", 0.8), ("b", 0.9)) for seed in range(3)]
    make_comparison(tmp_path / "c", runs, primary="test_loss")
    rows = summary([tmp_path / "c"])
    assert [row.primary for row in rows] == ["test_loss", "test_loss"] and rows[0].lower
    assert best(rows).label == "b"
    assert contrasts(tmp_path / "c")["b"].difference.mean < 0
    assert "p with Holm's correction" in read_page(tmp_path / "c").text
    path = tmp_path / "c" / "comparison.json"
    path.write_text(path.read_text().replace('"primary": "test_loss"', '"primary": "test_los"'))
    with pytest.raises(BadInput, match=r"report\.primary: no run has recorded test_los .*test_loss"):
        summary([tmp_path / "c"])


def test_a_metric_of_ones_own_says_what_is_better(tmp_path):
    runs = [(label, 0, {"top": top, "metric": "cost"}) for label, top in (("a", 0.3), ("b", 0.6))]
    make_comparison(tmp_path / "c", runs)
    assert best(summary([tmp_path / "c"])).label == "b"
    for path in (tmp_path / "c").rglob("config.toml"):
        path.write_text(path.read_text() + '[recorded.better]\ncost = "lower"\n')
    assert best(summary([tmp_path / "c"])).label == "a"


def test_the_csv_has_the_contrasts(demo, tmp_path):
    found = contrasts(demo[0])
    path = write_summary(tmp_path, summary([demo[0]]), found)
    with path.open(newline="", encoding="utf-8") as file:
        lines = {line["label"]: line for line in csv.DictReader(file)}
    one = found["fedacg"].difference
    assert [lines["fedacg"][k] for k in ("difference_seeds", "difference", "p_holm")] == [
        "3", str(one.mean), str(one.corrected),
    ]  # fmt: skip
    assert lines["fedavg"]["difference"] == lines["fedavg"]["p"] == ""
    assert lines["fedacg"]["reached_95"] == "3 of 3"
    runs = [("a", 0, {}), ("b", 0, {"top": 0.5})]
    make_comparison(tmp_path / "c", runs)
    with write_summary(tmp_path, summary([tmp_path / "c"]), contrasts(tmp_path / "c")).open(newline="") as file:
        line = list(csv.DictReader(file))[1]
    assert (line["reached"], line["rounds_to_target"], line["p"]) == ("0 of 1", ">100", "")


def test_the_page_says_how_it_was_tested(demo):
    page = read_page(demo[0])
    for label, one in contrasts(demo[0]).items():
        if one.difference:
            assert show_difference("test_accuracy", one.difference) in page.text
        for at in one.reached:
            assert show_amount(at.rounds) in page.text and show_amount(at.bytes, show_bytes) in page.text, label
    for words in (
        "paired Student's t interval, 95 %",
        "Holm's correction over 3 labels",
        "everything else on this page is descriptive",
    ):
        assert words in page.text
    assert page.text.index("Nothing was tuned") < page.text.index("Compared:")


def test_numbers_of_contrasts_are_for_people():
    assert show_difference("test_accuracy", Difference(3, 0.0321, 0.008)) == "+3.2 ± 0.8 points"
    assert show_difference("test_accuracy", Difference(1, -0.0321, None)) == "-3.2 points"
    assert show_difference("test_loss", Difference(3, 0.1234, 0.0312)) == "+0.12 ± 0.03"
    assert [show_p(p) for p in (None, 0.0312, 0.0004, 1.0)] == [NOTHING, "0.031", "< 0.001", "1.000"]
    assert show_amount(Amount(300, beyond=True)) == "> 300"


def test_one_pair_has_no_p(tmp_path):
    make_comparison(tmp_path / "c", [("a", 0, {}), ("b", 0, {"top": 0.9})])
    page = read_page(tmp_path / "c")
    assert "One pair of seeds shows nothing about chance" in page.text
    assert "Holm's" not in page.text


# ---- The page ----


def test_the_page_says_what_was_compared(demo):
    page = read_page(demo[0])
    for words in (
        "Compared: fedavg, fedacg, fedcm, scaffold and centralised, with 3 seeds each",
        "Nothing was tuned in this comparison",
        "mnist, split over 100 clients by one-class",
        "In each of 100 rounds 10 clients (participation uniform) train for 12 local steps on mini-batches of 50",
        "Student's t interval, 95 %",
        "same partition, initial model, cohorts and mini-batches",
        "1 of 3 diverged",
        "1 unfinished, left out",
        "undrift compare demo.toml",
        "2.13",
    ):
        assert words in page.text
    assert "nothing about chance" not in page.text
    assert page.tags.count("svg") == 4


def test_the_page_shows_the_rows_numbers(demo):
    page = read_page(demo[0])
    for row in summary([demo[0]]):
        for key, value in row.measures.items():
            assert show_measure(key, value) in page.text


def test_the_page_needs_nothing_else(demo):
    text = write_report(demo[0]).read_text(encoding="utf-8")
    page = Page(text)
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert "script" not in page.tags
    assert "@import" not in text
    assert "url(http" not in text
    assert len(text.encode()) < 1_500_000


def test_one_seed_shows_nothing_about_chance(tmp_path):
    make_comparison(
        tmp_path / "c", [("a", 0, {}), ("b", 0, {"top": 0.9})], tuned="Rates by a search on a <b>share</b>."
    )
    page = read_page(tmp_path / "c")
    assert "One seed shows nothing about chance" in page.text
    assert "Rates by a search on a <b>share</b>." in page.text
    assert "b" not in page.tags
    assert "Nothing was tuned" not in page.text
    assert "±" not in page.text


def test_a_run_alone_has_a_page_without_a_comparison(tmp_path):
    make_run(tmp_path / "mine")
    page = read_page(tmp_path / "mine")
    assert page.tags.count("svg") == 4
    assert "Compared" not in page.text
    assert "What differs" not in page.text
    assert "fedavg" in page.text


@pytest.mark.parametrize(
    "label", ["<script>alert(1)</script>", '"><img src=x>', "$\\frac{1}{", "a\nb\t\x00c", "é" * 300]
)
def test_a_label_may_be_any_text(tmp_path, label):
    make_comparison(tmp_path / "c", [(label, 0, {}), ("other", 0, {"top": 0.9})])
    page = read_page(tmp_path / "c")
    assert "script" not in page.tags
    assert "img" not in page.tags
    if label.isprintable():
        assert label in page.text


def test_a_comparison_in_its_first_minutes(tmp_path):
    made = [("a", 0, {"written": 3}), ("b", 0, {}), ("c", 0, {})]
    make_comparison(tmp_path / "c", made)
    (tmp_path / "c" / "run-1" / "seed-0" / "metrics.jsonl").write_text("")
    (tmp_path / "c" / "run-2" / "seed-0" / "config.toml").unlink()
    page = read_page(tmp_path / "c")
    assert "1 run of 3 not begun" in page.text
    assert "no round yet" in page.text
    assert "unfinished: round 3 of 100" in page.text


def test_the_same_records_give_the_same_page(demo):
    first = write_report(demo[0]).read_bytes()
    assert write_report(demo[0]).read_bytes() == first


def test_a_long_run_stays_a_small_page(tmp_path):
    make_comparison(tmp_path / "c", [(f"m{i}", s, {"rounds": 2000, "top": 0.1 * i}) for i in range(5) for s in (0, 1)])
    assert write_report(tmp_path / "c").stat().st_size < 1_000_000
    assert "means of 150 blocks of rounds" in read_page(tmp_path / "c").text


def test_reporting_loads_neither_torch_nor_matplotlib():
    code = "import sys, undrift.report; print([m for m in ('torch', 'matplotlib', 'jinja2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
