"""A method of one's own: the file to begin with, and the suite on it."""

import subprocess
import sys

import pytest
from running import lines, refused, write

from undrift import check as checking
from undrift import suite

WRONG = """
from dataclasses import dataclass

from undrift import Around


@dataclass(frozen=True)
class ClosesOver(Around):
    def client(self, work, x, **rest):
        return self.inner.client(work.adjust(lambda step, y, grad: grad(y) + 0.1 * (y - x)), x=x, **rest)


@dataclass(frozen=True)
class Raises(Around):
    def server(self, cohort, **fields):
        if cohort.round == 1:
            raise OSError("no such luck")
        return self.inner.server(cohort, **fields)
"""


@pytest.fixture
def few(monkeypatch):
    """Two of the checks, for the speed of the tests."""
    some = (suite.one_traced_step_serves_all_rounds_and_values, suite.packed_bytes_are_counted_bytes)
    monkeypatch.setattr(checking, "checks", lambda make: some)


def test_a_new_method_passes_the_whole_suite_and_its_own_test(undrift, tmp_path):
    code, out, err = undrift("new", "method", "slow-drag")
    assert (code, err) == (0, "") and "slow_drag:SlowDrag" in out
    ended = subprocess.run([sys.executable, "-m", "pytest", "-q", "test_slow_drag.py"], cwd=tmp_path)
    assert ended.returncode == 0


def test_a_new_method_runs_and_logs(undrift, tmp_path):
    undrift("new", "method", "slow-drag")
    toml = write(tmp_path)
    sets = ["--set", "algorithm.name=slow_drag:SlowDrag", "--set", "algorithm.mu=0.2", "--out", "a", "-q"]
    assert undrift("run", toml, *sets) == (0, "", "")
    assert all(record["slow_drag_v_norm"] is not None for record in lines(tmp_path / "a"))
    assert all(line["moved"] > 0 for line in lines(tmp_path / "a", "clients.jsonl"))


def test_nothing_is_overwritten_and_names_are_names(undrift, tmp_path):
    (tmp_path / "test_mine.py").write_text("mine")
    refused(undrift("new", "method", "mine"), "test_mine.py is there already")
    assert not (tmp_path / "mine.py").exists() and (tmp_path / "test_mine.py").read_text() == "mine"
    for name in ("3d", "--", "class", "é"):
        assert undrift("new", "method", name)[0] == 2


def test_what_is_wrong_is_said_where(undrift, tmp_path, few):
    (tmp_path / "wrong.py").write_text(WRONG)
    code, out, _ = undrift("check", "wrong:ClosesOver")
    failed = [line for line in out.splitlines() if line.startswith("FAILS")]
    assert code == 1 and len(out.splitlines()) == 6 and len(failed) == 3
    assert all("one traced step" in line and "closed over" in line for line in failed)
    code, out, _ = undrift("check", "wrong:Raises")
    assert code == 1 and "wrong.py, line" in out and "no such luck" in out
    refused(undrift("check", "wrong:Gone"), "wrong.py has no Gone")


def test_parts_that_cannot_be_joined_are_not_failures(undrift, few):
    code, out, _ = undrift("check", "scaffold")
    assert code == 0
    [line] = [line for line in out.splitlines() if "control variates" in line]
    assert line.startswith("not joined") and "own" in line
