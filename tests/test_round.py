"""The round: means, covers, states, what is counted, and where methods end."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn, zeros_like

from undrift import suite, wire
from undrift.algorithm import Around, Codec, stack
from undrift.algorithms import make
from undrift.algorithms.blocks import Blocks
from undrift.algorithms.control import ControlVariates
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.mime import Mime
from undrift.algorithms.server import Lookahead, ServerMomentum
from undrift.codecs import QSGD, ErrorFeedback, TopK
from undrift.data import ArraySource
from undrift.errors import BadInput
from undrift.gradients import Net
from undrift.optim import SGD
from undrift.participation import Uniform
from undrift.planning import Effort, Planner
from undrift.rng import Stream, Use
from undrift.round import Simulation
from undrift.tasks import cross_entropy, squared_error
from undrift.vector import parameters
from undrift.wire import Partial
from undrift.work import Local

F64 = torch.float64
PLAIN = Local(SGD())
BOTH = pytest.mark.parametrize("how", [{"engine": "loop"}, {"engine": "vmap", "chunk": 2}], ids=["loop", "vmap"])


@dataclass(frozen=True)
class Sizes(Around):
    """A side field: the cohort's mean number of examples."""

    def init(self, x):
        return {"mean_size": zeros_like(x[..., :1])}, {}

    def down(self, info, mean_size, **rest):
        return self.inner.down(info, **rest)

    def client(self, work, **rest):
        upload, mine = self.inner.client(work, **rest)
        return upload | {"size": work.info.examples}, mine

    def server(self, cohort, mean_size, size, **rest):
        return self.inner.server(cohort, **rest) | {"mean_size": size}


@dataclass(frozen=True)
class Covering(Planner):
    """A planner that gives client i the coordinates j with (i + j + round) even; of some none to anybody."""

    nobody: tuple[int, ...] = ()

    def cover(self, r, i):
        j = torch.arange(self.size)
        return ((i + j + r) % 2 == 0) & ~torch.isin(j, torch.tensor(self.nobody, dtype=torch.int64))

    def round(self, r):
        return replace(super().round(r), cover=lambda i: self.cover(r, i))


def covering(algorithm, nobody=(), **changes):
    plain = suite.planner(algorithm, **changes)
    return Covering(**vars(plain), nobody=nobody)


# -- FedAvg as anybody would write it ----------------------------------------------------


def by_hand(s, client, lr):
    """(y, losses at the points visited, samples) of one client's plain SGD, by PyTorch's own module and optimizer."""
    plan = s.planners[0].round(s.round)
    steps = plan.steps[plan.clients.tolist().index(client)]
    feed = plan.feed([client], np.array([steps]))
    module = suite.Small().to(F64)
    layout = s.net.layout
    module.load_state_dict({k: v.clone() for k, v in layout.split(s.model()).items()})
    optimizer, losses, samples = torch.optim.SGD(module.parameters(), lr), [], 0
    for k in range(steps):
        batch = feed.batch(k)
        x, y = (t[0][batch.weight[0] > 0] for t in batch.samples)
        optimizer.zero_grad()
        loss = cross_entropy(module(x), y).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        samples += len(x)
    return parameters(module, layout, F64), losses, samples


@BOTH
@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_fedavg_and_its_record_by_hand(how, weights):
    s = suite.simulation(FedAvg(), [suite.planner(FedAvg(), weights=weights)], local=PLAIN, **how)
    for _ in range(3):
        x, lr = s.model(), 0.05 * 0.9**s.round
        clients = s.planners[0].round(s.round).clients.tolist()
        n = np.array([suite.SIZES[i] for i in clients], dtype=float)
        p = torch.from_numpy(n / n.sum() if weights == "examples" else np.full(4, 0.25))[:, None]
        ys, losses, samples = zip(*(by_hand(s, i, lr) for i in clients), strict=True)
        ys = torch.stack(ys)
        mean = (p * ys).sum(0)
        record = suite.go(s, 1)[0]
        assert suite.gap(s.model(), mean) < 1e-12
        assert record["train_loss"] == pytest.approx(np.mean(np.concatenate(losses)), rel=1e-12)
        divergence = (p[:, 0] * (ys - mean).square().sum(1)).sum() / (mean - x).square().sum()
        assert record["divergence"] == pytest.approx(float(divergence), rel=1e-9)
        assert record["gradients"] == sum(samples)
        assert (record["cohort"], record["lost"]) == (4, 0)
        assert record["floats_down"] == record["floats_up"] == 4 * 43
        assert record["bytes_down"] == record["bytes_up"] == 4 * 43 * 4


@BOTH
def test_lost_clients_leave_mean_loss_and_divergence_and_stay_in_the_costs(how):
    cohort, lost = [0, 3, 5, 7], 5
    who = suite.Given([cohort], {(0, lost)})
    s = suite.simulation(FedAvg(), [suite.planner(FedAvg(), who=who)], local=PLAIN, **how)
    x = s.model()
    kept = [i for i in cohort if i != lost]
    n = torch.tensor([suite.SIZES[i] for i in kept], dtype=F64)
    p = (n / n.sum())[:, None]
    ys, losses, _ = zip(*(by_hand(s, i, 0.05) for i in kept), strict=True)
    ys = torch.stack(ys)
    mean = (p * ys).sum(0)
    record = suite.go(s, 1)[0]
    assert suite.gap(s.model(), mean) < 1e-12
    assert record["train_loss"] == pytest.approx(np.mean(np.concatenate(losses)), rel=1e-12)
    divergence = (p[:, 0] * (ys - mean).square().sum(1)).sum() / (mean - x).square().sum()
    assert record["divergence"] == pytest.approx(float(divergence), rel=1e-9)
    assert record["lost"] == 1 and record["floats_up"] == 4 * 43
    assert record["gradients"] == sum(suite.SIZES[i] for i in cohort)


@BOTH
@pytest.mark.parametrize(
    "table, of_steps, full",
    [
        ({"name": "fedavg"}, 1, 0),
        ({"name": "scaffold"}, 1, 0),
        ({"name": "scaffold", "option": 1}, 1, 1),
        ({"name": "mime"}, 2, 1),
    ],
)
def test_every_gradient_is_counted(how, table, of_steps, full):
    plan = suite.planner(make(table), effort=Effort(4, epochs=2))
    s = suite.simulation(make(table), [plan], **how)
    for r, record in enumerate(suite.go(s, 2)):
        n = sum(suite.SIZES[i] for i in plan.round(r).clients)
        assert record["gradients"] == of_steps * 2 * n + full * n


# -- means over what covers -----------------------------------------------------------------


@BOTH
def test_a_coordinate_is_the_mean_over_those_who_sent_it(how):
    algorithm = stack(FedAvg(), Sizes(), Blocks())
    cohort, nobody = [0, 3, 5, 8], (4, 17)
    plan = covering(algorithm, nobody, who=suite.Given([cohort]))
    s = suite.simulation(algorithm, [plan], local=PLAIN, **how)
    x = s.model()
    n = torch.tensor([suite.SIZES[i] for i in cohort], dtype=F64)[:, None]
    masks = torch.stack([plan.cover(0, i) for i in cohort]).double()
    moves = torch.stack([by_hand(s, i, 0.05)[0] - x for i in cohort])
    record = suite.go(s, 1)[0]
    mean = (n * masks * moves).sum(0) / (n * masks).sum(0).clamp(min=1e-9)
    assert suite.gap(s.model(), x + mean) < 1e-12
    assert torch.equal(s.model()[list(nobody)], x[list(nobody)])
    # A side field is a mean over all who sent, with their weights, whatever the blocks.
    assert float(s.server["mean_size"]) == pytest.approx(float((n * n).sum() / n.sum()))
    assert record["floats_up"] == int(masks.sum()) and record["bytes_up"] == 4 * int(masks.sum()) + 4 * 4
    assert record["floats_down"] == 4 * 43


@dataclass(frozen=True)
class Count(Around):
    """A history that moves on whatever arrives."""

    always = frozenset({"rounds"})

    def init(self, x):
        return {"rounds": zeros_like(x), "same": zeros_like(x)}, {}

    def down(self, info, rounds, same, **rest):
        return self.inner.down(info, **rest)

    def server(self, cohort, rounds, same, **rest):
        return self.inner.server(cohort, **rest) | {"rounds": rounds + 1, "same": same + 1}


@BOTH
def test_where_nothing_arrives_every_vector_keeps_its_value_but_those_that_always_move(how):
    algorithm = stack(FedAvg(), ServerMomentum(0.5), Count(), Blocks())
    plan = covering(algorithm, nobody=(4, 17), who=suite.Given([[0, 2, 3, 5], [1, 2, 4]]))
    s = suite.simulation(algorithm, [plan], **how)
    x = s.model()
    suite.go(s, 4)
    for name in ("x", "v", "same"):
        v = s.server[name].reshape(-1)
        assert torch.equal(v[[4, 17]], (x if name == "x" else torch.zeros(43, dtype=F64))[[4, 17]])
        assert (v[5:17] != (x if name == "x" else 0 * x)[5:17]).all()
    assert (s.server["rounds"] == 4).all()


def test_all_vectors_of_an_upload_cover_the_same():
    @dataclass(frozen=True)
    class Uneven(Codec):
        def encode(self, info, name, leaf):
            return Partial(leaf * info.cover, info.cover) if name == "dx" else leaf

    algorithm = stack(FedAvg(), ControlVariates(), Uneven())
    s = suite.simulation(algorithm, [covering(algorithm)])
    with pytest.raises(BadInput, match="all vectors of one upload must cover the same coordinates"):
        s.play()


@pytest.mark.parametrize(
    "parts, floats, bytes_",
    [
        ((), 2 * 43, 2 * 43 * 4),
        ((TopK(5),), 2 * 10, 2 * 5 * (4 + 1)),
        ((QSGD(4),), 2 * 43, 2 * (4 + 22)),
    ],
    ids=["plain", "top-k", "qsgd"],
)
def test_surveys_and_uploads_travel_encoded(parts, floats, bytes_):
    algorithm = stack(FedAvg(), Mime(), *parts)
    record = suite.go(suite.simulation(algorithm), 1)[0]
    assert record["floats_up"] == 4 * floats and record["bytes_up"] == 4 * bytes_
    assert record["floats_down"] == 4 * 2 * 43  # the survey's mean comes back as it is


LOSSY = {
    "blocks": (Blocks(),),
    "qsgd": (QSGD(4),),
    "top-k": (TopK(5),),
    "blocks and qsgd": (Blocks(), QSGD(4)),
    "error feedback": (ErrorFeedback(), TopK(5)),
}


@pytest.mark.parametrize("parts", [(), *LOSSY.values()], ids=["plain", *LOSSY])
@BOTH
def test_c_stays_the_mean_of_all_c_i(how, parts):
    losses = {(r, i) for r in range(5) for i in suite.EVERYONE if (r + i) % 4 == 0}
    n = torch.tensor(suite.SIZES, dtype=F64)[:, None]
    for changes in ({}, {"variates": "uniform"}, {"weights": "uniform"}):
        for option in (1, 2):
            algorithm = stack(FedAvg(), ControlVariates(option), *parts)
            who = suite.Given([[0, 3, 5, 8, 9], [1, 2, 3, 4, 7]], losses)
            s = suite.simulation(algorithm, [covering(algorithm, who=who, **changes)], **how)
            suite.go(s, 5)
            ci = s.states[0].read(list(suite.EVERYONE))["ci"]
            share = n / n.sum() if changes == {} else torch.full_like(n, 0.1)
            assert suite.gap(s.server["c"].reshape(-1), (share * ci).sum(0)) < 1e-12
            assert s.server["c"].abs().max() > 1e-3


@pytest.mark.parametrize("label", LOSSY)
def test_lossy_uploads_agree_over_engines_and_chunks(label):
    algorithm = stack(FedAvg(), ControlVariates(), *LOSSY[label])
    runs = [({"engine": "loop"}), *({"engine": "vmap", "chunk": n} for n in (1, 2, 3, 64))]
    sims = [suite.simulation(algorithm, [covering(algorithm)], **how) for how in runs]
    records = [suite.go(s, 4) for s in sims]
    for s, r in zip(sims[1:], records[1:], strict=True):
        suite.agree(suite.held(sims[0]), suite.held(s), 1e-10, label)
        suite.same_records(records[0], r, label)


@pytest.mark.parametrize("parts", [(QSGD(4),), (TopK(5),), (ErrorFeedback(), TopK(5))], ids=str)
def test_codecs_pass_the_suite_but_for_ties_in_float32(parts):
    def method():
        return stack(FedAvg(), ControlVariates(), *parts)

    for check in suite.checks(method):
        if check is not suite.the_plain_loop_agrees_with_every_chunking:  # a last bit may choose another level
            check(method)


# -- what is not finite ------------------------------------------------------------------------


def poisoned(bad):
    """The suite's data with one client's inputs not finite."""
    clean = suite.source()
    x, y = clean.arrays
    x = x.clone()
    x[clean.parts[bad]] = float("nan")
    return ArraySource((x, y), clean.parts, classes=clean.classes)


@BOTH
@pytest.mark.parametrize("name", ["fedavg", "mime", "scaffold", "fedcm"])
def test_a_client_of_nan_data_is_as_one_that_is_not_there(how, name):
    algorithm = make({"name": name})
    cohort = [0, 3, 5, 8]
    with_it = suite.planner(algorithm, who=suite.Given([cohort]), source=poisoned(5))
    without = suite.planner(algorithm, who=suite.Given([[0, 3, 8]]))
    a, b = (suite.simulation(algorithm, [p], **how) for p in (with_it, without))
    records = suite.go(a, 3)
    suite.go(b, 3)
    suite.agree(suite.held(b), suite.held(a), 1e-10, name)
    assert [r["lost"] for r in records] == [1, 1, 1] and 5 not in a.states[0].row
    assert all(np.isfinite(r["train_loss"]) and np.isfinite(r["divergence"]) for r in records)


@BOTH
def test_where_nothing_is_finite_nothing_moves_and_the_record_has_gaps(how):
    algorithm = stack(FedAvg(), ControlVariates(), Lookahead(0.5))
    plan = suite.planner(algorithm, who=suite.Given([[5]]), source=poisoned(5))
    s = suite.simulation(algorithm, [plan], **how)
    before = {k: v.clone() for k, v in suite.held(s).items()}
    record = suite.go(s, 1)[0]
    suite.agree(before, suite.held(s), 0.0, "nothing finite")
    assert record["train_loss"] is None and record["divergence"] is None
    assert (record["cohort"], record["lost"]) == (1, 1)


def test_a_diverged_experiment_of_a_sweep_stops_alone():
    algorithm = make({"name": "scaffold"})
    both = [suite.planner(algorithm, seed) for seed in (0, 1)]
    lrs = torch.tensor([0.05, float("inf")], dtype=F64).reshape(2, 1, 1)
    swept = suite.simulation(algorithm, both, lr=lrs, local=PLAIN, engine="vmap", chunk=3, replicas=True)
    alone = suite.simulation(algorithm, both[:1], lr=0.05, local=PLAIN, engine="vmap")
    start = swept.model(1).clone()
    for _ in range(3):
        played = swept.play()
        swept.keep(played)
    suite.go(alone, 3)
    suite.agree(suite.held(alone), suite.held(swept, 0), 1e-10, "beside a diverged one")
    assert played.records[1]["record"]["lost"] > 0 and played.records[0]["record"]["lost"] == 0
    assert torch.equal(swept.model(1), start)  # nothing of it ever counted


def test_experiments_of_unequal_sizes_share_a_batch_of_full_gradients():
    """Seeds draw clients whose data come in another number of pieces, and other steps."""
    n = (3, 700)
    x = torch.from_numpy(Stream(0, Use.DATA).normal(4, np.arange(sum(n))))
    y = torch.arange(sum(n)) % 3
    source = ArraySource((x, y), [np.arange(n[0]), np.arange(n[0], sum(n))], classes=3)
    algorithm = make({"name": "mime"})
    both = [
        replace(suite.planner(algorithm, weights="uniform"), source=source, participation=One(i), effort=Effort(50, 1))
        for i in (0, 1)
    ]
    swept = suite.simulation(algorithm, both, engine="vmap", replicas=True)
    for _ in range(2):
        played = swept.play()
        swept.keep(played)
    for i in (0, 1):
        alone = suite.simulation(algorithm, [both[i]], engine="vmap")
        record = suite.go(alone, 2)[-1]
        suite.agree(suite.held(alone), suite.held(swept, i), 1e-10, f"client {i}")
        suite.same_records([record], [played.records[i]["record"]], f"client {i}")
        assert record["gradients"] == 3 * n[i]


class One(Uniform):
    def __init__(self, i):
        super().__init__(2, 0, clients=1)
        self.i = i

    def cohort(self, round):
        return np.array([self.i])


# -- where methods end -----------------------------------------------------------------------------

UNEQUAL = (4, 9, 20, 31)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.fc(x)[..., 0]


def lines():
    """Clients of unequal size, each with a line of its own: quadratics whose minima differ."""
    edges = np.cumsum((0, *UNEQUAL))
    parts = [np.arange(a, b) for a, b in pairwise(edges)]
    x = torch.from_numpy(Stream(3, Use.DATA).normal(2, np.arange(edges[-1])))
    slopes = torch.tensor([[3.0, -1.0], [0.0, 2.0], [-2.0, 1.0], [1.0, 1.0]], dtype=F64)
    y = (x * slopes.repeat_interleave(torch.tensor(UNEQUAL), 0)).sum(1)
    return ArraySource((x, y), parts)


def end(name, epochs, rounds=80, **changes):
    source, module = lines(), Line().to(F64)
    net = Net(module, squared_error)
    planner = Planner(source, Uniform(4, 0, clients=4), Effort(64, epochs), 0, 2, dtype=F64, **changes)
    algorithm = make({"name": name})
    s = Simulation(algorithm, net, torch.zeros(2, dtype=F64), [planner], rate=lambda r: 0.15, engine="vmap")
    suite.go(s, rounds)
    return s.model()


def optimum(weights):
    """Of the weighted mean of the clients' mean squared errors."""
    source = lines()
    A, b = torch.zeros(2, 2, dtype=F64), torch.zeros(2, dtype=F64)
    for i, w in enumerate(weights):
        x, y = source.client(i)
        A, b = A + w * x.T @ x / len(y), b + w * x.T @ y / len(y)
    return torch.linalg.solve(A, b)


@pytest.mark.parametrize("name, epochs", [("fedavg", 1), ("scaffold", 3), ("mime", 3)])
def test_under_examples_all_methods_end_at_the_weighted_optimum(name, epochs):
    weighted, uniform = optimum(np.array(UNEQUAL) / sum(UNEQUAL)), optimum([0.25] * 4)
    assert (weighted - uniform).norm() > 0.1  # the two can be told apart
    assert suite.gap(weighted, end(name, epochs)) < 1e-6
    assert suite.gap(uniform, end(name, epochs, weights="uniform")) < 1e-6


def test_uniform_variates_end_elsewhere_under_examples():
    weighted = optimum(np.array(UNEQUAL) / sum(UNEQUAL))
    assert suite.gap(weighted, end("scaffold", 3, variates="uniform")) > 1e-2


def test_fedavg_of_several_steps_ends_elsewhere():
    assert suite.gap(optimum(np.array(UNEQUAL) / sum(UNEQUAL)), end("fedavg", 5)) > 1e-4


# -- smaller things --------------------------------------------------------------------------------


def test_logs_reach_the_record_of_their_client():
    @dataclass(frozen=True)
    class Speaks(Around):
        def client(self, work, **given):
            work.log("size", work.info.examples)
            return self.inner.client(work, **given)

        def server(self, cohort, **given):
            cohort.log("population", cohort.population)
            return self.inner.server(cohort, **given)

    for how in ({"engine": "loop"}, {"engine": "vmap", "chunk": 3}):
        s = suite.simulation(stack(FedAvg(), Speaks()), **how)
        played = s.play()
        clients = s.planners[0].round(0).clients.tolist()
        assert played.records[0]["clients"] == [
            {"round": 1, "client": i, "size": float(suite.SIZES[i])} for i in clients
        ]
        assert played.records[0]["record"]["population"] == 10


def test_the_schedule_reaches_the_clients():
    seen = []

    @dataclass(frozen=True)
    class Rates(Around):
        def client(self, work, **given):
            seen.append(float(work.info.lr))
            return self.inner.client(work, **given)

        def server(self, cohort, **given):
            assert float(cohort.lr) == seen[-1]
            return self.inner.server(cohort, **given)

    algorithm = stack(FedAvg(), Rates())
    seen.clear()  # of the trial round
    seen.append(1.0)
    s = suite.simulation(algorithm)
    seen.clear()
    suite.go(s, 3)
    assert seen == pytest.approx([0.05 * 0.9 ** (i // 4) for i in range(12)])


def test_cover_facts_and_draws_reach_every_client():
    found = {}

    @dataclass(frozen=True)
    class Looks(Around):
        def client(self, work, **given):
            info = work.info
            found[int(info.examples[..., 0].flatten()[0])] = (info.uniform("dx"), info.data["classes"], info.weight)
            return self.inner.client(work, **given)

    algorithm = FedAvg()
    s = suite.simulation(algorithm)
    s.algorithm = replace(Looks(), inner=algorithm)
    s.play()
    plan = s.planners[0].round(0)
    assert set(found) == {suite.SIZES[i] for i in plan.clients}
    for i, p in zip(plan.clients.tolist(), plan.weight, strict=True):
        u, counts, weight = found[suite.SIZES[i]]
        assert torch.equal(u, plan.uniform(i, "dx"))
        assert counts.sum() == suite.SIZES[i] and counts.dtype == F64
        assert float(weight) == pytest.approx(p)


def test_wire_masks_are_those_of_the_plan():
    algorithm = stack(FedAvg(), Blocks())
    plan = covering(algorithm, who=suite.Given([[2, 5]]))
    s = suite.simulation(algorithm, [plan], engine="vmap")
    leaves = {}
    s.algorithm = replace(Peeks(leaves), inner=algorithm)
    s.play()
    order = [5, 2]  # the longer first
    assert torch.equal(wire.mask(leaves["dx"]), torch.stack([plan.cover(0, i) for i in order]))


@dataclass(frozen=True)
class Peeks(Around):
    leaves: dict = None

    def client(self, work, **given):
        upload, mine = self.inner.client(work, **given)
        self.leaves.update(upload)
        return upload, mine
