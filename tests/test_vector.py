import pytest
import torch
import torch.nn.functional as F
from torch import nn

from undrift import suite
from undrift.algorithm import vectors
from undrift.algorithms import make
from undrift.gradients import Net, many_clients, one_client
from undrift.round import Simulation
from undrift.tasks import squared_error
from undrift.vector import Layout, load, parameters
from undrift.work import Batch, bare

F64 = torch.float64


class Tied(nn.Module):
    """An autoencoder: the decoder's weight is the encoder's."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.tanh(x @ self.encode.weight))


class Mixed(nn.Module):
    """A frozen layer, a buffer and a trainable layer."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.body.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.head(self.scale * self.body(x))


def test_split_and_join_are_inverse_and_views():
    layout = Layout.of(suite.Small())
    assert layout.names == ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    assert layout.size == sum(layout.sizes) == 43 and layout.offsets == [0, 20, 25, 40]
    v = torch.randn(43)
    parts = layout.split(v)
    assert [tuple(p.shape) for p in parts.values()] == [(5, 4), (5,), (3, 5), (3,)]
    assert torch.equal(layout.join(parts), v)
    parts["fc1.bias"].zero_()
    assert (v[20:25] == 0).all()
    many = layout.split(torch.randn(2, 7, 43))
    assert many["fc2.weight"].shape == (2, 7, 3, 5)
    with pytest.raises(KeyError, match=r"no parameter 'fc3': the model has fc1.weight, "):
        parts["fc3"]


def test_a_module_gives_and_takes_its_vector():
    a, b = suite.Small(), suite.Small()
    layout = Layout.of(a)
    x = parameters(a, layout, F64)
    assert x.dtype == F64 and x.shape == (43,)
    x0 = x.clone()
    with torch.no_grad():
        a.fc1.weight.zero_()
    assert torch.equal(x, x0)  # a copy
    load(b, layout, x)
    assert torch.equal(parameters(b, layout, F64), x)


def test_masks_and_pieces():
    layout = Layout.of(suite.Small())
    assert layout.mask("fc1*").nonzero().flatten().tolist() == list(range(25))
    assert layout.mask("*.bias").sum() == 8
    assert layout.mask("fc1.bias", "fc2.*").sum() == 23
    with pytest.raises(KeyError, match="no parameter fits head"):
        layout.mask("head*")
    for n in (1, 2, 5, 43):
        pieces = layout.pieces(n)
        assert len(pieces) == n and torch.equal(sum(p.int() for p in pieces), torch.ones(43, dtype=torch.int32))
        sizes = [int(p.sum()) for p in pieces]
        assert max(sizes) - min(sizes) <= 1


def batch_of(x, y):
    return Batch((x, y), torch.ones(x.shape[:-1], dtype=x.dtype))


def trained(module, x, y, engine):
    """The vector after five steps of two clients' own, and the module's tensors as they are."""
    net = Net(module, squared_error)
    layout = net.layout
    v = torch.stack([parameters(module, layout, F64)] * 2)
    for _ in range(5):
        if engine == "vmap":
            g, _ = many_clients(net)(bare, {}, v, batch_of(x, y))
        else:
            g = torch.stack([one_client(net)(bare, {}, v[i], batch_of(x[i], y[i]))[0] for i in range(2)])
        v = v - 0.1 * g
    return v


def by_torch(module, x, y):
    """The same five steps by PyTorch's own optimizer on the module itself."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("make_module, width, out", [(Tied, 5, 5), (Mixed, 4, 2)])
def test_tied_frozen_and_buffered_modules_train_as_in_torch(engine, make_module, width, out):
    torch.manual_seed(1)
    x, y = torch.randn(2, 6, width, dtype=F64), torch.randn(2, 6, out, dtype=F64)
    module = make_module().to(F64)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    v = trained(module, x, y, engine)
    after = module.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)  # nothing was written into the module
    for i in range(2):
        module.load_state_dict(before)
        by_torch(module, x[i], y[i])
        assert suite.gap(v[i], parameters(module, Layout.of(module), F64)) < 1e-12


def test_tied_weights_appear_once_and_frozen_ones_never():
    assert Layout.of(Tied()).names == ("encode.weight", "decode.bias")
    assert Layout.of(Mixed()).names == ("head.weight", "head.bias")


class Slope(nn.Module):
    """One parameter."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        return self.a * x[..., :1]


class Scalar(Slope):
    """One parameter without an axis."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.5))


@pytest.mark.parametrize("module", [Slope, Scalar])
@pytest.mark.parametrize("name", ["scaffold", "mime", "fedcm"])
def test_a_model_of_one_parameter_is_still_a_vector(module, name):
    net = Net(module().to(F64), lambda outputs, target: (outputs[..., 0] - target).square())
    assert net.layout.size == 1
    algorithm = make({"name": name})
    assert {"x", "dx"} <= vectors(algorithm, net.layout)
    x = parameters(net.module, net.layout, F64)
    plan = suite.planner(algorithm, size=1)
    a, b = (
        Simulation(algorithm, net, x, [plan], rate=lambda r: 0.1, engine=engine, chunk=3) for engine in ("loop", "vmap")
    )
    records = suite.go(a, 3)
    suite.go(b, 3)
    suite.agree(suite.held(a), suite.held(b), 1e-10, name)
    # Four clients, one float each for every vector that travels: as scalars they would count as bytes only.
    vectors_down = {"scaffold": 2, "mime": 2, "fedcm": 2}[name]
    vectors_up = {"scaffold": 2, "mime": 2, "fedcm": 1}[name]
    assert records[0]["floats_down"] == 4 * vectors_down and records[0]["floats_up"] == 4 * vectors_up
