import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift import wire
from undrift.wire import Partial, Quantised, Sparse

F64 = torch.float64


@st.composite
def dense(draw, n=None):
    """A vector whose numbers float32 holds exactly."""
    n = draw(st.integers(1, 40)) if n is None else n
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    dtype = draw(st.sampled_from([torch.float32, F64]))
    return torch.tensor(draw(st.lists(numbers, min_size=n, max_size=n)), dtype=dtype)


@st.composite
def quantised(draw, n=None):
    n = draw(st.integers(1, 40)) if n is None else n
    s = draw(st.sampled_from([1, 2, 4, 7, 127, 128, 255, 1000]))
    codes = draw(st.lists(st.integers(-s, s), min_size=n, max_size=n))
    norm = draw(st.floats(0, 1e6, width=32))
    return Quantised(torch.tensor([norm], dtype=F64), torch.tensor(codes, dtype=F64), s)


@st.composite
def sparse(draw, n=None):
    size = draw(st.sampled_from([3, 256, 257, 65536, 65537])) if n is None else n
    k = draw(st.integers(1, min(size, 12)))
    index = draw(st.lists(st.integers(0, size - 1), min_size=k, max_size=k, unique=True))
    return Sparse(draw(st.one_of(dense(k), quantised(k))), torch.tensor(index), size)


@st.composite
def partial(draw):
    """Zero outside the mask, as `Partial` promises."""
    n = draw(st.integers(1, 30))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    inside = draw(st.one_of(dense(n), quantised(n)))
    if isinstance(inside, Quantised):
        return Partial(Quantised(inside.norm, inside.codes * mask, inside.s), mask)
    return Partial(inside * mask, mask)


leaves = st.one_of(dense(), quantised(), sparse(), partial())


@settings(max_examples=250, deadline=None)
@given(leaves)
def test_packed_bytes_are_counted_and_come_back(leaf):
    data = wire.pack(leaf)
    assert len(data) == wire.nbytes(leaf)
    back = wire.unpack(data, leaf)
    assert type(back) is type(leaf)
    assert torch.equal(wire.decode(back), wire.decode(leaf))
    assert wire.decode(back).dtype == wire.decode(leaf).dtype
    assert wire.pack(back) == data


@settings(max_examples=100, deadline=None)
@given(leaves)
def test_eight_bytes_a_float_where_asked(leaf):
    data = wire.pack(leaf, np.float64)
    assert len(data) == wire.nbytes(leaf, itemsize=8)
    assert torch.equal(wire.decode(wire.unpack(data, leaf, np.float64)), wire.decode(leaf))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4))
def test_many_clients_cost_what_each_costs(data, clients):
    kind = data.draw(st.sampled_from(["dense", "quantised", "partial"]))
    n = data.draw(st.integers(1, 20))
    v = torch.randn(clients, n)
    masks = torch.rand(clients, n) < 0.5
    leaf = {
        "dense": v,
        "quantised": Quantised(v[:, :1].abs(), (v * 3).round().clamp(-4, 4), 4),
        "partial": Partial(v * masks, masks),
    }[kind]
    counted = wire.count(leaf)
    for c in range(clients):
        alone = wire.each(leaf, lambda t, c=c: t[c])
        assert int(counted.bytes[c]) == wire.nbytes(alone) == len(wire.pack(alone))
        assert int(counted.floats[c]) == int(wire.count(alone).floats)


def test_bytes_by_hand():
    v = torch.arange(300.0)
    mask = v < 10
    assert wire.nbytes(v) == wire.nbytes(v.double()) == 1200  # float32 whatever the computing precision
    assert wire.nbytes(Quantised(v[:1], v.sign(), 1)) == 4 + 75  # a sign and one bit
    assert wire.nbytes(Quantised(v[:1], v.sign(), 4)) == 4 + 150  # a sign and the levels 0 .. 4
    assert wire.nbytes(Sparse(v[:7], torch.arange(7), 300)) == 7 * (4 + 2)
    assert wire.nbytes(Sparse(v[:7], torch.arange(7), 256)) == 7 * (4 + 1)
    assert wire.nbytes(Partial(v * mask, mask)) == 40
    assert wire.nbytes(Partial(Quantised(v[:1], v.sign() * mask, 1), mask)) == 4 + 3
    assert wire.nbytes(Sparse(Quantised(v[:1], v[:7].sign(), 1), torch.arange(7), 300)) == 7 * 2 + 4 + 2


def test_floats_by_hand():
    v = torch.arange(300.0)
    mask = v < 10
    assert wire.count(v).floats == 300
    assert wire.count(v, vector=False).floats == 300  # a side field that is no scalar
    assert wire.count(v[:1], vector=False) == (0, 4)  # a scalar counts as bytes only
    assert wire.count(v[:1]) == (1, 4)  # a model of one parameter
    assert wire.count(Sparse(v[:7], torch.arange(7), 300)).floats == 14
    assert wire.count(Partial(v * mask, mask)).floats == 10
    assert wire.count(Quantised(v[:1], v.sign(), 4)).floats == 300


def test_leaves_decode_to_vectors():
    codes = torch.tensor([-2.0, 0.0, 1.0])
    q = Quantised(torch.tensor([3.0]), codes, 4)
    assert torch.equal(wire.decode(q), torch.tensor([-1.5, 0.0, 0.75]))
    assert wire.decode(Sparse(q, torch.tensor([4, 0, 2]), 5)).tolist() == [0.0, 0.0, 0.75, 0.0, -1.5]
    assert wire.width(Sparse(q, torch.tensor([4, 0, 2]), 5)) == 5
    assert wire.width(Partial(codes, codes > 0)) == wire.width(q) == 3
    assert wire.over(Partial(codes, codes > 0), lambda v: 2 * v).values.tolist() == [-4.0, 0.0, 2.0]
    batch = wire.decode(Sparse(torch.ones(2, 1), torch.tensor([[0], [2]]), 3))
    assert batch.tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("s", range(1, 70))
def test_bits_hold_every_level(s):
    assert 2 ** (wire.bits(s) - 1) >= s + 1 > 2 ** (wire.bits(s) - 2)


def test_what_is_not_finite_survives_packing():
    v = torch.tensor([math.inf, -math.inf, math.nan])
    back = wire.unpack(wire.pack(v), v)
    assert back[0] == math.inf and back[1] == -math.inf and back[2].isnan()
