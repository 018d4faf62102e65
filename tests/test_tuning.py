"""The search before a comparison: what is tried, what wins, and that the table shows none of the tuning runs."""

import csv
import json
import shutil
import signal

import pytest
from running import TOML, end, lines, same, start, wait_for, wait_for_round, write

from undrift import config
from undrift.comparison import grids, jobs
from undrift.errors import BadInput
from undrift.report import read_run, write_report
from undrift.tuning import edges, search, settle, validated

LABELS = """
[compare.a]
algorithm = {name = "fedavg"}
tune = {"local.lr" = [0.03, 0.3], "local.momentum" = [0.0, 0.5]}

[compare.b]
algorithm = {name = "mine:Slow"}
"""
TUNE = ["--tune", "local.lr=0.01,0.1,1000", "--seeds", "2", "--set", "run.rounds=10", "--set", "run.eval_every=1"]


def planned(toml, *tune, sets=(), seeds=1, algorithms=None):
    document = config.load(toml)
    for text in sets:
        document = config.assign(document, text)
    folder = str(toml.parent)
    todo = jobs(document, folder, algorithms, 2)
    return todo, search(todo, grids(document, folder), config.grid(tune), seeds, folder)


@pytest.fixture
def toml(tmp_path):
    return write(tmp_path, TOML + LABELS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The tuned comparison that was left alone."""
    folder = tmp_path_factory.mktemp("tuned")
    toml = write(folder, TOML + LABELS)
    code, said, err = end(start("compare", toml, "--out", folder / "c", "-q", *TUNE))
    assert (code, said, err) == (0, "", "")
    return folder / "c"


# ---- What is tried ----


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["local.lr=0.01,0.1"], {"local.lr": [0.01, 0.1]}),
        (["local.lr = [0.01, 0.1]", "algorithm.name=fedavg,my_file:Mine"],
         {"local.lr": [0.01, 0.1], "algorithm.name": ["fedavg", "my_file:Mine"]}),
        (['local.schedule={name = "cosine"},"steps"'], {"local.schedule": [{"name": "cosine"}, "steps"]}),
        (["local.lr=0.1"], {"local.lr": [0.1]}),
        (["algorithm.mu=0.1,huge"], {"algorithm.mu": [0.1, "huge"]}),
    ],
)  # fmt: skip
def test_a_grid_is_read_as_it_is_typed(texts, found):
    assert config.grid(texts) == found


@pytest.mark.parametrize("text", ["local.lr", "local.lr=", "=1,2", "local.lr=1,\n2", "local.lr=a,,b", "local.lr=[]"])
def test_what_is_no_grid_is_refused(text):
    with pytest.raises(BadInput, match="path=value,value"):
        config.grid([text])


def test_a_labels_own_grid_stands_beside_and_instead(toml):
    _, found = planned(toml, "local.lr=0.01,0.1,1", "local.clip=1.0,10.0")
    assert found.grids == {
        "a": {"local.lr": [0.03, 0.3], "local.clip": [1.0, 10.0], "local.momentum": [0.0, 0.5]},
        "b": {"local.lr": [0.01, 0.1, 1], "local.clip": [1.0, 10.0]},
    }
    assert len([trial for trial in found.trials if trial.label == "a"]) == 8
    assert len({job.folder for job in found.jobs}) == len(found.jobs) == 14


def test_without_a_grid_there_is_no_search(toml):
    assert planned(toml, algorithms=["b", "scaffold"])[1] is None
    assert list(planned(toml)[1].grids) == ["a"]  # a table of its own is enough


def test_tuning_runs_hold_data_out_at_seeds_of_their_own(toml):
    todo, found = planned(toml, "local.lr=0.1,1", seeds=2)
    assert {job.seed for job in found.jobs} == {10_000, 10_001}
    assert {job.document["run"]["seed"] for job in found.jobs} == {10_000, 10_001}
    assert {job.document["data"]["validation"] for job in found.jobs} == {0.1}
    assert {job.document["data"]["validation"] for job in todo} == {None}
    _, found = planned(toml, "local.lr=0.1,1", sets=["data.validation=0.25"])
    assert {job.document["data"]["validation"] for job in found.jobs} == {0.25}


def test_the_runs_of_the_table_take_the_choice_and_nothing_else(toml):
    todo, _ = planned(toml)
    after = settle(todo, {"labels": {"a": {"chosen": {"local.epochs": 2, "local.lr": 0.3}}}}, str(toml.parent))
    for before, job in zip(todo, after, strict=True):
        changed = config.differences(before.document, job.document)
        assert changed == (["local.lr", "local.epochs", "local.steps"] if job.label == "a" else [])
        assert (job.label, job.seed, job.folder) == (before.label, before.seed, before.folder)


@pytest.mark.parametrize(
    ("tune", "sets", "said"),
    [
        ("local.lr=0.1", ["data.validation=0"], "data.validation = 0"),
        ("local.lr=0.1,-1", [], "--tune local.lr=-1 does not fit b: local.lr must be a number above 0, not -1"),
        ("local.lrr=0.1", [], "local.lrr"),
        ("algorithm.alpha=0.1", [], "algorithm.alpha"),
        ("run.seed=1,2", [], "--tune run.seed: that is not a setting to tune"),
        ("data.validation=0.1", [], "--tune data.validation"),
        ("compare.x=1", [], "--tune compare.x"),
        ("local.clip=0.1,0.10", [], "--tune local.clip: 0.1 stands there twice"),
        ("local.clip=1.0", ["run.keep_best=true"], "run.keep_best needs a validation share"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_runs(toml, tune, sets, said):
    with pytest.raises(BadInput) as problem:
        planned(toml, tune, sets=sets)
    assert said in str(problem.value) and "\n" not in str(problem.value)


def test_the_command_refuses_in_one_sentence(toml, tmp_path):
    code, said, err = end(
        start("compare", toml, "--out", tmp_path / "c", "--tune", "local.lr=1", "--set", "data.validation=0")
    )
    assert (code, said) == (2, "") and "data.validation = 0" in err and err.count("\n") == 1
    assert not (tmp_path / "c").exists()


def test_a_label_called_tuning_would_lie_among_the_tuning_runs(tmp_path):
    toml = write(tmp_path, TOML + '\n[compare.tuning]\nalgorithm = {name = "fedavg"}\n')
    with pytest.raises(BadInput, match="another name"):
        planned(toml, "local.lr=0.1")


# ---- What wins ----


def run_of(folder, values, rounds=20, diverged=False, better=None):
    folder.mkdir()
    more = f'[recorded.better]\naccuracy = "{better}"\n' if better else ""
    (folder / "config.toml").write_text(f"[run]\nrounds = {rounds}\nseed = 3\n{more}")
    every = rounds // len(values)
    records = [{"round": every * (i + 1), "validation_accuracy": v, "test_loss": 1.0} for i, v in enumerate(values)]
    if diverged:
        records[-1]["test_loss"] = None
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_run(folder, "a", 3)


def test_a_setting_is_worth_the_mean_of_its_last_tenth(tmp_path):
    values = [0.1] * 18 + [0.5, 0.9]
    assert validated(run_of(tmp_path / "a", values), "validation_accuracy") == pytest.approx(0.7)
    assert validated(run_of(tmp_path / "b", values, diverged=True), "validation_accuracy") is None
    assert validated(run_of(tmp_path / "c", [0.1] * 19 + [None]), "validation_accuracy") is None


@pytest.mark.parametrize(("better", "chosen"), [("higher", 0.1), ("lower", 0.03), (None, 0.1)])
def test_the_metric_says_what_is_better(toml, tmp_path, better, chosen):
    _, found = planned(toml, "local.lr=0.01,0.03,0.1,0.3,1.0", algorithms=["b"])
    values = {0.01: (0.4, True), 0.03: (0.5, False), 0.1: (0.9, False), 0.3: (0.9, False), 1.0: (0.95, True)}
    for trial in found.trials:
        value, diverged = values[trial.settings["local.lr"]]
        [job] = trial.jobs
        (tmp_path / job.folder).parent.mkdir(parents=True)
        run_of(tmp_path / job.folder, [value] * 20, diverged=diverged, better=better)
    choice = found.record(tmp_path)["labels"]["b"]
    assert choice["chosen"] == {"local.lr": chosen}  # the first of two that are as good
    assert [one["value"] for one in choice["tried"]] == pytest.approx([None, 0.5, 0.9, 0.9, None])
    assert choice["edge"] == []


def test_the_edge_of_a_grid():
    grid = {"a": [1, 2, 3], "b": [0.1, 0.2], "c": ["x", "y"], "d": [5], "e": [True, False]}
    assert edges(grid, {"a": 2, "b": 0.2, "c": "x", "d": 5, "e": True}) == ["b"]
    assert edges(grid, {"a": 3, "b": 0.1, "c": "y", "d": 5, "e": False}) == ["a", "b"]


# ---- A tuned comparison ----


def test_what_a_tuned_comparison_leaves(alone):
    comparison = json.loads((alone / "comparison.json").read_text())
    tuning = comparison["tuning"]
    assert tuning["seeds"] == [10_000] and tuning["validation"] == 0.1
    assert [run["seed"] for run in comparison["runs"]] == [0, 0, 1, 1]
    a, b = tuning["labels"]["a"], tuning["labels"]["b"]
    assert a["grid"] == {"local.lr": [0.03, 0.3], "local.momentum": [0.0, 0.5]} and len(a["tried"]) == 4
    assert [one["settings"]["local.lr"] for one in b["tried"]] == [0.01, 0.1, 1000]
    for choice in (a, b):
        assert choice["value"] == max(one["value"] for one in choice["tried"] if one["value"] is not None)
    for entry in comparison["runs"]:
        settings = tuning["labels"][entry["label"]]["chosen"]
        resolved = config.load(alone / entry["folder"] / "config.toml")
        assert resolved["local"]["lr"] == settings["local.lr"] and "validation" not in resolved["data"]
        assert "validation_accuracy" not in lines(alone / entry["folder"])[-1]
    with open(alone / "summary.csv", newline="") as file:
        assert [(row["label"], row["seeds"]) for row in csv.DictReader(file)] == [("a", "2"), ("b", "2")]


def test_the_page_tells_of_the_search(alone):
    page = " ".join(write_report(alone).read_text(encoding="utf-8").split())
    assert "Nothing was tuned" not in page and "Tuned: each label runs at the setting" in page
    for words in ("grid: local.lr = [0.01, 0.1, 1000]", "10000, which no table shows", "Chosen: <strong>local.lr ="):
        assert words in page


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals of POSIX")
@pytest.mark.parametrize("at", ["tuning/b/*/seed-10000", "b/seed-1"])
def test_killed_it_goes_on_and_redoes_nothing(toml, tmp_path, alone, at):
    out = tmp_path / "c"
    process = start("compare", toml, "--out", out, "-q", *TUNE)
    wait_for_round(wait_for(out.joinpath(at).parent, process) / at.rpartition("/")[2], 2, process)
    process.kill()
    end(process)
    finished = {path: (path.parent.parent / "metrics.jsonl").stat().st_mtime_ns for path in out.rglob("final.*")}
    assert finished
    assert end(start("compare", toml, "--out", out, "-q", *TUNE, "--resume")) == (0, "", "")
    assert all((p.parent.parent / "metrics.jsonl").stat().st_mtime_ns == at for p, at in finished.items())
    mine, theirs = (json.loads((folder / "comparison.json").read_text()) for folder in (out, alone))
    assert (mine["runs"], mine["tuning"]) == (theirs["runs"], theirs["tuning"])
    for entry in mine["runs"]:
        same(out / entry["folder"], alone / entry["folder"])


def test_a_tuned_comparison_does_not_go_on_untuned(tmp_path, alone):
    shutil.copytree(alone, tmp_path / "c")
    toml = write(
        tmp_path, TOML + LABELS.replace('tune = {"local.lr" = [0.03, 0.3], "local.momentum" = [0.0, 0.5]}', "")
    )
    code, _, err = end(start("compare", toml, "--out", tmp_path / "c", "-q", "--seeds", "2", "--resume"))
    assert code == 2 and "was tuned: name its --tune again" in err


def test_a_tuning_run_that_fails_ends_it_before_the_table(toml, tmp_path):
    more = ["--algorithms", "fedavg,mine:Wrong", "--tune", "local.lr=0.1", "--seeds", "1"]
    code, said, err = end(start("compare", toml, "--out", tmp_path / "c", "-q", *more))
    assert (code, said) == (3, "") and err.startswith("undrift: tuning mine:Wrong, seed 10000") and "1 of 4" in err
    assert [path.name for path in (tmp_path / "c").iterdir() if path.is_dir()] == ["tuning"]
