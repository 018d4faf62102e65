"""From a configuration to rounds: tasks of all kinds, the same draws for every method, a huge population."""

import textwrap
import tracemalloc

import numpy as np
import pytest
import torch

from undrift import config, suite
from undrift.algorithms import algorithms
from undrift.experiment import build
from undrift.participation import Participation

BOTH = pytest.mark.parametrize("engine", ["loop", "vmap"])


def built(document, folder=None, **run):
    """The experiment of a document, on one thread in float64."""
    document = {**document, "run": {"rounds": 40, "precision": "float64", "threads": 1, **run}}
    return build(config.parse(document, folder))


REGRESSION = '''
    import torch
    from torch import nn

    class Houses:
        """Clients of unequal size; the price is a function of a plan and of a place."""
        population = 5

        def size(self, i):
            return 6 + 3 * i

        def client(self, i):
            return self.some(i, self.size(i))

        def some(self, seed, n):
            g = torch.Generator().manual_seed(seed)
            plan, place = torch.randn(n, 2, 3, generator=g), torch.randn(n, 2, generator=g) + 0.3 * seed
            return plan, place, plan.sum((1, 2)) - 2 * place[:, 0]

        def test(self):
            return self.some(99, 50)

    class Price(nn.Module):
        def __init__(self):
            super().__init__()
            self.plan, self.place = nn.Linear(6, 1), nn.Linear(2, 1)

        def forward(self, plan, place):
            return (self.plan(plan.flatten(1)) + self.place(place))[:, 0]
'''

LABELS = '''
    import torch
    from torch import nn

    class Tags:
        """Several labels for each sample, as dictionaries; the clients see different inputs."""
        population = 4

        def size(self, i):
            return (7, 12, 9, 20)[i]

        def client(self, i):
            return self.some(i, self.size(i))

        def some(self, seed, n):
            g = torch.Generator().manual_seed(seed)
            x = torch.randn(n, 5, generator=g) + 0.5 * (seed % 3)
            return {"features": x, "target": (x[:, :3] - x[:, 2:] > 0.3).float()}

        def test(self):
            return self.some(99, 60)

    class Tagger(nn.Module):
        def __init__(self, hidden=8):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))

        def forward(self, features):
            return self.layers(features)
'''


def user_files(folder, text):
    (folder / "mine.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return str(folder)


def regression(folder, method, engine):
    document = {
        "data": {"name": "mine:Houses"},
        "model": {"name": "mine:Price"},
        "local": {"lr": 0.05, "epochs": 2, "batch": 4},
        "algorithm": {"name": method},
        "participation": {"clients": 3},
    }
    return built(document, user_files(folder, REGRESSION), engine=engine)


@BOTH
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "centralised"])
def test_a_regression_on_two_inputs_is_learnt(tmp_path, method, engine):
    b = regression(tmp_path, method, engine)
    before = b.evaluate(b.simulation.model())
    suite.go(b.simulation, 40)
    after = b.evaluate(b.simulation.model())
    assert after["test_squared-error"] == pytest.approx(after["test_loss"])
    assert after["test_loss"] < 0.05 * before["test_loss"]


@BOTH
@pytest.mark.parametrize("method", ["fedavg", "mime"])
def test_several_labels_with_auroc_are_learnt(tmp_path, method, engine):
    document = {
        "data": {"name": "mine:Tags"},
        "task": {"loss": "binary-cross-entropy", "metrics": ["auroc"]},
        "model": {"name": "mine:Tagger", "hidden": 6},
        "local": {"lr": 0.5, "epochs": 2, "batch": 5},
        "algorithm": {"name": method},
        "participation": {"clients": 3},
    }
    b = built(document, user_files(tmp_path, LABELS), engine=engine)
    before = b.evaluate(b.simulation.model())
    records = suite.go(b.simulation, 25)
    after = b.evaluate(b.simulation.model())
    assert after["test_auroc"] > max(0.85, before["test_auroc"] + 0.1)
    assert after["test_loss"] < before["test_loss"] and records[-1]["train_loss"] < records[0]["train_loss"]


@pytest.mark.parametrize("text, source, model", [(REGRESSION, "Houses", "Price"), (LABELS, "Tags", "Tagger")])
def test_the_drivers_agree_on_tasks_of_ones_own(tmp_path, text, source, model):
    document = {
        "data": {"name": f"mine:{source}"},
        "task": {"loss": "squared-error" if source == "Houses" else "binary-cross-entropy"},
        "model": {"name": f"mine:{model}"},
        "local": {"lr": 0.05, "epochs": 1, "batch": 4},
        "algorithm": {"name": "scaffold"},
        "participation": {"clients": 3},
    }
    folder = user_files(tmp_path, text)
    ways = [{"engine": "loop"}, {"engine": "vmap"}, {"engine": "vmap", "chunk": 2}]
    runs = [built(document, folder, **way).simulation for way in ways]
    records = [suite.go(s, 4) for s in runs]
    for s, r in zip(runs[1:], records[1:], strict=True):
        suite.agree(suite.held(runs[0]), suite.held(s), 1e-10, source)
        suite.same_records(records[0], r, source)


def test_shakespeare_in_a_loop():
    document = {
        "data": {"name": "shakespeare", "test_size": 20, "group_size": 1},
        "model": {"name": "char-lstm", "hidden": 8},
        "local": {"lr": 0.5, "steps": 2, "batch": 4},
        "participation": {"clients": 2},
    }
    b = built(document, engine="loop", precision="float32")
    start = b.simulation.model().clone()
    record = suite.go(b.simulation, 1)[0]
    assert record["gradients"] <= 16 and record["cohort"] == 2 and record["lost"] == 0
    assert abs(record["train_loss"] - np.log(b.simulation.planners[0].source.classes)) < 1.0
    assert not torch.equal(b.simulation.model(), start)
    loss, metrics = b.evaluate._over([b.simulation.planners[0].source.test()], b.simulation.model())
    assert np.isfinite(loss) and 0 <= metrics[0][0].result() <= 1


# -- one seed, one experiment ---------------------------------------------------------------


def of_seed(name, seed=3):
    document = {
        "data": {"name": "mnist", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 20}},
        "model": {"name": "logistic"},
        "local": {"lr": 0.1, "steps": 2, "batch": 5},
        "algorithm": {"name": name},
        "participation": {"clients": 4},
    }
    return built(document, seed=seed, engine="loop", precision="float32")


@pytest.fixture(scope="module")
def reference():
    return of_seed("fedavg")


@pytest.mark.parametrize("name", algorithms.names())
def test_at_one_seed_all_methods_see_the_same(reference, name):
    a, b = reference.simulation, of_seed(name).simulation
    assert torch.equal(a.model(), b.model())
    ours, theirs = a.planners[0], b.planners[0]
    if not b.algorithm.sends:  # what it stands for
        theirs = theirs.as_many_as
    for mine, other in zip(ours.source.parts, theirs.source.parts, strict=True):
        assert np.array_equal(mine, other)
    for r in range(3):
        one, same = ours.round(r), theirs.round(r)
        assert np.array_equal(one.clients, same.clients) and np.array_equal(one.steps, same.steps)
        feeds = [p.feed(p.clients.tolist(), p.steps) for p in (one, same)]
        assert np.array_equal(feeds[0].index, feeds[1].index)


def test_at_another_seed_they_see_something_else(reference):
    a, b = reference.simulation, of_seed("fedavg", seed=4).simulation
    assert not torch.equal(a.model(), b.model())
    plans = [s.planners[0].round(0) for s in (a, b)]
    assert not np.array_equal(plans[0].clients, plans[1].clients)
    assert not np.array_equal(a.planners[0].source.parts[0], b.planners[0].source.parts[0])


# -- a million clients ---------------------------------------------------------------------------


def million(method, engine="loop"):
    document = {
        "data": {"name": "synthetic", "clients": 1_000_000, "dim": 5, "classes": 3},
        "model": {"name": "logistic"},
        "local": {"epochs": 1, "batch": 20},
        "algorithm": {"name": method},
    }
    return built(document, engine=engine, precision="float32").simulation


@pytest.mark.parametrize("method, mebibytes", [("fedavg", 4), ("scaffold", 16)])
def test_memory_grows_with_the_cohort_not_the_population(method, mebibytes):
    million("fedavg")  # modules are imported, which is no memory of a run
    tracemalloc.start()
    try:
        s = million(method)
        suite.go(s, 4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # An array of a number for every client has eight; scaffold adds up all sizes once, some clients at a time.
    assert peak < mebibytes * 2**20
    assert len(s.states[0].row) <= 40
    assert all(len(stored) <= 80 for stored in s.states[0].fields.values())


def test_a_round_asks_for_its_cohort_only(monkeypatch):
    s = million("fedavg", engine="vmap")
    source, asked = s.planners[0].source, []
    for name in ("sizes", "size", "client", "facts", "labels"):
        real = getattr(type(source), name)
        monkeypatch.setattr(
            type(source), name, lambda self, i, real=real: asked.extend(np.atleast_1d(i).tolist()) or real(self, i)
        )
    suite.go(s, 3)
    cohorts = [s.planners[0].participation.cohort(r).tolist() for r in range(3)]
    assert set(asked) == set().union(*cohorts)
    assert isinstance(s.planners[0].participation, Participation) and len(asked) <= 200
