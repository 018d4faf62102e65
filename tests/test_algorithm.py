from dataclasses import dataclass, field

import pytest
import torch
from torch import zeros_like

from undrift import suite, wire
from undrift.algorithm import Algorithm, Around, Codec, Upload, chain, learn, said, stack, start, vectors
from undrift.algorithms import algorithms, make
from undrift.algorithms.control import ControlVariates
from undrift.algorithms.fedavg import Centralised, FedAvg
from undrift.algorithms.gel import GEL
from undrift.algorithms.mime import Mime
from undrift.algorithms.momentum import ClientMomentum
from undrift.algorithms.prox import Prox
from undrift.algorithms.server import Adaptive, Lookahead, ServerMomentum
from undrift.errors import BadInput
from undrift.gradients import Net
from undrift.tasks import cross_entropy
from undrift.vector import Layout
from undrift.work import Work

F64 = torch.float64
LAYOUT = Layout.of(suite.Small())


@dataclass(frozen=True)
class Rounded(Codec):
    """A codec that changes nothing."""

    def encode(self, info, name, leaf):
        return leaf


@dataclass(frozen=True)
class SecondVariates(Around):
    """Owns fields that control variates own as well."""

    def init(self, x):
        return {"c": zeros_like(x)}, {}

    def server(self, cohort, c, **rest):
        return self.inner.server(cohort, **rest) | {"c": c}

    def down(self, info, c, **rest):
        return self.inner.down(info, **rest)


@dataclass(frozen=True)
class Sends(Around):
    """Sends one more field under a given name and uses it up at the server."""

    name: str = "extra"

    def client(self, work, **rest):
        upload, mine = self.inner.client(work, **rest)
        return upload | {self.name: work.info.examples}, mine

    def server(self, cohort, **given):
        return self.inner.server(cohort, **{k: v for k, v in given.items() if k != self.name})


@dataclass(frozen=True)
class Heads(Around):
    """Asks for layers by name and for the class counts."""

    def init(self, x):
        return {"anchor": zeros_like(x)}, {}

    def client(self, work, anchor=None, **rest):
        head = work.info.layout.mask("fc2*").to(work.info.lr)
        upload, mine = self.inner.client(work.adjust(lambda step, y, grad, m: m * grad(y), m=head), **rest)
        return upload | {"counts": work.info.data["classes"]}, mine

    def server(self, cohort, anchor, counts, **rest):
        new = self.inner.server(cohort, **rest)
        return new | {"anchor": new["x"]}


@dataclass(frozen=True)
class Views(Around):
    """Asks for one tensor of the model."""

    def client(self, work, x, **rest):
        _ = work.info.layout.split(x)["fc1.bias"]
        return self.inner.client(work, x=x, **rest)


# -- stack ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts, both",
    [
        ((ControlVariates(), SecondVariates()), "SecondVariates cannot join ControlVariates: both own the name 'c'"),
        ((ServerMomentum(), ServerMomentum()), "ServerMomentum cannot join ServerMomentum: both own the name 'v'"),
        ((Sends("dc"), ControlVariates()), "ControlVariates cannot join Sends: both own the name 'dc'"),
        ((Mime(), Mime()), "Mime cannot join Mime: both own the name 'full'"),
        ((ClientMomentum(), Sends("slope")), "Sends cannot join ClientMomentum: both own the name 'slope'"),
    ],
)
def test_two_owners_of_a_name_are_refused(parts, both):
    with pytest.raises(BadInput) as error:
        stack(FedAvg(), *parts)
    assert str(error.value) == both


def test_the_bases_names_may_be_replaced():
    algorithm = stack(FedAvg(), Prox(), Prox(), ServerMomentum(), Lookahead(), ControlVariates(), GEL(), Rounded())
    assert [type(p).__name__ for p in chain(algorithm)] == [
        "Rounded", "GEL", "ControlVariates", "Lookahead", "ServerMomentum", "Prox", "Prox", "FedAvg",
    ]  # fmt: skip


def test_upload_parts_go_last():
    with pytest.raises(BadInput, match="^Prox after Rounded: parts that change what is uploaded go last$"):
        stack(FedAvg(), Rounded(), Prox())
    assert isinstance(stack(FedAvg(), Prox(), Rounded(), Rounded()), Upload)


def broken(**methods):
    return dataclass(frozen=True)(type("Broken", (Around,), methods))()


def several_lines():
    raise RuntimeError("one\ntwo\n\nthree")


def sending(value):
    """A part that sends `value`, whatever it is."""

    @dataclass(frozen=True)
    class Sending(Around):
        def client(self, work, **given):
            upload, mine = self.inner.client(work, **given)
            return upload | {"n": value}, mine

        def server(self, cohort, n, **given):
            return self.inner.server(cohort, **given)

    return Sending()


@pytest.mark.parametrize(
    "part, says",
    [
        (broken(client=lambda self, work, **given: 1 / 0), "Broken.client fails in a trial round: ZeroDivisionError"),
        (broken(server=lambda self, cohort, y, **given: {}), "Broken.server fails in a trial round: TypeError"),
        (broken(down=lambda self, info, **given: {"x": given["z"]}), "Broken.down fails in a trial round: KeyError"),
        (broken(init=lambda self, x: {}), "Broken.init fails in a trial round: ValueError"),
        (
            broken(server=lambda self, cohort, **given: {}),
            "Broken.server: the server state it returns lacks x",
        ),
        (
            broken(commit=lambda self, mine, **sent: {"memory": sent["dx"]}),
            "Broken.commit: the client state it returns adds memory, which `init` does not give",
        ),
        (
            broken(client=lambda self, work, **given: (self.inner.client(work, **given)[0], {"kept": given["x"]})),
            "Broken.client: the client state it returns adds kept, which `init` does not give",
        ),
        (broken(model=lambda self, **server: server["best"]), "Broken.model fails in a trial round: KeyError"),
        (broken(receive=lambda self, info, **up: up["dz"]), "Broken.receive fails in a trial round: KeyError"),
        (broken(survey=lambda self, work, **given: given["g"]), "Broken.survey fails in a trial round: KeyError"),
        (broken(client=lambda self, work, **given: several_lines()), "Broken.client fails in a trial round: "),
        (sending(3.0), "Sending: the field 'n' must be a tensor [..., n], n = 1 for a number, and it is float"),
        (sending(torch.tensor(3.0)), "Sending: the field 'n' must be a tensor [..., n], n = 1 for a number, and it is"),
    ],
)
def test_a_part_that_cannot_work_is_refused_in_one_sentence(part, says):
    with pytest.raises(BadInput) as error:
        stack(FedAvg(), part)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_every_shipped_pair_stacks_or_says_why():
    shipped = [Prox(), ServerMomentum(), Adaptive(), Lookahead(), ControlVariates(), ClientMomentum(), Mime(), GEL()]
    refused = []
    for one in shipped:
        for other in shipped:
            try:
                stack(FedAvg(), one, other)
            except BadInput as error:
                assert "both own the name" in str(error)
                refused.append((type(one).__name__, type(other).__name__))
    assert all(a == b for a, b in refused)  # only twice the same
    assert len(refused) == 6  # Prox and GEL own nothing


def test_what_parts_say_together():
    algorithm = stack(FedAvg(), Lookahead(), ControlVariates())
    assert said(algorithm, "over_all") == {"dc"} and said(algorithm, "always") == frozenset()
    server, mine = start(algorithm, torch.ones(4))
    assert server.keys() == {"x", "ahead", "c"} and mine.keys() == {"ci"}


def test_a_stack_on_what_sends_nothing_sends_nothing():
    assert stack(FedAvg(), Prox()).sends is True
    assert stack(Centralised(), Prox(), Lookahead()).sends is False


# -- which fields are vectors -------------------------------------------------------


def test_the_vectors_of_every_method_are_learnt():
    assert vectors(make({"name": "scaffold"}), LAYOUT) == {"x", "dx", "c", "ci", "dc"}
    assert vectors(make({"name": "mime"}), LAYOUT) == {"x", "dx", "full"}
    assert vectors(stack(FedAvg(), Sends()), LAYOUT) == {"x", "dx"}
    for name in algorithms.names():
        assert {"x", "dx"} <= vectors(make({"name": name}), LAYOUT)


@dataclass(frozen=True)
class FiveNumbers(Sends):
    """A side field that is by chance as wide as a layout."""

    width: int = 5

    def client(self, work, **rest):
        upload, mine = self.inner.client(work, **rest)
        return upload | {self.name: work.info.examples.expand(*work.info.examples.shape[:-1], self.width)}, mine


@pytest.mark.parametrize("width", [5, LAYOUT.size, 1])
def test_a_side_field_as_wide_as_the_model_is_no_vector(width):
    algorithm = stack(FedAvg(), FiveNumbers(width=width))
    assert vectors(algorithm, LAYOUT) == {"x", "dx"}
    assert vectors(algorithm, Layout(("w",), ((1,),))) == {"x", "dx"}
    assert vectors(algorithm, Layout(("w",), ((),))) == {"x", "dx"}


def counts():
    return {"classes": torch.ones(3)}


def test_layers_and_facts_are_asked_for_again_on_the_real_model():
    for part in (Heads(), Views()):
        algorithm = stack(FedAvg(), part)  # nothing is refused: the toy has no such layer
        assert "dx" in vectors(algorithm, LAYOUT, counts)
    assert vectors(stack(FedAvg(), Heads()), LAYOUT, counts) == {"x", "dx", "anchor"}  # counts: a side field


def test_layers_that_the_real_model_lacks_are_an_error_before_round_one():
    other = Layout(("conv", "bias"), ((4,), (2,)))
    with pytest.raises(BadInput, match="no parameter fits fc2.*: the model has conv, bias"):
        vectors(stack(FedAvg(), Heads()), other, counts)
    with pytest.raises(BadInput, match="no parameter 'fc1.bias': the model has conv, bias"):
        vectors(stack(FedAvg(), Views()), other, counts)


def test_a_collision_of_parts_that_wait_for_the_model_is_found_there():
    algorithm = stack(FedAvg(), Heads(), Heads())
    with pytest.raises(BadInput, match="Heads cannot join Heads: both own the name"):
        vectors(algorithm, LAYOUT, counts)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_part_that_asks_for_layers_and_facts_trains(engine):
    s = suite.simulation(stack(FedAvg(), Heads()), local=suite.Local(), engine=engine)
    x = s.model().clone()
    suite.go(s, 2)
    parts = LAYOUT.split(s.model() - x)
    assert (parts["fc1.weight"] == 0).all() and (parts["fc2.weight"] != 0).all()
    assert torch.equal(s.server["anchor"].reshape(-1), s.model())


def test_such_a_part_passes_the_suite():
    for check in suite.checks(lambda: stack(FedAvg(), Heads())):
        check(lambda: stack(FedAvg(), Heads()))


def test_a_history_is_a_tuple_of_vectors():
    algorithm = stack(FedAvg(), History())
    assert vectors(algorithm, LAYOUT) == {"x", "dx", "past"}
    s = suite.simulation(algorithm)
    models = [s.model()]
    for _ in range(3):
        suite.go(s, 1)
        models.append(s.model())
    for kept, model in zip(s.server["past"], models[-2::-1], strict=False):
        assert torch.equal(kept.reshape(-1), model)


@dataclass(frozen=True)
class History(Around):
    """The last three models."""

    always = frozenset({"past"})
    tau: int = 3

    def init(self, x):
        return {"past": (x,) * self.tau}, {}

    def down(self, info, past, **rest):
        return self.inner.down(info, **rest)

    def server(self, cohort, past, x, **rest):
        return self.inner.server(cohort, x=x, **rest) | {"past": (x, *past[:-1])}


def test_a_history_passes_the_suite():
    for check in suite.checks(lambda: stack(FedAvg(), History())):
        check(lambda: stack(FedAvg(), History()))


# -- smaller things -----------------------------------------------------------------


def test_codecs_encode_vectors_of_surveys_and_uploads_only():
    calls = []

    @dataclass(frozen=True)
    class Noting(Codec):
        names: list = field(default_factory=list)

        def encode(self, info, name, leaf):
            calls.append(name)
            return leaf

    suite.go(suite.simulation(stack(FedAvg(), Mime(), Sends(), Noting())), 1)
    assert set(calls) == {"full", "dx"}


def test_make_puts_parts_around_what_is_named():
    algorithm = make({"name": "scaffold", "parts": [{"part": "lookahead", "lam": 0.5}, {"part": "gel", "guesses": 2}]})
    assert [type(p).__name__ for p in chain(algorithm)] == ["GEL", "Lookahead", "ControlVariates", "FedAvg"]
    with pytest.raises(BadInput, match=r"algorithm\.option must be 1 or 2"):
        make({"name": "scaffold", "option": 3})
    with pytest.raises(BadInput, match="there is no algorithm"):
        make({"name": "fedavgg"})


def test_a_base_of_ones_own_needs_four_methods():
    class Own(Algorithm):
        def init(self, x):
            return {"x": x}, {}

        def down(self, info, x):
            return {"model": x}

        def client(self, work: Work, model):
            return {"y": work.descend(model)}, {}

        def server(self, cohort, x, y):
            return {"x": y}

    a, b = suite.simulation(stack(Own()), engine="vmap"), suite.simulation(FedAvg())
    suite.go(a, 2), suite.go(b, 2)
    assert suite.gap(a.model(), b.model()) < 1e-12


def test_learning_touches_no_real_tensor():
    net = Net(suite.Small(), cross_entropy)
    before = {k: v.clone() for k, v in net.module.state_dict().items()}
    learn(make({"name": "scaffold"}), net.layout)
    assert all(torch.equal(v, before[k]) for k, v in net.module.state_dict().items())
    assert wire.opened({"a": torch.ones(2)})["a"].tolist() == [1, 1]
