import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift.errors import BadInput
from undrift.participation import Bernoulli, Cyclic, Uniform, participations

KINDS = [Uniform, Bernoulli, Cyclic]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(st.integers(1, 500), st.data(), st.integers(0, 2**53), st.integers(0, 10**9))
def test_a_cohort_is_sorted_not_empty_without_repeats_and_inside_the_population(kind, population, data, seed, round):
    clients = data.draw(st.integers(1, population))
    cohort = kind(population, seed, clients=clients).cohort(round)
    assert cohort.dtype == np.int64 and len(cohort) >= 1
    assert (np.diff(cohort) > 0).all() and cohort[0] >= 0 and cohort[-1] < population
    assert kind is not Uniform or len(cohort) == clients


@pytest.mark.parametrize("kind", KINDS)
def test_a_cohort_depends_on_seed_and_round_alone(kind):
    one, other = kind(1000, 7, clients=10), kind(1000, 7, clients=10)
    forward = [one.cohort(r) for r in range(1, 30)]
    backward = [other.cohort(r) for r in reversed(range(1, 30))][::-1]
    assert all(map(np.array_equal, forward, backward))
    another = [kind(1000, 8, clients=10).cohort(r) for r in range(1, 30)]
    assert not any(len(a) == len(b) and (a == b).all() for a, b in zip(forward, another, strict=True))
    assert len({tuple(c) for c in forward}) == 29


def test_uniform_includes_each_client_and_each_pair_equally_often():
    rounds, m, n = 4000, 12, 3
    seen = np.zeros((rounds, m))
    sampler = Uniform(m, 1, clients=n)
    for r in range(rounds):
        seen[r, sampler.cohort(r)] = 1
    together = seen.T @ seen / rounds
    p, pair = n / m, n * (n - 1) / (m * (m - 1))
    assert np.abs(np.diag(together) - p).max() < 5 * math.sqrt(p * (1 - p) / rounds)
    assert np.abs(together - np.diag(np.diag(together)) - pair * (1 - np.eye(m))).max() < 5 * math.sqrt(pair / rounds)


def test_bernoulli_takes_each_client_independently():
    rounds, m, rate = 4000, 40, 0.1
    seen = np.zeros((rounds, m))
    sampler = Bernoulli(m, 2, rate=rate)
    for r in range(rounds):
        seen[r, sampler.cohort(r)] = 1
    some = 1 - (1 - rate) ** m  # a round is not empty
    assert np.abs(seen.mean(0) - rate / some).max() < 5 * math.sqrt(rate / rounds)
    sizes = seen.sum(1)
    mean = m * rate / some
    assert abs(sizes.mean() - mean) < 5 * math.sqrt(mean / rounds)
    second = (m * rate * (1 - rate) + (m * rate) ** 2) / some
    assert abs(sizes.var() - (second - mean**2)) < 0.5
    together = seen.T @ seen / rounds
    off = together[~np.eye(m, dtype=bool)]
    assert abs(off.mean() - rate**2 / some) < 1e-3


def test_bernoulli_that_is_hardly_ever_anyone_is_still_someone_and_fair():
    sampler = Bernoulli(10, 3, rate=1e-9)
    cohorts = [sampler.cohort(r) for r in range(2000)]
    assert all(len(c) == 1 for c in cohorts)
    counts = np.bincount(np.concatenate(cohorts), minlength=10)
    assert np.abs(counts - 200).max() < 5 * math.sqrt(200)


def test_bernoulli_by_rate_and_by_expected_clients_are_the_same():
    assert np.array_equal(Bernoulli(500, 0, rate=0.02).cohort(4), Bernoulli(500, 0, clients=10).cohort(4))
    assert np.array_equal(Bernoulli(5, 0, rate=1.0).cohort(1), np.arange(5))


@pytest.mark.parametrize(
    "population, clients, period", [(100, 10, 10), (103, 10, 10), (107, 10, 11), (7, 7, 1), (5, 2, 2)]
)
def test_cyclic_visits_everyone_once_a_period_in_groups_that_differ_by_one(population, clients, period):
    sampler = Cyclic(population, 4, clients=clients)
    groups = [sampler.cohort(r) for r in range(1, period + 1)]
    assert sampler.period == period
    assert np.array_equal(np.sort(np.concatenate(groups)), np.arange(population))
    assert max(map(len, groups)) - min(map(len, groups)) == (population % period > 0)
    assert np.array_equal(sampler.cohort(3), sampler.cohort(3 + 5 * period))
    assert [len(sampler.cohort(r)) for r in range(period)] == [
        len(g) for g in np.array_split(range(population), period)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_ten_million_clients_cost_no_more_than_their_cohort(kind):
    kind(1000, 0, clients=10).cohort(1)
    tracemalloc.start()
    cohort = kind(10_000_000, 0, clients=10).cohort(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 1 <= len(cohort) < 50 and peak < 200_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_cohort_larger_than_the_population_is_refused_with_both_numbers(kind):
    with pytest.raises(BadInput, match=r"participation\.clients is 11, but the data have 10 clients"):
        kind(10, 0, clients=11)
    with pytest.raises(BadInput, match=r"participation\.clients is 0"):
        kind(10, 0, clients=0)
    with pytest.raises(BadInput, match=r"participation\.lost is 1\.0"):
        kind(10, 0, clients=1, lost=1.0)


@pytest.mark.parametrize("options", [{}, {"rate": 0.1, "clients": 2}, {"rate": 0.0}, {"rate": 1.5}, {"rate": math.nan}])
def test_bernoulli_wants_a_probability_or_an_expected_number(options):
    with pytest.raises(BadInput, match="participation.*rate"):
        Bernoulli(10, 0, **options)


def test_uploads_are_lost_at_random_by_client_and_round():
    sampler = Uniform(1000, 5, clients=10, lost=0.3)
    lost = np.array([sampler.lost(r, np.arange(200)) for r in range(100)])
    assert lost.dtype == bool and abs(lost.mean() - 0.3) < 5 * math.sqrt(0.21 / lost.size)
    assert lost.mean(0).min() > 0 and lost.mean(0).max() < 1
    assert np.array_equal(sampler.lost(7, np.array([150, 3])), lost[7, [150, 3]])
    assert not Uniform(1000, 5).lost(1, np.arange(1000)).any()


def test_names_build_them():
    given = {"population": 50, "seed": 1}
    made = participations.build({"name": "cyclic", "clients": 5}, key="participation", given=given)
    assert np.array_equal(made.cohort(2), Cyclic(50, 1, clients=5).cohort(2))
    assert participations.names() == ["uniform", "bernoulli", "cyclic"]
    with pytest.raises(BadInput, match=r"participation\.clients must be a whole number"):
        participations.build({"name": "uniform", "clients": 2.5}, key="participation", given=given)
