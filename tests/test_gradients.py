import pytest
import torch
from torch import nn

from undrift import suite
from undrift.gradients import Net, many_clients, one_client, vmap_trouble
from undrift.modules import CounterDropout
from undrift.tasks import cross_entropy, squared_error
from undrift.vector import parameters
from undrift.work import Batch, bare

F64 = torch.float64


class Fine(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return torch.tanh(self.fc(x))


class Asks(Fine):
    """Reads a number out of a tensor."""

    def forward(self, x):
        return super().forward(x) * (1 + x.mean().item())


class Branches(Fine):
    """Goes where the data say."""

    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else 2 * y


class Slow(Fine):
    """Uses an operator that vmap serves one client at a time."""

    def forward(self, x):
        return super().forward(torch.renorm(x, 2, 0, 1.0))


class Forgetful(Fine):
    """Computes something else each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def one(x, dtype=torch.float32):
    return Batch((x.to(dtype), torch.ones(len(x), 2, dtype=dtype)), torch.ones(len(x), dtype=dtype))


def trouble(module):
    torch.manual_seed(0)
    net = Net(module, squared_error)
    return vmap_trouble(net, parameters(module, net.layout, torch.float32), one(torch.randn(3, 4)))


def test_a_module_that_vmap_batches_is_no_trouble():
    assert trouble(Fine()) is None
    assert trouble(nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2), nn.Flatten())) is None


@pytest.mark.parametrize("module", [Asks, Branches])
def test_a_module_that_vmap_cannot_batch_says_why(module):
    said = trouble(module())
    assert said is not None and "\n" not in said and "Error" in said


def test_a_module_of_the_slow_fallback_is_named():
    for _ in range(2):  # PyTorch might warn once only
        assert trouble(Slow()) == "no batching rule for aten::renorm"


def test_other_gradients_than_those_of_one_client_are_trouble():
    said = trouble(Forgetful())
    assert said is not None and said.startswith("its gradients differ from those of one client alone by")


def case(dtype=F64, clients=3, width=5):
    """Three clients, the second with a short batch."""
    torch.manual_seed(1)
    module = suite.Small().to(dtype)
    net = Net(module, cross_entropy)
    weight = torch.ones(clients, width, dtype=dtype)
    weight[1, 2:] = 0
    batch = Batch((torch.randn(clients, width, 4, dtype=dtype), torch.randint(0, 3, (clients, width))), weight)
    return net, torch.randn(clients, net.layout.size, dtype=dtype), batch


def row(batch, i):
    return Batch(tuple(t[i] for t in batch.samples), batch.weight[i])


def direct(net, y, batch):
    """The gradient by the module's own parameters, padding cut off."""
    n = int(batch.weight.sum())
    tensors = {k: v.clone().requires_grad_() for k, v in net.layout.split(y).items()}
    loss = cross_entropy(torch.func.functional_call(net.module, tensors, batch.samples[0][:n]), batch.samples[1][:n])
    loss.mean().backward()
    return net.layout.join({k: v.grad for k, v in tensors.items()}), loss.mean().detach().reshape(1)


def test_both_engines_give_the_gradient_of_the_mean_over_what_is_no_padding():
    net, y, batch = case()
    g, losses = many_clients(net)(bare, {}, y, batch)
    for i in range(3):
        wanted, loss = direct(net, y[i], row(batch, i))
        alone, its = one_client(net)(bare, {}, y[i], row(batch, i))
        assert suite.gap(g[i], wanted) < 1e-12 and suite.gap(alone, wanted) < 1e-12
        assert suite.gap(losses[i], loss) < 1e-12 and suite.gap(its, loss) < 1e-12


def test_an_experiment_axis_is_one_more_vmap():
    net, y, batch = case()
    pair = Batch(tuple(torch.stack([t, t.flip(0)]) for t in batch.samples), torch.stack([batch.weight] * 2))
    pair = pair._replace(weight=torch.stack([batch.weight, batch.weight.flip(0)]))
    g, losses = many_clients(net)(bare, {}, torch.stack([y, y.flip(0)]), pair)
    alone, its = many_clients(net)(bare, {}, y, batch)
    assert g.shape == (2, *y.shape) and losses.shape == (2, 3, 1)
    assert suite.gap(g[0], alone) < 1e-12 and suite.gap(g[1].flip(0), alone) < 1e-12
    assert suite.gap(losses[1].flip(0), its) < 1e-12


def test_a_row_of_padding_has_gradient_zero():
    net, y, batch = case()
    batch.weight[1] = 0
    g, losses = many_clients(net)(bare, {}, y, batch)
    assert (g[1] == 0).all() and losses[1] == 0


def test_vectors_reach_a_loss_as_one_clients():
    net, y, batch = case()
    shapes = []

    def losses(net, y, batch, pull, factor):
        shapes.append((tuple(y.shape), tuple(pull.shape), tuple(factor.shape)))
        return net.losses(y, batch) + factor * (y * pull).sum()

    pull = torch.randn_like(y)
    factor = torch.full((1,), 0.5, dtype=F64)
    g, raw = many_clients(net)(losses, {"pull": pull, "factor": factor}, y, batch)
    plain, said = many_clients(net)(bare, {}, y, batch)
    assert shapes[0] == ((43,), (43,), (1,))
    assert suite.gap(g, plain + 0.5 * pull) < 1e-12
    assert torch.equal(raw, said)  # what is reported is the bare loss


def test_dict_samples_reach_the_module_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, right, left):
            return self.fc(left - 2 * right)

    module = Named().to(F64)
    net = Net(module, squared_error)
    left, right, target = (torch.randn(2, 3, n, dtype=F64) for n in (2, 2, 1))
    batch = Batch({"left": left, "right": right, "target": target}, torch.ones(2, 3, dtype=F64))
    y = torch.stack([parameters(module, net.layout, F64)] * 2)
    g, loss = many_clients(net)(bare, {}, y, batch)
    for i in range(2):
        wanted = (module(right[i], left[i]) - target[i]).square().mean()
        assert suite.gap(loss[i], wanted.detach().reshape(1)) < 1e-12
        alone = Batch({k: v[i] for k, v in batch.samples.items()}, batch.weight[i])
        assert suite.gap(g[i], one_client(net)(bare, {}, y[i], alone)[0]) < 1e-12


def test_dropout_draws_for_each_client_from_its_counter():
    module = nn.Sequential(nn.Linear(4, 6), CounterDropout(0.5, 0), nn.Linear(6, 2)).to(F64).train()
    net = Net(module, squared_error)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=F64)
    counters = torch.tensor([[1, 2, 7, 0], [1, 2, 8, 0]])
    batch = Batch((x, torch.ones(2, 3, 2, dtype=F64)), torch.ones(2, 3, dtype=F64), counters)
    y = torch.stack([parameters(module, net.layout, F64)] * 2)
    g, _ = many_clients(net)(bare, {}, y, batch)
    for i in range(2):
        alone = Batch(tuple(t[i] for t in batch.samples), batch.weight[i], counters[i])
        assert suite.gap(g[i], one_client(net)(bare, {}, y[i], alone)[0]) < 1e-12
    same = batch._replace(samples=tuple(t[:1].expand_as(t) for t in batch.samples))
    g, _ = many_clients(net)(bare, {}, y, same)
    assert suite.gap(g[0], g[1]) > 1e-3  # the same data, another mask
