import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift.data.partition import dirichlet, iid, log_gamma, one_class, partition
from undrift.errors import BadInput
from undrift.rng import Stream, Use

TABLES = [
    {"name": "iid"},
    {"name": "dirichlet", "alpha": 0.3},
    {"name": "dirichlet", "alpha": 0.3, "balanced": False, "min_size": 1},
    {"name": "one-class"},
]


def labelled(n, classes, seed=0):
    return Stream(seed, Use.DATA).below(np.full(n, classes))


def covers(parts, n):
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(n)) and all(p.dtype == np.int64 for p in parts)


def purity(labels, parts):
    """The mean share of a client's most frequent class."""
    return np.mean([np.bincount(labels[p]).max() / len(p) for p in parts])


@st.composite
def problems(draw):
    n = draw(st.integers(1, 300))
    return labelled(n, draw(st.integers(1, 12)), n), draw(st.integers(1, n)), draw(st.integers(0, 2**53))


@settings(deadline=None, max_examples=60)
@given(problems(), st.floats(5e-324, 1e308))
def test_balanced_dirichlet_ends_and_deals_every_sample_once_for_any_alpha(problem, alpha):
    labels, clients, seed = problem
    parts = dirichlet(labels, len(labels), seed, clients, alpha)
    assert covers(parts, len(labels))
    sizes = [len(p) for p in parts]
    assert len(sizes) == clients and max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=40)
@given(problems(), st.floats(1e-3, 1e3), st.integers(1, 20))
def test_unbalanced_dirichlet_gives_everyone_min_size_or_says_why_not(problem, alpha, min_size):
    labels, clients, seed = problem
    try:
        parts = dirichlet(labels, len(labels), seed, clients, alpha, balanced=False, min_size=min_size)
    except BadInput as error:
        assert "min_size" in str(error)
    else:
        assert covers(parts, len(labels)) and len(parts) == clients and min(map(len, parts)) >= min_size


@settings(deadline=None, max_examples=40)
@given(problems())
def test_iid_deals_every_sample_once_in_equal_sizes(problem):
    labels, clients, seed = problem
    parts = iid(labels, len(labels), seed, clients)
    assert covers(parts, len(labels))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(deadline=None, max_examples=60)
@given(problems())
def test_one_class_gives_each_client_one_class_and_each_class_as_many_clients(problem):
    labels, clients, seed = problem
    try:
        parts = one_class(labels, len(labels), seed, clients)
    except BadInput as error:
        counts = np.bincount(labels)[np.unique(labels)]
        assert clients < len(counts) or counts.min() < -(-clients // len(counts))
        assert "data.partition.clients" in str(error)
        return
    assert covers(parts, len(labels)) and len(parts) == clients
    held = [set(labels[p].tolist()) for p in parts]
    assert all(len(h) == 1 for h in held)
    holders = np.bincount([h.pop() for h in held])
    assert np.ptp(holders[holders > 0]) <= 1


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t["name"] + str(t.get("balanced", "")))
def test_a_partition_depends_on_its_seed_alone(table):
    labels = labelled(1000, 10)
    first, again, other = (partition({**table, "clients": 20}, labels, 1000, seed) for seed in (5, 5, 6))
    assert all(map(np.array_equal, first, again))
    assert not all(len(a) == len(b) and (a == b).all() for a, b in zip(first, other, strict=True))


def test_small_alpha_gives_clients_of_one_class_and_large_alpha_the_mixture_of_all():
    labels = np.repeat(np.arange(10), 600)
    seen = [purity(labels, dirichlet(labels, 6000, 0, 100, alpha)) for alpha in (1e-3, 0.3, 1e6)]
    assert seen[0] > 0.75 and 0.3 < seen[1] < 0.7 and seen[2] < 0.25
    assert purity(labels, dirichlet(labels, 6000, 0, 100, 1e-300)) > 0.75


def test_class_shares_of_balanced_dirichlet_have_the_spread_of_the_dirichlet_distribution():
    labels = np.repeat(np.arange(4), 50_000)
    alpha, clients = 0.5, 2000
    shares = np.array(
        [np.bincount(labels[p], minlength=4) / len(p) for p in dirichlet(labels, 200_000, 1, clients, alpha)]
    )
    # Dir(alpha) on k classes has variance (1/k)(1 - 1/k)/(k alpha + 1); sampling 100 adds E[q(1-q)]/100.
    pure = 3 / 16 / (4 * alpha + 1)
    assert np.allclose(shares.mean(0), 0.25, atol=1e-9)
    assert abs(shares.var() - (pure + (3 / 16 - pure) / 100)) < 0.006


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0, 7.5])
def test_gamma_draws_have_the_moments_of_the_gamma_distribution(alpha):
    g = np.exp(log_gamma(alpha, 2000, 100, Stream(3, Use.PARTITION)))
    n = g.size
    assert abs(g.mean() - alpha) < 5 * math.sqrt(alpha / n)
    assert abs(g.var() - alpha) < 5 * math.sqrt((2 * alpha**2 + 6 * alpha) / n)
    # E log Gamma(a) = digamma(a) = digamma(a + 4) - sum of 1/(a + k), by its asymptotic series
    z = alpha + 4
    digamma = math.log(z) - 1 / (2 * z) - 1 / (12 * z**2) + 1 / (120 * z**4) - sum(1 / (alpha + k) for k in range(4))
    assert abs(np.log(g[g > 0]).mean() - digamma) < 0.02 * max(1, 1 / alpha) or alpha < 0.1


def test_shares_of_a_tiny_alpha_are_never_nought_over_nought():
    logs = log_gamma(1e-4, 10, 1000, Stream(0, Use.PARTITION))
    assert np.isfinite(logs).all() and np.exp(logs.max(1)).min() == 0.0  # in float64 whole rows would vanish


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t["name"] + str(t.get("balanced", "")))
@pytest.mark.parametrize("clients", [1, 40])
def test_one_client_and_as_many_clients_as_samples(table, clients):
    labels = np.zeros(40, dtype=np.int64)
    parts = None
    try:
        parts = partition({**table, "clients": clients}, labels, 40, 0)
    except BadInput as error:  # 40 shares of 40 samples with no one at nought: as good as impossible
        assert table.get("balanced") is False and clients == 40 and "min_size" in str(error)
    assert parts is None or (covers(parts, 40) and len(parts) == clients)


@pytest.mark.parametrize(
    "table, words",
    [
        ({"name": "iid", "clients": 101}, "data.partition.clients is 101, but with 100 samples"),
        ({"name": "iid", "clients": 0}, "data.partition.clients is 0"),
        ({"name": "iid"}, "data.partition.clients is missing"),
        ({"name": "iid", "clients": 2, "alpha": 1.0}, "data.partition.alpha"),
        ({"name": "dirichlet", "clients": 2, "alpha": 0.0}, "data.partition.alpha is 0.0"),
        ({"name": "dirichlet", "clients": 2, "alpha": math.nan}, "data.partition.alpha is nan"),
        ({"name": "dirichlet", "clients": 2, "alpha": math.inf}, "data.partition.alpha is inf"),
        ({"name": "dirichlet", "clients": 11, "alpha": 1.0, "balanced": False}, "at most 10 clients"),
        ({"name": "dirichlet", "clients": 5, "alpha": 1.0, "min_size": 21}, "data.partition.min_size"),
        ({"name": "dirichlet", "clients": 5, "alpha": 1.0, "min_size": 0}, "data.partition.min_size is 0"),
        ({"name": "dirichlet", "clients": 9, "alpha": 1e-3, "balanced": False}, "larger alpha"),
        ({"name": "one-class", "clients": 3}, "each of the 4 classes"),
        ({"name": "dirichelt", "clients": 2}, "did you mean dirichlet"),
    ],
)
def test_what_cannot_be_is_refused_by_name(table, words):
    with pytest.raises(BadInput, match="data.partition") as refused:
        partition(table, np.arange(100) % 4, 100, 0)
    assert words in str(refused.value)


def test_a_class_too_small_for_its_clients_is_refused_with_what_would_fit():
    labels = np.array([0] * 3 + [1] * 97)
    with pytest.raises(BadInput, match="3 samples cannot be split over its 5 clients; choose at most 6"):
        one_class(labels, 100, 0, 10)
    assert len(one_class(labels, 100, 0, 6)) == 6


@pytest.mark.parametrize("name", ["dirichlet", "one-class"])
def test_data_without_classes_are_split_iid_or_not_at_all(name):
    extra = {"alpha": 1.0} if name == "dirichlet" else {}
    with pytest.raises(BadInput, match="no classes"):
        partition({"name": name, "clients": 2, **extra}, None, 100, 0)
    assert covers(partition({"name": "iid", "clients": 3}, None, 100, 0), 100)


def test_a_file_gives_its_lists_in_their_order(tmp_path):
    (tmp_path / "parts.json").write_text(json.dumps([[3, 1], [0], [1, 2]]))
    parts = partition({"file": "parts.json"}, None, 4, 0, tmp_path)
    assert [p.tolist() for p in parts] == [[3, 1], [0], [1, 2]]


@pytest.mark.parametrize(
    "text, words",
    [
        ("[[0, 4]]", "the sample 4, but samples go from 0 to 3"),
        ("[[0], [-1]]", "gives client 1 the sample -1"),
        ("[[0], []]", "gives client 1 no samples"),
        ("[[0, 2, 0]]", "the sample 0 more than once"),
        ("[[0, 1.0]]", "the sample 1.0, but samples are whole numbers"),
        ("[[true]]", "the sample true"),
        ('[["a"]]', 'the sample "a"'),
        ("[]", "a list with one list"),
        ('{"0": [1]}', "a list with one list"),
        ("[0, 1]", "a list with one list"),
        ("[[0]", "is not JSON"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, words):
    (tmp_path / "parts.json").write_text(text)
    with pytest.raises(BadInput, match="parts.json") as refused:
        partition({"file": "parts.json"}, None, 4, 0, tmp_path)
    assert words in str(refused.value) and "data.partition.file" in str(refused.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(BadInput, match=r'data\.partition\.file.*"none\.json"'):
        partition({"file": "none.json"}, None, 4, 0, tmp_path)


def test_a_partition_of_ones_own_is_found_and_looked_at(tmp_path):
    (tmp_path / "mine_split.py").write_text(
        "import numpy as np\n"
        "def halves(labels, n, seed, gap=0):\n    return [np.arange(n // 2 - gap), np.arange(n // 2, n)]\n"
        "def wrong(n):\n    return [[0], [n]]\n"
    )
    parts = partition({"name": "mine_split:halves", "gap": 1}, None, 10, 0, tmp_path)
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3], [5, 6, 7, 8, 9]]
    with pytest.raises(BadInput, match="gives client 1 the sample 10"):
        partition("mine_split:wrong", None, 10, 0, tmp_path)
