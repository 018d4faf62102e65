import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift.rng import WORD, Stream, Use, philox

# Random123's known answers for philox4x32-10: counter, key, result.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(int(w, 16) for w in text.split())


@pytest.mark.parametrize("counter, key, result", PUBLISHED)
def test_philox_gives_the_published_vectors(counter, key, result):
    assert philox(words(counter), words(key)) == words(result)
    arrays = philox(tuple(np.array([w]) for w in words(counter)), words(key))
    assert tuple(int(a[0]) for a in arrays) == words(result)
    tensors = philox(tuple(torch.tensor([w]) for w in words(counter)), words(key))
    assert tuple(int(t[0]) for t in tensors) == words(result)


word = st.integers(0, WORD)


@settings(max_examples=60, deadline=None)
@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_the_same_bits_from_ints_numpy_and_torch(counter, key):
    ints = philox(counter, key)
    assert all(0 <= w <= WORD for w in ints)
    for array in (np.array, torch.tensor):
        found = philox(tuple(array([w]) for w in counter), tuple(array([w]) for w in key))
        assert tuple(int(a[0]) for a in found) == ints


def test_uses_are_part_of_the_format():
    assert {u.name: int(u) for u in Use} == {
        "COHORT": 1, "BATCHES": 2, "PARTITION": 3, "MODEL": 4, "DATA": 5, "HOLDOUT": 6, "DROPOUT": 7, "AUGMENT": 8,
        "BLOCKS": 9, "ROUNDING": 10, "LOST": 11,
    }  # fmt: skip
    # Frozen: a run of today is resumed by the versions to come.
    assert Stream(7, Use.COHORT, 3).words(3).tolist() == [122473335, 483834035, 2968203220]


def test_a_row_does_not_depend_on_what_else_is_drawn():
    s = Stream(1, Use.BATCHES, 2)
    many = s.words(10, np.array([5, 9, 1 << 40]))
    assert many.shape == (3, 10)
    assert (many[1] == s.words(10, 9)).all()
    assert (s.words(4, 9) == many[1, :4]).all()
    assert (s.uniform(3, [[9], [5]])[0, 0] == s.uniform(3, 9)).all()
    sizes = np.array([4, 7, 2])
    orders = s.permutations(sizes, np.array([3, 8, 1]))
    for order, n, lane in zip(orders, sizes, (3, 8, 1), strict=True):
        assert (order[:n] == s.permutations(n, lane)).all()
        assert (order[n:] == np.arange(n, 7)).all()


def test_addresses_are_independent():
    addresses = [
        (seed, use, round, lane)
        for seed in (0, 1, 1 << 32)
        for use in (Use.BATCHES, Use.COHORT)
        for round in (0, 1, 1 << 33)
        for lane in (0, 1, 1 << 32)
    ]
    draws = [Stream(seed, use, round).uniform(500, lane) for seed, use, round, lane in addresses]
    for a, b in itertools.combinations(draws, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.2  # four and a half deviations of 1 / sqrt(500)
    assert len({d.tobytes() for d in draws}) == len(draws)
    assert (Stream(0, Use.BATCHES, 1).words(4) != Stream(0, Use.BATCHES, 1, 0).words(4)).all()


def test_uniform_and_normal_are_what_they_say():
    s = Stream(3, Use.DATA)
    u, z = s.uniform(40_000), s.normal(40_000)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.006 and abs(u.var() - 1 / 12) < 0.003
    assert chi_square(np.bincount((u * 50).astype(int), minlength=50), 40_000 / 50) < 95
    assert abs(z.mean()) < 0.02 and abs(z.var() - 1) < 0.03
    assert abs((z**3).mean()) < 0.06 and abs((z**4).mean() - 3) < 0.15
    w = s.words(8_000)
    assert w.min() >= 0 and w.max() <= WORD
    bits = (w[:, None] >> np.arange(32) & 1).mean(0)
    assert abs(bits - 0.5).max() < 0.03
    assert s.longs(1000).min() >= 0


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("bound", [1, 2, 7, 1000, 2**31 - 1, 2**31, 2**40 + 3, 2**53])
def test_below_stays_below_and_is_even(bound):
    x = Stream(1, Use.DATA, bound).below([bound] * 6000)
    assert x.min() >= 0 and x.max() < bound
    cells = min(bound, 10)
    counts = np.bincount((x.astype(object) * cells // bound).astype(int), minlength=cells)
    assert chi_square(counts, 6000 / cells) < 33
    assert Stream(1, Use.DATA).below([bound] * 3, np.array([1, 2])).shape == (2, 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.data())
def test_a_subset_has_n_different_numbers(population, data):
    n = data.draw(st.integers(1, population))
    chosen = Stream(data.draw(st.integers(0, 99)), Use.COHORT, 0).subset(population, n)
    assert len(set(chosen.tolist())) == n and (np.sort(chosen) == chosen).all()
    assert chosen.min() >= 0 and chosen.max() < population


def test_subsets_are_equally_likely():
    rounds = 6000
    counts = dict.fromkeys(itertools.combinations(range(6), 3), 0)
    for r in range(rounds):
        counts[tuple(Stream(0, Use.COHORT, r).subset(6, 3).tolist())] += 1
    # 19 degrees of freedom: one seed in a thousand lies above 43.8
    assert chi_square(np.array(list(counts.values())), rounds / 20) < 43.8


def test_a_subset_of_a_huge_population_costs_its_own_size():
    chosen = Stream(0, Use.COHORT, 1).subset(10**15, 10)
    assert len(set(chosen.tolist())) == 10 and chosen.max() > 10**13


def test_permutations_are_equally_likely():
    orders = Stream(0, Use.BATCHES).permutations(np.full(12_000, 4), np.arange(12_000))
    assert (np.sort(orders, axis=1) == np.arange(4)).all()
    counts = np.unique(orders @ np.array([64, 16, 4, 1]), return_counts=True)[1]
    assert len(counts) == 24 and chi_square(counts, 500) < 49.7  # 23 degrees, one in a thousand


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 5))
def test_scattered_is_a_bijection(population, seed):
    s = Stream(seed, Use.COHORT)
    there = s.scattered(np.arange(population), population)
    assert (np.sort(there) == np.arange(population)).all()
    some = np.arange(population)[:: max(1, population // 5)]
    assert (s.scattered(some, population) == there[some]).all()


def test_scattered_scatters():
    there = Stream(0, Use.COHORT).scattered(np.arange(3000), 3000)
    assert abs(np.corrcoef(np.arange(3000), there)[0, 1]) < 0.08
    assert (np.diff(there) == 1).mean() < 0.01
    huge = Stream(0, Use.COHORT).scattered(np.arange(10), 10**12)
    assert len(set(huge.tolist())) == 10 and huge.min() >= 0 and huge.max() < 10**12
