import itertools
import json
import lzma
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import undrift.data as data
from undrift.data import ArraySource, HeldOut, Pooled, Source, adapt, check, make
from undrift.data.embedded import embedded
from undrift.data.source import each, join, length, take
from undrift.errors import BadInput, UndriftError

FILES = Path(data.__file__).parent / "files"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDRIFT_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def mnist(cache):
    return make({"name": "mnist", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 100}}, seed=0)


@pytest.fixture(scope="module")
def writers(cache):
    return make({"name": "mnist-writers"}, seed=0)


@pytest.fixture(scope="module")
def plays(cache):
    return make({"name": "shakespeare"}, seed=0)


def same(a, b):
    return type(a) is type(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def arrays(n=40, classes=4):
    x = torch.arange(n * 3, dtype=torch.float32).view(n, 3)
    return x, torch.arange(n) % classes


def split(*sizes, classes=4):
    """A small source of clients of these sizes."""
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return ArraySource(arrays(sum(sizes), classes), parts, test=arrays(8, classes), classes=classes)


class Own:
    """The least that a source of one's own answers."""

    population = 3

    def size(self, i):
        return i + 2

    def client(self, i):
        return torch.full((i + 2, 1), float(i)), torch.arange(i + 2) % 2


# Every source keeps the contract


@pytest.fixture(params=["mnist", "writers", "plays", "leaf", "prox", "own", "held out", "pooled"])
def any_source(request):
    name = request.param
    if name in ("mnist", "writers", "plays"):
        return request.getfixturevalue(name)
    return {
        "leaf": lambda: make({"name": "synthetic", "clients": 20}, seed=1),
        "prox": lambda: make({"name": "synthetic-prox"}, seed=1),
        "own": lambda: adapt(Own()),
        "held out": lambda: HeldOut(split(5, 9, 2, 1), 0.3, seed=0),
        "pooled": lambda: Pooled(split(5, 9, 2, 1)),
    }[name]()


def test_open_hands_out_what_client_does_in_the_same_order(any_source):
    check(any_source)
    clients = sorted({0, any_source.population // 2, any_source.population - 1}, reverse=True)
    rows, fetch = any_source.open(clients)
    for i, mine in zip(clients, rows, strict=True):
        assert mine.dtype == np.int64 and len(mine) == any_source.size(i) == len(np.unique(mine))
        assert same(fetch(torch.from_numpy(mine)), any_source.client(i))
    few = torch.from_numpy(rows[0][np.zeros((2, 3), dtype=np.int64)])
    assert same(fetch(few), take(any_source.client(clients[0]), torch.zeros(2, 3, dtype=torch.int64)))


def test_facts_are_the_class_counts_of_the_training_samples(any_source):
    for i in {0, any_source.population - 1}:
        if any_source.classes is None:
            assert any_source.facts(i) == {}
            continue
        counts = any_source.facts(i)["classes"]
        labels = any_source.client(i)[-1]
        assert counts.dtype == torch.float32 and counts.shape == (any_source.classes,)
        assert torch.equal(counts, torch.bincount(labels, minlength=any_source.classes).float())


def test_examples_are_the_sum_of_sizes(any_source):
    sizes = [any_source.size(i) for i in range(any_source.population)]
    assert any_source.examples == sum(sizes)
    assert any_source.sizes(np.arange(any_source.population)).tolist() == sizes


def test_a_source_moved_to_a_device_says_the_same(any_source):
    moved = any_source.to("cpu")
    assert moved is not any_source and same(moved.client(0), any_source.client(0))


# MNIST


def test_mnist_has_its_numbers(mnist):
    assert (mnist.population, mnist.examples, mnist.classes) == (100, 60_000, 10)
    x, _ = mnist.client(0)
    assert x.dtype == torch.float32 and x.shape == (600, 1, 28, 28) and x.min() >= 0 and x.max() == 1
    assert torch.equal(x, (x * 255).round().to(torch.uint8).float() / 255)
    _, yt = mnist.test()
    assert yt[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9] and torch.bincount(yt).tolist()[:2] == [980, 1135]
    whole = Pooled(mnist).client(0)
    assert abs(whole[0].mean() - 0.1307) < 1e-4 and torch.bincount(whole[1])[1] == 6742


def test_normalise_standardises_by_the_published_numbers():
    partition = {"name": "iid", "clients": 1}
    plain, normal = (make({"name": "mnist", "partition": partition, "normalise": n}, seed=0) for n in (False, True))
    assert torch.allclose(normal.client(0)[0][:500], (plain.client(0)[0][:500] - 0.1307) / 0.3081, atol=1e-6)
    assert abs(normal.test()[0].mean()) < 0.01 and abs(normal.test()[0].std() - 1) < 0.01


def test_writers_are_clients_and_other_writers_are_groups(writers):
    assert writers.population == 539 and writers.examples == 60_000
    sizes = writers.sizes(np.arange(539))
    assert (sizes.min(), int(np.median(sizes)), sizes.max()) == (19, 116, 131)
    groups = writers.groups()
    assert len(groups) == 297 and sum(map(length, groups)) == length(writers.test()) == 10_000
    ids = np.load(FILES / "mnist-writers.npz")["train"]
    assert all(len(np.unique(ids[rows])) == 1 for rows in writers.open(range(539))[0])


def test_the_decoded_copy_is_harmless_wherever_it_cannot_be_kept_or_is_damaged(cache, tmp_path, writers, monkeypatch):
    first = writers.client(3)
    (kept,) = [p for p in cache.iterdir() if p.name.startswith("mnist.xz")]
    (kept / "labels.npy").write_bytes(b"damaged")
    assert same(make({"name": "mnist-writers"}, seed=0).client(3), first)
    assert np.load(kept / "labels.npy").shape == (60_000,)  # written anew
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "file"))  # no folder can be made there
    assert same(make({"name": "mnist-writers"}, seed=0).client(3), first)
    assert os.listdir(tmp_path) == ["file"]


def test_the_cache_holds_whole_folders_only(cache, writers, plays):
    assert sorted(p.name.partition("-")[0] for p in cache.iterdir()) == ["mnist.xz", "shakespeare.json.xz"]


# Shakespeare


def texts():
    roles = [r["speeches"] for r in json.loads(lzma.decompress(embedded("shakespeare.json.xz")))]
    return ["\n".join(speeches) for speeches in roles if len(speeches) >= 2]


def test_the_roles_windows_are_their_text(plays):
    raw = texts()
    assert plays.population == len(raw) == 1129 and plays.sizes(np.arange(1129)).min() == 1
    assert plays.classes == len(plays.vocabulary) == 1 + len(set("".join(raw))) and plays.vocabulary[0] == "\0"
    for i in (0, 5, 700, int(np.argmin([len(t) for t in raw]))):
        x, y = plays.client(i)
        text = raw[i].rjust(81, "\0")
        assert len(y) == max(1, int(0.8 * (len(text) - 80)))
        for k in {0, len(y) // 2, len(y) - 1}:
            said = "".join(plays.vocabulary[c] for c in x[k].tolist()) + plays.vocabulary[y[k]]
            assert said == text[k : k + 81]


def test_test_windows_come_from_the_role_after_its_training_text(plays):
    raw = texts()
    tested = [i for i, text in enumerate(raw) if len(text) - 80 - max(1, int(0.8 * (len(text) - 80))) > 80]
    groups = plays.groups()
    assert len(groups) == len(tested)
    for i, (x, y) in list(zip(tested, groups, strict=True))[::40]:
        assert 1 <= len(y) <= 50
        training = int(0.8 * (len(raw[i]) - 80)) + 80  # characters seen, targets included
        for window, then in zip(x.tolist(), y.tolist(), strict=True):
            said = "".join(plays.vocabulary[c] for c in [*window, then])
            assert said in raw[i][training:]


def test_the_test_set_is_fixed_and_as_large_as_asked(plays):
    assert length(plays.test()) == 20_000
    small = make({"name": "shakespeare", "test_size": 100, "group_size": 2}, seed=9)
    assert length(small.test()) == 100 and max(map(length, small.groups())) == 2
    again = make({"name": "shakespeare", "test_size": 100}, seed=1)
    assert same(small.test(), again.test())


def test_windows_are_views_of_one_corpus(plays):
    tracemalloc.start()
    rows, fetch = plays.open(range(plays.population))
    fetch(torch.from_numpy(rows[0][:50]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(map(len, rows)) == plays.examples > 3_000_000 and peak < 9 * plays.examples


# Generated


@pytest.mark.parametrize("name", ["synthetic", "synthetic-prox"])
def test_a_generated_client_depends_on_seed_and_number_alone(name):
    few, many = make({"name": name, "clients": 12}, seed=3), make({"name": name, "clients": 10**7}, seed=3)
    forward = [few.client(i) for i in range(12)]
    backward = [many.client(i) for i in reversed(range(12))][::-1]
    assert all(map(same, forward, backward)) and same(few.test(), many.test())
    other = make({"name": name, "clients": 12}, seed=4)
    assert not any(torch.equal(other.client(i)[0][:5], forward[i][0][:5]) for i in range(12))
    assert not any(torch.equal(a[0][:5], b[0][:5]) for a, b in itertools.combinations(forward, 2))


@pytest.mark.parametrize("name", ["synthetic", "synthetic-prox"])
def test_generated_clients_are_kept_only_for_a_while(name):
    source = make({"name": name, "clients": 1000}, seed=0)
    first = source.client(0)
    assert source.client(0)[0] is first[0]  # made once for one round
    for i in range(1, 400):
        source.client(i)
    assert len(source._recent) <= 128 and source.client(0)[0] is not first[0] and same(source.client(0), first)


@pytest.mark.parametrize("name", ["synthetic", "synthetic-prox"])
def test_evaluation_is_on_a_hundred_clients_outside_the_population(name):
    source = make({"name": name, "clients": 30}, seed=0)
    groups = source.groups()
    assert len(groups) == 100 and same(join(groups), source.test())
    assert not any(torch.equal(g[0][:5], source.client(i)[0][:5]) for g in groups for i in range(30))


@pytest.mark.parametrize("name", ["synthetic", "synthetic-prox"])
def test_ten_million_generated_clients_cost_nothing(name):
    make({"name": name}, seed=0).client(0)
    tracemalloc.start()
    source = HeldOut(make({"name": name, "clients": 10_000_000}, seed=0), 0.1, seed=0)
    check(source)
    sizes = [source.size(i) for i in range(0, 10_000_000, 999_999)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.examples is None and min(sizes) > 0 and peak < 60_000_000
    assert make({"name": name, "clients": 1_000_000}, seed=0).examples > 5_000_000


def test_leafs_sizes_and_inputs_have_its_distributions():
    source = make({"name": "synthetic", "clients": 20_000}, seed=0)
    sizes = source.sizes(np.arange(20_000))
    assert sizes.min() == 5 and sizes.max() == 1000 and abs(np.median(sizes - 5) - np.exp(3)) < 2
    x = torch.stack([c[0][:5] for c in map(source.client, range(2000))])  # [clients, 5, 60]
    within = x.var(1).mean(0)  # over a client's samples: j^-1.2
    assert torch.allclose(within, torch.arange(1, 61) ** -1.2, rtol=0.1)
    assert abs(x[..., 40:].mean((1, 2)).var() - 1) < 0.15  # B_k ~ N(0, 1) dominates


def test_fedproxs_beta_moves_the_inputs_and_iid_shares_the_model():
    def spread(**options):
        source = make({"name": "synthetic-prox", "clients": 400, "dim": 20, **options}, seed=0)
        centres = torch.stack([source.client(i)[0].mean() for i in range(400)])
        return float(centres.var())

    assert spread(beta=0.0) < 0.1 and abs(spread(beta=1.0) - 1) < 0.25 and abs(spread(beta=2.0) - 4) < 1
    assert carried_over(iid=True) > 0.6 > 0.4 > carried_over(iid=False)


def carried_over(**options):
    """How often a linear rule learnt on twenty clients is right on another's samples."""
    source = make({"name": "synthetic-prox", "clients": 21, "dim": 10, **options}, seed=0)
    x, y = join([source.client(i) for i in range(20)])
    design = torch.cat([torch.ones(len(x), 1), x], 1)
    rule = torch.linalg.lstsq(design, torch.nn.functional.one_hot(y, 10).float()).solution
    x, y = source.client(20)
    return float(((torch.cat([torch.ones(len(x), 1), x], 1) @ rule).argmax(1) == y).float().mean())


# Held out, pooled


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.floats(1e-6, 1 - 1e-6), st.integers(0, 2**53))
def test_what_is_held_out_and_what_stays_are_the_clients_samples(sizes, share, seed):
    source = split(*sizes)
    held = HeldOut(source, share, seed)
    for i, n in enumerate(sizes):
        out, kept = held.validation(i), held.client(i)
        v = 0 if n == 1 else min(max(round(share * n), 1), n - 1)
        assert (length(out), length(kept), held.size(i)) == (v, n - v, n - v)
        both = join([out, kept])
        order = both[0][:, 0].argsort()
        assert same(take(both, order), source.client(i))
        assert torch.equal(held.facts(i)["classes"], torch.bincount(kept[1], minlength=4).float())
    assert same(held.test(), source.test()) and held.groups() is None


def test_what_is_held_out_of_a_client_depends_on_the_seed_and_the_client_alone():
    one, among = HeldOut(split(30, 30), 0.2, seed=1), HeldOut(split(30, 30, 7), 0.2, seed=1)
    assert same(one.validation(1), among.validation(1))
    assert not same(one.validation(1), HeldOut(split(30, 30), 0.2, seed=2).validation(1))
    assert not torch.equal(one.validation(0)[0] + 90, one.validation(1)[0])


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_outside_0_and_1_is_refused(share):
    with pytest.raises(BadInput, match=r"data\.validation"):
        HeldOut(split(5), share, seed=0)


def test_pooled_is_all_training_data_as_one_client():
    source = split(5, 9, 2)
    pooled = Pooled(source)
    assert (pooled.population, pooled.size(0)) == (1, 16)
    assert same(pooled.client(0), join([source.client(i) for i in range(3)]))
    assert same(pooled.test(), source.test())
    held = HeldOut(source, 0.5, seed=0)
    assert same(Pooled(held).validation(0), join([held.validation(i) for i in range(3)]))


def test_what_is_too_large_to_pool_is_refused():
    for clients in (200_000, 10**7):
        with pytest.raises(BadInput, match="cannot be pooled"):
            Pooled(make({"name": "synthetic", "clients": clients}, seed=0))


# Sources of one's own


def broken(**replaced):
    return type("Broken", (Own,), replaced)()


@pytest.mark.parametrize(
    "replaced, words",
    [
        ({"population": 0}, "population is 0"),
        ({"population": 2.0}, "population is 2.0"),
        ({"population": True}, "population is True"),
        ({"size": lambda s, i: 0 if i == 2 else i + 2}, "data: client 2 has no training samples"),
        ({"size": lambda s, i: 2.5}, "size(0) is 2.5"),
        ({"size": lambda s, i: 2}, "client 1 has 3 training samples, but size(1) says 2"),
        ({"client": lambda s, i: torch.ones(2)}, "client 0 has Tensor samples"),
        ({"client": lambda s, i: (torch.ones(2),)}, "an input and a target are needed"),
        ({"client": lambda s, i: {"x": torch.ones(2)}}, '"target"'),
        ({"client": lambda s, i: (torch.ones(2), torch.ones(3))}, "unequal length: 2, 3"),
        ({"client": lambda s, i: ([1, 2], torch.ones(2))}, "client 0 has a list among its samples"),
        ({"client": lambda s, i: (torch.ones(i + 2, 1 + i), torch.ones(i + 2))}, "client 1 has samples of form"),
        ({"classes": 1}, "client 0 has targets 0 to 1, but classes go from 0 to 0"),
        ({"test": lambda s: (torch.ones(0, 1), torch.ones(0))}, "the test set has no samples"),
        ({"groups": lambda s: [(torch.ones(2, 1), torch.ones(3))]}, "group 0 has sample tensors of unequal length"),
        ({"facts": lambda s, i: {"age": 3}}, "facts(0) must be a dict of tensors"),
    ],
)
def test_a_wrong_source_gets_one_sentence(replaced, words):
    with pytest.raises(BadInput, match="^data: ") as refused:
        check(adapt(broken(**replaced)))
    assert words in str(refused.value)


def test_a_source_that_lacks_a_method_or_fails_is_named():
    with pytest.raises(BadInput, match="object has no population"):
        adapt(object())
    with pytest.raises(UndriftError, match=r"client\(0\).*ZeroDivisionError"):
        check(adapt(broken(client=lambda s, i: 1 / 0)))


def test_a_source_of_ones_own_needs_three_answers_and_may_give_more():
    least = check(adapt(Own()))
    assert isinstance(least, Source) and adapt(least) is least
    assert least.test() is None and least.groups() is None and least.examples == 9 and least.classes is None
    more = adapt(broken(classes=2, facts=lambda s, i: {"region": torch.tensor([float(i)])}, examples=None))
    assert (
        more.examples is None
        and more.facts(1)["region"].tolist() == [1]
        and more.facts(1)["classes"].tolist() == [2, 1]
    )


def test_a_dict_of_two_inputs_goes_through_everything():
    samples = {"a": torch.arange(12.0).view(6, 2), "b": torch.arange(6.0), "target": torch.arange(6) % 2}
    source = check(HeldOut(ArraySource(samples, [np.arange(4), np.arange(4, 6)], classes=2), 0.4, seed=0))
    rows, fetch = source.open([1, 0])
    got = fetch(torch.from_numpy(rows[1]))
    assert list(got) == ["a", "b", "target"] and got["a"].shape == (2, 2) and got["b"].shape == (2,)
    assert each(torch.equal, got, source.client(0)) == {"a": True, "b": True, "target": True}


MINE = """
import numpy as np
class Mine:
    population = 2
    def __init__(self, scale: float = 1.0, seed=0):
        self.scale, self.seed = scale, seed
    def size(self, i):
        return 3
    def client(self, i):
        return np.full((3, 2), self.scale * (i + self.seed), dtype=np.float32), np.zeros(3, dtype=np.int64)
def arrays(n=40):
    return np.arange(n * 2.0, dtype=np.float32).reshape(n, 2), np.arange(n, dtype=np.int32) % 4
def train_and_test():
    return arrays(40), arrays(8)
def uneven():
    return np.zeros((3, 2)), np.zeros(4)
"""


def test_names_of_ones_own(tmp_path):
    (tmp_path / "mydata.py").write_text(MINE)
    source = make({"name": "mydata:Mine", "scale": 2.0}, seed=5, folder=tmp_path)
    assert source.population == 2 and source.client(1)[0][0].tolist() == [12.0, 12.0]
    split = {"name": "one-class", "clients": 4}
    source = make({"name": "mydata:train_and_test", "partition": split}, seed=0, folder=tmp_path)
    assert source.population == 4 and source.classes == 4 and source.client(0)[1].dtype == torch.int64
    assert length(source.test()) == 8 and len(source.client(0)[1].unique()) == 1
    for table, words in [
        ({"name": "mydata:arrays"}, "data.partition is missing"),
        ({"name": "mydata:Mine", "partition": split}, "data.partition: mydata:Mine comes by client"),
        ({"name": "mydata:Mine", "scale": "x"}, "data.scale must be a number"),
        ({"name": "mydata:uneven", "partition": split}, "unequal length: 3, 4"),
        ({"name": "mydata:nothing"}, "data.name"),
    ]:
        with pytest.raises(BadInput) as refused:
            make(table, seed=0, folder=tmp_path)
        assert words in str(refused.value)


@pytest.mark.parametrize(
    "table, words",
    [
        (
            {"name": "mnist"},
            "data.partition is missing: mnist does not come by client; say how to split it, for example",
        ),
        ({"name": "mnist-writers", "partition": "iid"}, "data.partition: mnist-writers comes by client"),
        (
            {"name": "synthetic", "partition": {"name": "iid", "clients": 3}},
            "data.partition: synthetic comes by client",
        ),
        ({"name": "mnst"}, "did you mean mnist"),
        ({"name": "synthetic", "clients": 0}, "data.clients is 0"),
        ({"name": "synthetic", "client": 3}, "did you mean clients"),
        ({"name": "synthetic-prox", "alpha": -1.0}, "data.alpha is -1.0"),
        ({"name": "shakespeare", "test_size": 0}, "data.test_size is 0"),
        ({"name": "shakespeare", "normalise": True}, "data.normalise"),
        ({}, "data must have a name"),
    ],
)
def test_a_wrong_table_is_refused_by_name(table, words):
    with pytest.raises(BadInput) as refused:
        make(table, seed=0)
    assert words in str(refused.value)


def test_the_same_seed_gives_the_same_partition(mnist):
    again = make({"name": "mnist", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 100}}, seed=0)
    assert all(map(np.array_equal, mnist.parts, again.parts))
