"""The shared suite over every registered method: a new one joins by being registered. And the suite itself: what each
check is there for is refused."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import zeros_like

from undrift import suite
from undrift.algorithm import Around, stack
from undrift.algorithms import algorithms, make
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.prox import Prox

# What the names' defaults do not show.
STACKS = {
    "scaffold, option 1": {"name": "scaffold", "option": 1},
    "fedcm, raw": {"name": "fedavg", "parts": [{"part": "client-momentum", "raw": 0.1}]},
    "scaffold with a guess ahead": {"name": "scaffold", "parts": [{"part": "lookahead"}, {"part": "gel", "target": 7}]},
    "mime on FedAdam": {"name": "fedadam", "parts": [{"part": "mime"}]},
}
METHODS = {name: {"name": name} for name in algorithms.names()} | STACKS
ROWS = [
    pytest.param(table, check, id=f"{label}-{check.__name__}")
    for label, table in METHODS.items()
    for check in suite.checks(lambda table=table: make(table))
]


@pytest.mark.parametrize("table, check", ROWS)
def test_every_method(table, check):
    check(lambda: make(table))


# -- the suite refuses what it is there to refuse ------------------------------------------


@dataclass(frozen=True)
class ClosesOverAVector(Around):
    """Prox whose anchor a compiled step would keep for ever."""

    def client(self, work, x, **rest):
        return self.inner.client(work.adjust(lambda step, y, grad: grad(y) + 0.1 * (y - x)), x=x, **rest)


@dataclass(frozen=True)
class ClosesOverANumber(Around):
    """Prox whose strength a sweep could not change."""

    mu: float = 0.1

    def client(self, work, x, **rest):
        work = work.adjust(lambda step, y, grad, x: grad(y) + self.mu * (y - x), x=x)
        return self.inner.client(work, x=x, **rest)


@dataclass(frozen=True)
class ClosesOverAFact(Around):
    """A rate that follows the round's."""

    def client(self, work, x, **rest):
        return self.inner.client(work.adjust(lambda step, y, grad: grad(y) * (1 - work.info.lr)), x=x, **rest)


@dataclass(frozen=True)
class LooksAtItsNeighbours(Around):
    """Subtracts the mean over whoever happens to run beside it."""

    def client(self, work, **given):
        def less(step, y, grad):
            g = grad(y)
            return g - 0.1 * (g.mean(0, keepdim=True) if g.dim() > 1 else g)

        return self.inner.client(work.adjust(less), **given)


@dataclass(frozen=True)
class CountsForItself(Around):
    """Keeps a state that no checkpoint knows."""

    rounds: list = field(default_factory=list)

    def server(self, cohort, x, dx, **rest):
        self.rounds.append(cohort.round)
        return self.inner.server(cohort, x=x, dx=dx / len(self.rounds), **rest)


@dataclass(frozen=True)
class WritesIntoTheServer(Around):
    """Trains in place."""

    def init(self, x):
        return {"v": zeros_like(x)}, {}

    def down(self, info, v, **rest):
        v += 1e-3
        return self.inner.down(info, **rest)

    def server(self, cohort, v, **rest):
        return self.inner.server(cohort, **rest) | {"v": v}


@dataclass(frozen=True)
class PadsBySteps(Around):
    """Depends on the slowest client of its chunk."""

    def client(self, work, **given):
        upload, mine = self.inner.client(work, **given)
        return {k: v / work.info.longest for k, v in upload.items()}, mine


@dataclass(frozen=True)
class RemembersTheRound(Around):
    """A client's state that moves without the client: read from a book of its own."""

    book: dict = field(default_factory=dict)

    def init(self, x):
        return {}, {"seen": zeros_like(x[..., :1])}

    def client(self, work, seen, **given):
        upload, mine = self.inner.client(work, **given)
        self.book["calls"] = self.book.get("calls", 0) + 1
        return upload, mine | {"seen": seen + self.book["calls"]}


@dataclass(frozen=True)
class SendsMore(Around):
    """Sends a side field beside the vectors."""

    def client(self, work, **given):
        upload, mine = self.inner.client(work, **given)
        return upload | {"more": work.info.examples.expand(*upload["dx"].shape[:-1], 1)}, mine

    def server(self, cohort, more, **given):
        return self.inner.server(cohort, **given)


@dataclass(frozen=True)
class WantsFiniteClients(Around):
    """Counts every upload, also one that is lost."""

    total: list = field(default_factory=lambda: [0.0])

    def receive(self, info, **upload):
        self.total[0] = self.total[0] + torch.nan_to_num(upload["dx"]).sum()
        return self.inner.receive(info, **upload)

    def server(self, cohort, dx, **rest):
        return self.inner.server(cohort, dx=dx + 1e-6 * self.total[0], **rest)


@pytest.mark.parametrize(
    "part, check, says",
    [
        (ClosesOverAVector, suite.one_traced_step_serves_all_rounds_and_values, "is closed over and not passed"),
        (ClosesOverANumber, suite.one_traced_step_serves_all_rounds_and_values, "is closed over and not passed"),
        (ClosesOverAFact, suite.one_traced_step_serves_all_rounds_and_values, "is closed over and not passed"),
        (LooksAtItsNeighbours, suite.the_plain_loop_agrees_with_every_chunking, "2 clients at once"),
        (LooksAtItsNeighbours, suite.the_order_of_clients_does_not_matter, "the cohort in reverse"),
        (LooksAtItsNeighbours, suite.ragged_steps_in_one_chunk_equal_each_client_alone, "1 to 6 steps side by side"),
        (PadsBySteps, suite.ragged_steps_in_one_chunk_equal_each_client_alone, "1 to 6 steps side by side"),
        (LooksAtItsNeighbours, suite.a_sweep_equals_each_experiment_alone, "experiment 1 of a sweep of two"),
        (CountsForItself, suite.a_resumed_run_equals_one_left_alone, "resumed"),
        (WritesIntoTheServer, suite.local_training_leaves_the_server_alone, "a round that does not count yet"),
        (RemembersTheRound, suite.the_order_of_clients_does_not_matter, "the cohort in reverse"),
        (WantsFiniteClients, suite.an_upload_that_does_not_count_changes_nothing, "a lost and a not finite"),
    ],
)
def test_what_a_check_is_there_for_is_refused(part, check, says):
    with pytest.raises(AssertionError) as error:
        check(lambda: stack(FedAvg(), part()))
    first = str(error.value).splitlines()[0]
    assert says in first, first


def test_a_field_that_is_sent_in_the_open_is_counted():
    suite.packed_bytes_are_counted_bytes(lambda: stack(FedAvg(), SendsMore()))


def test_uncounted_bytes_are_refused(monkeypatch):
    monkeypatch.setattr("undrift.round.Tally.sent", lambda *given: None)
    with pytest.raises(AssertionError, match=r"round 1: \[0, 0\] bytes down and up counted"):
        suite.packed_bytes_are_counted_bytes(FedAvg)


def test_a_log_that_matters_is_refused(monkeypatch):
    real = suite.Loud.client

    def louder(self, work, **given):
        upload, mine = real(self, work, **given)
        return {k: v * (1 + 1e-15) + 1e-12 for k, v in upload.items()}, mine

    monkeypatch.setattr(suite.Loud, "client", louder)
    with pytest.raises(AssertionError, match="a log changes the records|a log: "):
        suite.a_log_changes_no_bit(FedAvg)


def test_a_driver_that_loses_states_is_refused(monkeypatch):
    monkeypatch.setattr("undrift.cohort.States.age", lambda self, client, round: 1.0)
    with pytest.raises(AssertionError, match=r"round 1: client 0 has \(age, visited\) \(1.0, 1.0\)"):
        suite.late_and_absent_clients_keep_their_state(lambda: make({"name": "scaffold"}))


def test_a_method_that_stands_still_is_refused():
    still = replace(FedAvg(), solve=lambda work, x: x + 0 * work.descend(x))
    with pytest.raises(AssertionError, match="the model does not move in four rounds"):
        suite.the_plain_loop_agrees_with_every_chunking(lambda: still)


def test_what_sends_nothing_is_held_to_that():
    assert suite.nothing_travels_and_the_steps_are_the_cohorts in suite.checks(lambda: make({"name": "centralised"}))
    assert not set(suite.OF_CLIENTS) & set(suite.checks(lambda: make({"name": "centralised"})))
    assert set(suite.OF_CLIENTS) < set(suite.checks(lambda: make({"name": "fedavg"})))
    with pytest.raises(AssertionError, match="although nothing is sent"):
        suite.nothing_travels_and_the_steps_are_the_cohorts(lambda: FedAvg())


def test_the_problem_is_what_the_checks_need():
    plan = suite.planner(Prox())
    assert sorted(plan.effort.of(plan.source.sizes(range(10))).tolist()) == [1, 2, 2, 3, 3, 3, 4, 4, 5, 6]
    s = suite.simulation(FedAvg(), [suite.planner(FedAvg(), who=suite.Given([suite.EVERYONE]))])
    clipped = suite.simulation(FedAvg(), s.planners, local=replace(suite.LOCAL, clip=None))
    suite.go(s, 1), suite.go(clipped, 1)
    assert suite.gap(s.model(), clipped.model()) > 1e-4  # clipping is at work
