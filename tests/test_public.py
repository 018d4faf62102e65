"""What `import undrift` offers, and what it does not do."""

import subprocess
import sys

import undrift


def test_the_public_names_are_there():
    assert all(getattr(undrift, name) is not None for name in undrift.__all__)
    assert "fedavg" in undrift.algorithms.algorithms.names()
    assert set(dir(undrift)) == {*undrift.__all__, "config"}


def test_importing_changes_nothing_and_loads_no_torch():
    code = "import sys, undrift; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_comparison_and_a_run_from_python(tmp_path):
    e = undrift.config.parse(
        {
            "data": {"name": "synthetic", "clients": 20},
            "model": {"name": "logistic"},
            "local": {"lr": 0.05, "steps": 2, "batch": 5},
            "participation": {"clients": 4},
            "run": {"rounds": 3, "threads": 1},
        }
    )
    result = undrift.run(e, tmp_path / "one")
    assert [r["round"] for r in result.records] == [1, 2, 3]
    rows = undrift.compare(e, methods=["fedavg", "scaffold"], seeds=2, out=tmp_path / "both")
    assert [row.label for row in rows] == ["fedavg", "scaffold"]
    assert (tmp_path / "both" / "report.html").exists()


def test_the_version_is_the_packages():
    from importlib.metadata import version

    assert undrift.__version__ == version("undrift")
