"""The shared suite: what every method must hold, whatever it computes.

`checks(make)` lists the checks that apply to the method that `make()` gives; each takes `make` and raises an
AssertionError with one sentence that says what fails and where. They play a few rounds of a small network on ten
clients of unequal size, cohorts and mini-batches drawn from counters as in any run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map

from . import wire
from .algorithm import Algorithm, Around, chain
from .data import ArraySource, Pooled
from .gradients import Net
from .modules import initial
from .optim import SGD, Adam
from .participation import Participation, Uniform
from .planning import Effort, Planner
from .rng import Stream, Use
from .round import Simulation, each
from .running import flat, unflat
from .tasks import cross_entropy
from .vector import parameters
from .work import Local

Make = Callable[[], Algorithm]

SIZES = (3, 7, 10, 16, 19, 22, 11, 9, 5, 13)  # all different: a client is known by its number of examples
BATCH = 4  # so that the steps of an epoch are 1, 2, 3, 4, 5, 6, 3, 3, 2, 4
CLASSES = 3
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
LOCAL = Local(SGD(0.5), clip=1.0, decay=0.01, l2=0.02)


# ---------------------------------------------------------------- the problem


class Small(nn.Module):
    """Two layers; tanh, as a kink would turn rounding into a difference."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


@lru_cache
def source() -> ArraySource:
    """Ten clients, each with classes and a centre of its own."""
    edges = np.cumsum((0, *SIZES))
    parts = [np.arange(a, b) for a, b in pairwise(edges)]
    draws = Stream(0, Use.DATA)
    clients = np.arange(len(SIZES))
    centres, x = draws.normal(4, clients), draws.normal(4, 1000 + np.arange(edges[-1]))
    x += np.repeat(centres, SIZES, axis=0)
    y = np.concatenate([(i + draws.below([2] * n, 5000 + i)) % CLASSES for i, n in enumerate(SIZES)])
    return ArraySource((torch.from_numpy(x), torch.from_numpy(y)), parts, classes=CLASSES)


class Given(Participation):
    """Cohorts that a list names, in its order, over and over; `losses` holds pairs (round, client)."""

    def __init__(self, cohorts: Sequence[Iterable[int]], losses: Iterable[tuple[int, int]] = ()):
        super().__init__(len(SIZES), 0, 0.0)
        self.cohorts, self.losses = [np.array(list(c)) for c in cohorts], set(losses)

    def cohort(self, round):
        return self.cohorts[round % len(self.cohorts)]

    def lost(self, round, clients):
        return np.array([(round, int(i)) in self.losses for i in clients])


EVERYONE = range(len(SIZES))


def planner(algorithm: Algorithm, seed=0, who: Participation | None = None, dtype=torch.float64, **changes) -> Planner:
    """Four of the ten clients a round, an epoch each; all data in one place for a method that sends nothing."""
    size = sum(p.numel() for p in Small().parameters())
    who = who or Uniform(len(SIZES), seed, clients=4)
    plan = replace(Planner(source(), who, Effort(BATCH, epochs=1), seed, size, dtype=dtype), **changes)
    if algorithm.sends:
        return plan
    return replace(plan, source=Pooled(source()), participation=Uniform(1, 0, clients=1), as_many_as=plan)


def simulation(
    algorithm: Algorithm, planners: Sequence[Planner] | None = None, lr=0.05, local=LOCAL, scale=1.0, **how
) -> Simulation:
    """The method on its planners, at its first round; `scale` gives another initial model."""
    planners = planners or [planner(algorithm)]
    dtype = planners[0].dtype
    module = initial(Small, 0).to(dtype)
    net = Net(module, cross_entropy)
    x = scale * parameters(module, net.layout, dtype)
    return Simulation(algorithm, net, x, list(planners), rate=lambda r: lr * 0.9**r, local=local, **how)


def go(simulation: Simulation, rounds: int) -> list[dict]:
    """Plays rounds; -> the records of replica 0."""
    records = []
    for _ in range(rounds):
        played = simulation.play()
        simulation.keep(played)
        records.append(played.records[0]["record"])
    return records


# ---------------------------------------------------------------- agreement


def gap(a: Tensor, b: Tensor) -> float:
    """max|a-b| / max|a|; inf where one is not finite."""
    if a.shape != b.shape or not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    a, b = a.double(), b.double()
    difference = float((a - b).abs().max())
    return difference and difference / max(float(a.abs().max()), 1e-300)


def held(simulation: Simulation, replica: int = 0) -> dict[str, Tensor]:
    """All that a simulation holds for one replica, [n] each: the server's fields and every client's."""
    replicas = len(simulation.planners)
    found = {}
    for name, v in each(lambda t: t.reshape(-1, t.shape[-1]).expand(replicas, -1)[replica], simulation.server).items():
        found |= {f"server {name}.{i}": t for i, t in enumerate(v)} if isinstance(v, tuple) else {f"server {name}": v}
    state = simulation.states[replica]
    for name, v in state.rows(state.row).items():
        found |= {f"{name} of client {i}": row.reshape(-1) for i, row in zip(sorted(state.row), v, strict=True)}
    return found


def agree(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float, what: str) -> None:
    """Everything that two simulations hold is the same to `tolerance`, bit for bit where that is 0."""
    assert a.keys() == b.keys(), f"{what}: one holds {sorted(a.keys() ^ b.keys())}, the other does not"
    for name in a:
        found = gap(a[name], b[name])
        assert found <= tolerance, f"{what}: {name} differs by {found:.1e}, allowed are {tolerance:.0e}"


def same_records(a: list[dict], b: list[dict], what: str) -> None:
    """Whole numbers are equal, the others to rounding (the divergence of one client alone is all rounding)."""
    for one, other in zip(a, b, strict=True):
        for name, value in one.items():
            slack = 1e-3 * abs(value) + 1e-6 if isinstance(value, float) else 0
            there = other[name]
            same = there == value or (slack and there is not None and abs(there - value) <= slack)
            assert same, f"{what}: {name} of round {one['round']} is {other[name]}, not {value}"


# ---------------------------------------------------------------- parts that look on


@dataclass(frozen=True)
class Spy(Around):
    """Notes each call of `client`: round, examples, age, visited, and the state that came in."""

    notes: list = field(default_factory=list)

    def client(self, work, **given):
        info = work.info
        own = {k: v.clone() for k, v in given.items() if k in self.init_names(given)}
        self.notes.append((info.round, int(info.examples), float(info.age), float(info.visited), own))
        return self.inner.client(work, **given)

    def init_names(self, given) -> set[str]:
        """The fields of a client's state."""
        some = next(v for v in given.values() if isinstance(v, Tensor))
        return {k for part in chain(self) for k in part.init(some)[1]}


@dataclass(frozen=True)
class Spoiled(Around):
    """Makes what one client sends not finite."""

    examples: int = 0

    def client(self, work, **given):
        upload, mine = self.inner.client(work, **given)
        return {k: spoiled(v, work.info.examples == self.examples) for k, v in upload.items()}, mine


def spoiled(leaf, who: Tensor):
    if isinstance(leaf, Tensor):
        return torch.where(who, torch.full_like(leaf, float("nan")), leaf)
    inside = "norm" if isinstance(leaf, wire.Quantised) else "values"
    return replace(leaf, **{inside: spoiled(getattr(leaf, inside), who)})


@dataclass(frozen=True)
class Posted(Around):
    """Packs all that travels, and counts the bytes: [down, up]. For one client at a time."""

    total: list = field(default_factory=lambda: [0, 0])
    asked: set = field(default_factory=set)

    def post(self, way: int, tree: dict) -> None:
        self.total[way] += sum(len(wire.pack(leaf)) for leaf in tree.values())

    def down(self, info, **server):
        message = self.inner.down(info, **server)
        self.post(0, message)
        return message

    def survey(self, work, **received):
        upload = self.inner.survey(work, **received)
        self.post(1, upload)
        self.asked.update(upload)
        return upload

    def client(self, work, **given):
        self.post(0, {k: v for k, v in given.items() if k in self.asked})
        upload, mine = self.inner.client(work, **given)
        self.post(1, upload)
        return upload, mine


@dataclass(frozen=True)
class Loud(Around):
    """Logs on both sides."""

    def client(self, work, **given):
        upload, mine = self.inner.client(work, **given)
        work.log("length", sum(wire.decode(v).norm(dim=-1, keepdim=True) for v in upload.values()))
        return upload, mine

    def server(self, cohort, **given):
        cohort.log("round_again", cohort.round)
        return self.inner.server(cohort, **given)


@dataclass(frozen=True)
class Beginning(Around):
    """Tells a `Tape` where an exchange begins."""

    tape: Tape | None = None

    def survey(self, work, **received):
        self.tape.begin("survey")
        return self.inner.survey(work, **received)

    def client(self, work, **given):
        self.tape.begin("client")
        return self.inner.client(work, **given)


class Tape:
    """What a driver does that compiles: a local step is traced where it is met first, and replayed ever after. Here
    every replay is held against the step itself."""

    def __init__(self, tolerance: float = 1e-10):
        self.graphs: dict = {}
        self.tolerance, self.replays = tolerance, 0
        self.exchange, self.loops = "", 0

    def begin(self, exchange: str) -> None:
        self.exchange, self.loops = exchange, 0

    def __call__(self, one: Callable) -> Callable:
        where = f"{self.exchange}, local loop {self.loops + 1}"
        self.loops += 1

        def step(*given):
            leaves, form = tree_flatten(given)
            kinds = [(v.shape, v.dtype) if isinstance(v, Tensor) else v for v in leaves]
            key = f"{where} {form} {kinds}"
            new, calls = one(*given)
            if key not in self.graphs:
                # of copies: the model that is sent comes in twice, and one tensor would be one input
                self.graphs[key] = make_fx(one)(*tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, given))
                return new, calls
            self.replays += 1
            again, calls_then = self.graphs[key](*given)
            found = max(gap(a, b) for a, b in zip(new, again, strict=True))
            assert found <= self.tolerance and calls == calls_then, (
                f"a local step that was traced once ({where}) and replayed with other values differs from the step "
                f"itself by {found:.1e}: something that changes is closed over and not passed to `adjust` or "
                f"`objective`"
            )
            return again, calls

        return step


# ---------------------------------------------------------------- the checks


def the_plain_loop_agrees_with_every_chunking(make: Make) -> None:
    """One client after another, and any number side by side: the same model, states and records."""
    for dtype, chunks in ((torch.float64, (1, 2, 3, 64)), (torch.float32, (2, 64))):
        a = simulation(make(), [planner(make(), dtype=dtype)])
        before = a.model().clone()
        records = go(a, 4)
        assert not torch.equal(a.model(), before), "the model does not move in four rounds"
        for chunk in chunks:
            what = f"{str(dtype).removeprefix('torch.')}, {chunk} clients at once instead of one after another"
            b = simulation(make(), [planner(make(), dtype=dtype)], engine="vmap", chunk=chunk)
            same_records(records, go(b, 4), what)
            agree(held(a), held(b), TOLERANCE[dtype], what)


def the_order_of_clients_does_not_matter(make: Make) -> None:
    """A cohort in reverse gives the same model and states."""
    cohorts = [[0, 7, 6, 3, 9], [2, 6, 7, 5]]
    there, back = ([list(c)[::way] for c in cohorts] for way in (1, -1))
    for how in ({"engine": "loop"}, {"engine": "vmap", "chunk": 2}):
        a, b = (simulation(make(), [planner(make(), who=Given(c))], **how) for c in (there, back))
        go(a, 4), go(b, 4)
        agree(held(a), held(b), TOLERANCE[torch.float64], f"{how['engine']}: the cohort in reverse")


def ragged_steps_in_one_chunk_equal_each_client_alone(make: Make) -> None:
    """1 to 6 steps side by side, with momentum, clipping, decay and l2."""
    for optimizer in (SGD(0.9), Adam(eps=0.01)):
        local = Local(optimizer, clip=0.4, decay=0.05, l2=0.02)
        alone, together = (
            simulation(make(), [planner(make(), who=Given([EVERYONE]))], local=local, lr=0.02, engine=engine)
            for engine in ("loop", "vmap")
        )
        same_records(go(alone, 2), go(together, 2), f"1 to 6 steps side by side ({type(optimizer).__name__})")
        what = f"1 to 6 steps side by side instead of each client alone ({type(optimizer).__name__})"
        agree(held(alone), held(together), TOLERANCE[torch.float64], what)


def a_sweep_equals_each_experiment_alone(make: Make) -> None:
    """Two seeds, rates and values of every float field in one batch [R, C, P]."""
    both = [planner(make(), seed) for seed in (0, 1)]
    lrs = torch.tensor([0.05, 0.03], dtype=torch.float64).reshape(2, 1, 1)
    swept = simulation(having(make(), pair), both, lr=lrs, engine="vmap", chunk=3, replicas=True)
    for _ in range(3):
        swept.keep(swept.play())
    for r, plan in enumerate(both):
        alone = simulation(having(make(), lambda v, r=r: (v, other(v))[r]), [plan], lr=float(lrs[r]), engine="vmap")
        go(alone, 3)
        what = f"experiment {r + 1} of a sweep of two, instead of alone"
        agree(held(alone), held(swept, r), TOLERANCE[torch.float64], what)


def having(algorithm: Algorithm, f: Callable) -> Algorithm:
    """The algorithm with f(value) in the place of every float field of its parts."""
    changed = {v.name: f(value) for v in fields(algorithm) if isinstance(value := getattr(algorithm, v.name), float)}
    if isinstance(algorithm, Around):
        changed["inner"] = having(algorithm.inner, f)
    return replace(algorithm, **changed)


def other(value: float) -> float:
    """A second value for a hyper-parameter, within most ranges."""
    return 0.7 * value if value else 0.3


def pair(value: float) -> Tensor:
    return torch.tensor([value, other(value)], dtype=torch.float64).reshape(2, 1, 1)


def late_and_absent_clients_keep_their_state(make: Make) -> None:
    """A client that was away finds what it left; one that comes late begins as all do."""
    cohorts = [[0, 1, 2], [1, 3], [2, 3, 4], [1, 4], [3, 2], [5, 1], [0, 5], [5, 0, 6]]
    spy = Spy(inner=make())
    s = simulation(spy, [planner(spy, who=Given(cohorts))])
    last: dict[int, int] = {}
    left: dict[int, dict] = {}
    for r, cohort in enumerate(cohorts):
        spy.notes.clear()
        before = {i: s.states[0].read([i]) for i in EVERYONE}
        s.keep(s.play())
        after = {i: s.states[0].read([i]) for i in EVERYONE}
        by_size = {note[1]: note for note in spy.notes}
        for i in EVERYONE:
            if i not in cohort:
                same = all(torch.equal(before[i][k], after[i][k]) for k in before[i])
                assert same, f"round {r + 1}: the state of client {i} changed although it was away"
                continue
            _, _, age, visited, own = by_size[SIZES[i]]
            wanted = (float(r - last[i]), 1.0) if i in last else (float("inf"), 0.0)
            assert (age, visited) == wanted, f"round {r + 1}: client {i} has (age, visited) {(age, visited)}"
            for k, v in own.items():
                same = torch.equal(v.reshape(-1), left.get(i, s.states[0].fresh)[k].reshape(-1))
                assert same, f"round {r + 1}: client {i} does not find the {k} that it left"
            last[i], left[i] = r, after[i]


def an_upload_that_does_not_count_changes_nothing(make: Make) -> None:
    """Lost or not finite: the same, and the client's state stays; where all are lost, all vectors stay."""
    bad, everyone = 3, [EVERYONE]
    for how in ({"engine": "loop"}, {"engine": "vmap", "chunk": 4}):
        lost = simulation(make(), [planner(make(), who=Given(everyone, {(r, bad) for r in range(3)}))], **how)
        nan = simulation(Spoiled(SIZES[bad], inner=make()), [planner(make(), who=Given(everyone))], **how)
        assert go(lost, 3) == go(nan, 3), f"{how['engine']}: the records of a lost and a not finite upload differ"
        agree(held(lost), held(nan), 0.0, f"{how['engine']}: a not finite upload instead of a lost one")
        assert bad not in lost.states[0].row, f"{how['engine']}: a client whose uploads were all lost has a state"
    half = [(r, i) for r in range(4) for i in EVERYONE if (r + i) % 3 == 0]
    s = simulation(make(), [planner(make(), who=Given(everyone, half + [(4, i) for i in EVERYONE]))])
    for r in range(5):
        before = {i: s.states[0].read([i]) for i in EVERYONE}
        server = each(torch.clone, s.server)
        played = s.play()
        s.keep(played)
        assert played.records[0]["record"]["lost"] == sum(
            (r, i) in s.planners[0].participation.losses for i in EVERYONE
        )
        for i in EVERYONE:
            if (r, i) in s.planners[0].participation.losses:
                same = all(torch.equal(v, s.states[0].read([i])[k]) for k, v in before[i].items())
                assert same, f"round {r + 1}: the state of client {i} moved although its upload was lost"
    for name in s.server.keys() - s.always:
        pairs = each(torch.equal, {name: server[name]}, {name: s.server[name]})[name]
        stayed = all(pairs) if isinstance(pairs, tuple) else pairs
        assert stayed, f"{name} moved in a round from which no upload arrived"
    assert s.round == 5, "a round from which no upload arrived does not count"


def a_resumed_run_equals_one_left_alone(make: Make) -> None:
    """Server, client states and counters are all that a run is."""
    for how in ({"engine": "loop"}, {"engine": "vmap", "chunk": 3}):
        whole, first, second = (simulation(make(), **how) for _ in range(3))
        records = go(whole, 5)
        same = go(first, 2)
        state = first.states[0]
        second.server = unflat({k: v.clone() for k, v in flat(first).items()}, second.server)
        second.states[0].restore({k: v.clone() for k, v in state.rows(state.row).items()})
        second.round = first.round
        same += go(second, 3)
        assert records == same, f"{how['engine']}: the records of a resumed run differ"
        agree(held(whole), held(second), 0.0, f"{how['engine']}: a run resumed after round 2")


def one_traced_step_serves_all_rounds_and_values(make: Make) -> None:
    """What changes between rounds and every float field is passed to a step, never closed over."""
    tape = Tape()
    locals_ = (LOCAL, Local(SGD(0.3), clip=0.7, decay=0.03, l2=0.05))
    for change, lr, scale, local in zip((lambda v: v, other), (0.05, 0.03), (1.0, 0.8), locals_, strict=True):
        algorithm = Beginning(tape, inner=having(make(), change))
        # a full cohort in chunks of two: the same shapes again within a round
        plan = planner(algorithm, who=Given([EVERYONE]))
        s = simulation(algorithm, [plan], lr=lr, scale=scale, local=local, engine="vmap", chunk=2, compiled=tape)
        for r in range(2):
            try:
                s.keep(s.play())
            except AssertionError as error:
                raise AssertionError(f"round {r + 1}: {error}") from None
    assert tape.replays, "no local step was traced and replayed: the method never calls work.run or work.descend"


def local_training_leaves_the_server_alone(make: Make) -> None:
    """A round that is played and not kept changes no bit of the server or of any client's state."""
    for engine in ("loop", "vmap"):
        s = simulation(make(), engine=engine)
        for r in range(3):
            before = {k: v.clone() for k, v in held(s).items()}
            played = s.play()
            agree(before, held(s), 0.0, f"{engine}: a round that does not count yet, round {r + 1}")
            s.keep(played)


def packed_bytes_are_counted_bytes(make: Make) -> None:
    """The bytes of a record are those of the messages, packed."""
    posted = Posted(inner=make())
    s = simulation(posted)
    for r in range(3):
        posted.total[:] = [0, 0]
        record = go(s, 1)[0]
        counted = [record["bytes_down"], record["bytes_up"]]
        assert counted == posted.total, f"round {r + 1}: {counted} bytes down and up counted, {posted.total} packed"


def a_log_changes_no_bit(make: Make) -> None:
    """With numbers logged on both sides or without: the same run."""
    for how in ({"engine": "loop"}, {"engine": "vmap", "chunk": 3}):
        quiet, loud = simulation(make(), **how), simulation(Loud(inner=make()), [planner(make())], **how)
        records, logged = go(quiet, 2), go(loud, 2)
        assert [r.pop("round_again", None) for r in logged] == [0, 1], "cohort.log does not reach the record"
        clients = loud.play().records[0]["clients"]
        assert len(clients) == quiet.play().records[0]["record"]["cohort"], "work.log misses clients"
        assert all(c["length"] > 0 for c in clients), "work.log records other values"
        assert records == logged, f"{how['engine']}: a log changes the records"
        agree(held(quiet), held(loud), 0.0, f"{how['engine']}: a log")


def nothing_travels_and_the_steps_are_the_cohorts(make: Make) -> None:
    """Training in one place: no bytes, and as many steps as the cohort would take together."""
    s = simulation(make())
    for r, record in enumerate(go(s, 3)):
        sent = {k: record[k] for k in ("bytes_down", "bytes_up", "floats_down", "floats_up")}
        assert not any(sent.values()), f"round {r + 1}: {sent} although nothing is sent"
        plan = s.planners[0]
        steps, cohort = plan.round(r).steps.tolist(), plan.as_many_as.round(r).steps
        assert steps == [int(cohort.sum())], f"round {r + 1}: {steps} steps, the cohort would take {cohort.sum()}"


ALWAYS = (
    the_plain_loop_agrees_with_every_chunking,
    a_sweep_equals_each_experiment_alone,
    a_resumed_run_equals_one_left_alone,
    one_traced_step_serves_all_rounds_and_values,
    local_training_leaves_the_server_alone,
    a_log_changes_no_bit,
)
OF_CLIENTS = (
    the_order_of_clients_does_not_matter,
    ragged_steps_in_one_chunk_equal_each_client_alone,
    late_and_absent_clients_keep_their_state,
    an_upload_that_does_not_count_changes_nothing,
    packed_bytes_are_counted_bytes,
)
IN_ONE_PLACE = (nothing_travels_and_the_steps_are_the_cohorts,)


def checks(make: Make) -> tuple[Callable[[Make], None], ...]:
    """The checks that apply: those of clients where anything is sent."""
    return ALWAYS + (OF_CLIENTS if make().sends else IN_ONE_PLACE)
