"""Chunks, client states, and the mini-batches of a plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from undrift import suite
from undrift.algorithms.fedavg import Centralised, FedAvg
from undrift.cohort import LADDER, Lead, Plan, States, chunks, padded
from undrift.data import ArraySource
from undrift.participation import Cyclic, Uniform
from undrift.planning import FULL_BATCH, Effort, Planner

F64 = torch.float64


def plan(steps):
    n = len(steps)
    ones = np.ones(n)
    return Plan(
        np.arange(100, 100 + n),
        np.array(steps),
        ones,
        ones / n,
        ones / n,
        ones < 0,
        feed=None,
        uniform=None,
        facts=None,
    )


# -- chunks --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("steps", [[3], [1, 5, 2, 5, 9, 1, 1], list(range(1, 12))])
def test_every_client_runs_once_with_those_of_similar_length(steps, size):
    found = list(chunks([plan(steps)], size, batched=True, replicas=False))
    picks = [c.picks[0][c.real[0]] for c in found]
    assert sorted(np.concatenate(picks).tolist()) == list(range(len(steps)))
    lengths = [steps[i] for some in picks for i in some]
    assert lengths == sorted(steps, reverse=True)
    for c in found:
        assert c.lead.shape == c.picks.shape[1:] and c.picks.shape[1] <= size
        assert c.picks.shape[1] in {*LADDER, size}


def test_one_at_a_time_without_an_axis():
    found = list(chunks([plan([2, 1, 3])], 64, batched=False, replicas=False))
    assert [c.lead.shape for c in found] == [()] * 3
    assert [c.picks.tolist() for c in found] == [[[2]], [[0]], [[1]]]


def test_experiments_of_unequal_cohorts_run_side_by_side():
    plans = [plan([1, 4, 2]), plan([5, 3])]
    found = list(chunks(plans, 2, batched=True, replicas=True))
    assert [c.lead.shape for c in found] == [(2, 2), (2, 1)]
    assert found[0].picks.tolist() == [[1, 2], [0, 1]] and found[1].picks.tolist() == [[0], [-1]]
    assert found[1].of(plans, "steps").tolist() == [[1], [3]]  # padding repeats some client


def test_padding_meets_few_shapes():
    assert {padded(n, 64) for n in range(1, 65)} <= {*LADDER}
    assert all(padded(n, 64) >= n for n in range(1, 65))
    assert padded(7, 7) == 7 and padded(3, 7) == 3 and padded(300, 300) == 300 and padded(257, 300) == 300


def test_leads():
    v = torch.arange(12.0).reshape(2, 3, 2)
    assert Lead((2, 3)).lay(v).shape == (2, 3, 2) and Lead((3,)).lay(v[:1]).shape == (3, 2)
    assert Lead(()).lay(v[:1, :1]).shape == (2,)
    assert Lead(()).grid == (1, 1) and Lead((4,)).grid == (1, 4) and Lead((2, 3)).grid == (2, 3)
    assert torch.equal(Lead((3,)).total(v[0]), v[0].sum(0, keepdim=True))
    assert torch.equal(Lead(()).total(v[0, 0]), v[0, 0])
    assert Lead((2, 3)).rows(torch.ones(2, 1, 5)).shape == (2, 3, 5)


# -- states ----------------------------------------------------------------------------


def test_states_are_held_for_those_that_have_any():
    states = States({"ci": torch.zeros(4), "n": torch.ones(1)})
    assert states.rows([]) == {} and states.age(7, 3) == float("inf")
    states.write([7, 2], {"ci": torch.tensor([[7.0] * 4, [2.0] * 4]), "n": torch.tensor([[5.0], [6.0]])}, round=3)
    read = states.read([2, 9, 7])
    assert read["ci"][:, 0].tolist() == [2, 0, 7] and read["n"][:, 0].tolist() == [6, 1, 5]
    assert states.age(7, 5) == 2 and states.age(9, 5) == float("inf")
    read["ci"].zero_()
    assert states.read([7])["ci"][0, 0] == 7  # a copy


def test_states_grow_with_the_clients_seen_and_come_back():
    states = States({"ci": torch.zeros(3, dtype=F64)})
    truth = {}
    draws = np.random.default_rng(0)
    for r in range(40):
        some = draws.choice(1_000_000, 3, replace=False).tolist() + list(truth)[:1]
        rows = torch.from_numpy(draws.normal(size=(len(some), 3)))
        states.write(some, {"ci": rows}, r)
        truth |= {i: (r, row) for i, row in zip(some, rows, strict=True)}
    assert len(states.fields["ci"]) <= 2 * len(truth)
    assert states.changed == set(truth)
    again = States({"ci": torch.zeros(3, dtype=F64)})
    again.restore({k: v.clone() for k, v in states.rows(states.row).items()})
    for i, (r, row) in truth.items():
        assert torch.equal(again.read([i])["ci"][0], row) and again.age(i, 50) == 50 - r
    again.write([5], {"ci": torch.ones(1, 3, dtype=F64)}, 41)  # and goes on
    assert again.read([5])["ci"][0].tolist() == [1, 1, 1]
    again.restore({})


def test_states_without_fields_still_know_when():
    states = States({})
    states.write([3, 1], {}, 4)
    assert states.age(1, 6) == 2 and states.read([1]) == {}
    again = States({})
    again.restore(states.rows([1, 3]))
    assert again.age(3, 6) == 2


# -- plans and mini-batches -----------------------------------------------------------------


def planner(**changes):
    return suite.planner(FedAvg(), **changes)


def rows_of(feed, client, k):
    """The row numbers of one client's batch k."""
    index = feed.index[client, k]
    return index[index >= 0].tolist()


def test_an_epoch_passes_every_sample_once():
    p = planner(effort=Effort(4, epochs=3))
    clients = [5, 1, 8]
    found = p.round(2)
    steps = p.effort.of(p.source.sizes(np.array(clients)))
    assert steps.tolist() == [18, 6, 6]
    feed = found.feed(clients, steps)
    for c, i in enumerate(clients):
        per_epoch = steps[c] // 3
        own = sorted(p.source.parts[i].tolist())
        epochs = [[r for k in range(e * per_epoch, (e + 1) * per_epoch) for r in rows_of(feed, c, k)] for e in range(3)]
        assert all(sorted(e) == own for e in epochs)
        assert len({tuple(e) for e in epochs}) == 3  # shuffled anew
        sizes = [len(rows_of(feed, c, k)) for k in range(per_epoch)]
        assert sizes == [4] * (len(own) // 4) + [len(own) % 4] * (len(own) % 4 > 0)


def test_steps_go_through_epochs_too():
    p = planner(effort=Effort(4, steps=5))
    feed = p.round(0).feed([1, 0], np.array([5, 5]))  # seven samples: 4, 3, 4, 3, 4; three: 3, 3, 3, ...
    assert [len(rows_of(feed, 0, k)) for k in range(5)] == [4, 3, 4, 3, 4]
    assert [len(rows_of(feed, 1, k)) for k in range(5)] == [3] * 5
    assert feed.samples(1) == 6


def test_a_short_last_batch_may_be_dropped():
    p = planner(effort=Effort(4, epochs=2, drop_last=True))
    assert p.effort.of(np.array([3, 4, 7, 8])).tolist() == [2, 2, 2, 4]
    feed = p.round(0).feed([1, 0], np.array([2, 2]))
    assert [len(rows_of(feed, 0, k)) for k in range(2)] == [4, 4]
    assert [len(rows_of(feed, 1, k)) for k in range(2)] == [3, 3]  # who has less than a batch keeps what it has


def test_a_clients_batches_do_not_depend_on_company():
    p = planner()
    together = p.round(3).feed([0, 5, 4, 7], np.array([1, 6, 5, 3]))
    alone = p.round(3).feed([4], np.array([5]))
    other = p.round(4).feed([4], np.array([5]))
    assert [rows_of(together, 2, k) for k in range(5)] == [rows_of(alone, 0, k) for k in range(5)]
    assert [rows_of(other, 0, k) for k in range(5)] != [rows_of(alone, 0, k) for k in range(5)]
    for k in range(5):
        a, b = together.batch(k), alone.batch(k)
        n = int(b.weight.sum())
        assert torch.equal(a.samples[0][2, :n], b.samples[0][0, :n]) and torch.equal(a.weight[2, :n], b.weight[0, :n])
        assert a.weight[2, n:].sum() == 0


def test_batches_come_in_the_computing_precision_and_targets_as_they_are():
    for dtype in (torch.float32, F64):
        batch = planner(dtype=dtype).round(0).feed([0, 3], np.array([1, 4])).batch(0)
        assert batch.samples[0].dtype == batch.weight.dtype == dtype and batch.samples[1].dtype == torch.int64
        assert batch.samples[0].shape == (2, 4, 4) and batch.weight.sum(1).tolist() == [3, 4] and batch.counter is None


def test_padding_has_no_samples():
    feed = planner().round(0).feed([3, 3], np.array([4, 0]))
    assert feed.samples(0) == 4
    assert feed.batch(0).weight[1].sum() == 0
    assert [n for _, n in feed.full()] == [16]


def test_all_of_a_clients_data_come_in_pieces():
    n = FULL_BATCH + 90
    source = ArraySource((torch.arange(n + 8.0)[:, None], torch.zeros(n + 8)), [np.arange(n), np.arange(n, n + 8)])
    p = Planner(source, Uniform(2, 0, clients=2), Effort(4, steps=1), 0, 1)
    pieces = p.round(0).feed([0, 1], np.array([1, 1])).full()
    assert [count for _, count in pieces] == [FULL_BATCH + 8, 90]
    seen = [[], []]
    for batch, _ in pieces:
        for c in range(2):
            seen[c] += batch.samples[0][c, batch.weight[c] > 0, 0].tolist()
    assert seen == [list(range(n)), list(range(n, n + 8))]


def test_dropout_counters_tell_clients_steps_rounds_and_seeds_apart():
    def counters(seed, r, k):
        return planner(seed=seed, dropout=True).round(r).feed([0, 3], np.array([1, 4])).batch(k).counter.tolist()

    base = counters(0, 0, 0)
    assert base[0][:2] == base[1][:2] and [c[2:] for c in base] == [[0, 0], [3, 0]]
    assert len({tuple(counters(*at)[0]) for at in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}) == 4


def test_weights_and_shares():
    clients = np.array([1, 5, 9])
    n = np.array([suite.SIZES[i] for i in clients])
    who = suite.Given([clients])
    by_examples = planner(who=who).round(0)
    assert by_examples.weight == pytest.approx(n / n.sum()) and by_examples.share == pytest.approx(n / sum(suite.SIZES))
    old = planner(who=who, variates="uniform").round(0)
    assert old.weight == pytest.approx(n / n.sum()) and old.share == pytest.approx(0.1)
    uniform = planner(who=who, weights="uniform").round(0)
    assert uniform.weight == pytest.approx(1 / 3) and uniform.share == pytest.approx(0.1)


def test_centralised_takes_the_steps_of_the_cohort_it_stands_for():
    p = suite.planner(Centralised())
    for r in range(3):
        alone, cohort = p.round(r), p.as_many_as.round(r)
        assert alone.clients.tolist() == [0] and alone.steps.tolist() == [cohort.steps.sum()]
        feed = alone.feed([0], alone.steps)
        taken = [row for k in range(alone.steps[0]) for row in rows_of(feed, 0, k)]
        assert max(np.bincount(taken)) <= 1  # less than an epoch of everything


def test_noise_is_a_function_of_round_client_and_name():
    p = planner()
    assert torch.equal(p.round(1).uniform(4, "dx"), p.round(1).uniform(4, "dx"))
    assert p.round(1).uniform(4, "dx").shape == (p.size,)
    others = [p.round(2).uniform(4, "dx"), p.round(1).uniform(5, "dx"), p.round(1).uniform(4, "dc")]
    assert all(not torch.equal(p.round(1).uniform(4, "dx"), o) for o in others)
    cyclic = replace(p, participation=Cyclic(10, 0, clients=5))
    assert sorted([*cyclic.round(0).clients, *cyclic.round(1).clients]) == list(range(10))
