"""Runs and comparisons as a pandas table."""

import sys

import pytest
from running import lines, write

import undrift as ud
from undrift import config
from undrift.errors import BadInput
from undrift.running import run

LOGGED = ["algorithm.name='mine:Mine'", "run.rounds=3", "run.eval_every=2"]


@pytest.fixture
def e(tmp_path):
    return config.read(write(tmp_path), LOGGED)


def test_without_pandas_one_sentence_names_it(e, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BadInput, match="pip install pandas"):
        ud.frame(tmp_path)


def test_the_rounds_of_runs_and_comparisons(e, tmp_path):
    pandas = pytest.importorskip("pandas")
    run(e, tmp_path / "one")
    ud.compare(e, methods=["fedavg", "scaffold"], seeds=2, out=tmp_path / "both")
    table = ud.frame(tmp_path / "one", tmp_path / "both")
    assert list(table.columns[:3]) == ["label", "seed", "round"]
    # a line for each of three rounds: one run, and two methods at two seeds
    assert table.groupby(["label", "seed"]).size().to_dict() == {
        ("one", 0): 3, ("fedavg", 0): 3, ("fedavg", 1): 3, ("scaffold", 0): 3, ("scaffold", 1): 3
    }  # fmt: skip
    mine, records = table[table.label == "one"], lines(tmp_path / "one")
    assert mine.bytes_up.tolist() == [r["bytes_up"] for r in records]
    assert mine.test_accuracy.notna().tolist() == [False, True, True]
    assert pandas.api.types.is_float_dtype(table.test_accuracy) and pandas.api.types.is_integer_dtype(table.bytes_up)


def test_what_was_logged_of_clients(e, tmp_path):
    pytest.importorskip("pandas")
    run(e, tmp_path / "one")
    table = ud.frame(tmp_path / "one", clients=True)
    logged = lines(tmp_path / "one", "clients.jsonl")
    assert list(table.columns) == ["label", "seed", "round", "client", "moved"] and len(logged) == 9
    assert table.moved.tolist() == [line["moved"] for line in logged]


def test_nothing_to_open(tmp_path):
    pytest.importorskip("pandas")
    with pytest.raises(BadInput, match="at least one folder"):
        ud.frame()
    with pytest.raises(BadInput, match="neither a run"):
        ud.frame(tmp_path)
