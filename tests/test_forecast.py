"""`undrift plan`: what it says before a run is what the run then takes."""

import json

import numpy as np
import pytest
from running import refused, write

from undrift import config, forecast, speeds
from undrift.experiment import data
from undrift.running import run

BASE = {
    "data": {"name": "synthetic", "clients": 30, "dim": 8},
    "model": {"name": "logistic"},
    "local": {"lr": 0.01, "epochs": 2, "batch": 7},
    "participation": {"clients": 4},
    "run": {"rounds": 5, "threads": 1, "engine": "loop"},
}
# Every way in which messages and gradients are counted: surveys, full gradients, extra gradients, codes, blocks.
METHODS = {
    "fedavg": {"name": "fedavg"},
    "scaffold": {"name": "scaffold"},
    "scaffold, option 1": {"name": "scaffold", "option": 1},
    "mime": {"name": "mime"},
    "mime-lite": {"parts": [{"part": "mime-lite"}]},
    "fedacg": {"name": "fedacg"},
    "ghbm": {"parts": [{"part": "ghbm", "tau": 2}]},
    "qsgd": {"parts": [{"part": "qsgd"}]},
    "top-k": {"parts": [{"part": "top-k", "k": 5}]},
    "centralised": {"name": "centralised"},
}


def made(**changes):
    return config.parse(config.derive(BASE, changes))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("local", [{}, {"drop_last": True}, {"steps": 3}], ids=str)
def test_the_bytes_and_gradients_are_those_of_the_run(tmp_path, name, local):
    e = made(algorithm=METHODS[name], local=local)
    f = forecast.forecast(e)
    last = run(e, tmp_path / "a").records[-1]
    assert f.exact
    assert (f.total_down, f.total_up) == (last["bytes_down"], last["bytes_up"])
    assert f.total_gradients == last["gradients"]


def test_a_longer_run_is_extrapolated(monkeypatch):
    whole = forecast.forecast(made(run={"rounds": 20}))
    monkeypatch.setattr(forecast, "EXACT_ROUNDS", 10)
    some = forecast.forecast(made(run={"rounds": 20}))
    assert whole.exact and not some.exact and "about" in "\n".join(some.lines())
    assert some.total_up == whole.total_up and 0.5 < some.total_gradients / whole.total_gradients < 2


def test_clients_states_and_how_often_one_is_seen():
    f = forecast.forecast(made(algorithm={"name": "scaffold"}))
    size = 8 * 10 + 10
    sizes = data(made()).sizes(np.arange(30))
    assert (f.parameters, f.population, f.largest_size, f.mean_size) == (size, 30, sizes.max(), sizes.mean())
    assert (f.client_state, f.server_state) == (4 * size, 8 * size)
    assert (f.cohort, f.seen) == (4, 5 * 4 / 30)
    assert f.bytes_down == f.bytes_up == 8 * size


def test_millions_of_clients_are_sampled():
    f = forecast.forecast(made(data={"clients": 3_000_000}, participation={"weights": "uniform"}))
    assert f.sampled and f.population == 3_000_000 and "sample" in "\n".join(f.lines())
    assert 5 <= f.mean_size <= f.largest_size <= 1000


def test_the_time_is_known_once_the_speed_is(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds, "SECONDS", 0.01)
    e = made(run={"engine": "auto"})
    f = forecast.forecast(e)
    assert f.seconds is None and "unknown" in f.lines()[-1]
    assert not (tmp_path / "cache" / "speeds").exists()  # it does not measure
    run(e, tmp_path / "a")
    assert forecast.forecast(e).seconds > 0


def test_the_partition_comes_back(undrift, tmp_path):
    toml = write(tmp_path, MNIST)
    code, out, err = undrift("plan", toml, "--partition", "parts.json", "--set", "data.seed=5")
    assert (code, err) == (0, "") and "573,578 parameters" in out
    there, other = data(config.read(toml, ["data.seed=5"])), data(config.read(toml))
    back = data(config.read(write(tmp_path, MNIST.replace(SPLIT, 'file = "parts.json"'))))
    assert there.population == back.population == 40
    assert all(np.array_equal(a, b) for a, b in zip(there.parts, back.parts, strict=True))
    assert not np.array_equal(there.parts[0], other.parts[0])
    assert len(json.loads((tmp_path / "parts.json").read_text())) == 40


SPLIT = 'name = "dirichlet", alpha = 0.3, clients = 40'
MNIST = f"""
[data]
name = "mnist"
partition = {{{SPLIT}}}

[model]
name = "lenet"
"""


def test_what_cannot_be_planned(undrift, tmp_path):
    toml = write(tmp_path)
    refused(undrift("plan", toml, "--set", "local.rate=1"), "local.rate")
    refused(undrift("plan", toml, "--partition", "p.json"), "no index lists")
    assert not (tmp_path / "p.json").exists()
