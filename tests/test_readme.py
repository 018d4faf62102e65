"""What the README shows is what is there."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_method_in_the_readme_is_the_example():
    assert (ROOT / "examples" / "slow_pull.py").read_text(encoding="utf-8") in README


def test_the_example_runs_as_the_readme_says(tmp_path):
    [line] = re.findall(r"undrift (compare examples/slow_pull.*)", README)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    words = [*line.split(), "--set", "run.rounds=2", "-q"]
    subprocess.run([sys.executable, "-m", "undrift.cli", *words], cwd=tmp_path, check=True)
    assert "slow_pull:SlowPull" in (tmp_path / "runs" / "slow_pull" / "summary.csv").read_text(encoding="utf-8")


def test_the_experiment_in_the_readme_is_one():
    from undrift import config

    [text] = re.findall(r"```toml\n(.*?)```", README, re.S)
    config.parse(tomllib.loads(text))


@pytest.mark.parametrize("toml", sorted([*ROOT.glob("examples/*.toml"), *ROOT.glob("experiments/*.toml")]), ids=str)
def test_every_experiment_in_the_repository_can_be_read(toml):
    from undrift import config

    config.read(toml)
