"""The base loop, on gradients that one can follow by hand."""

import math
from dataclasses import replace

import pytest
import torch

from undrift import suite
from undrift.gradients import Net, many_clients, one_client
from undrift.optim import SGD, Adam, Optimizer
from undrift.vector import Layout
from undrift.work import Batch, Info, Local, Oracle, Work

F64 = torch.float64
PLAIN = Local()
LAYOUT = Layout(("a", "b"), ((2,), (1,)))
CENTRE = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
CURVE = torch.tensor([1.0, 2.0, 0.5], dtype=F64)
X = torch.tensor([0.3, 0.1, -0.2], dtype=F64)


def number(value):
    return torch.full((1,), float(value), dtype=F64)


def info(steps=4, lr=0.1, local=PLAIN, **changes):
    one = number(1)
    steps = torch.as_tensor(steps, dtype=F64)
    steps = steps.reshape(*steps.shape, 1)
    out = Info(
        round=0, steps=steps, longest=int(steps.max()), shortest=int(steps.min()), lr=number(lr), age=one,
        visited=one, examples=one, weight=one, layout=LAYOUT, local=local,
    )  # fmt: skip
    return replace(out, **changes)


def work(steps=4, lr=0.1, local=PLAIN, drift=0.0):
    """The gradient of 0.5 (y - CENTRE)' diag(CURVE) (y - CENTRE), plus drift k in batch k."""

    def gradient(losses, vectors, y, batch):
        g = CURVE * (y - CENTRE) + batch.samples[0]
        return g, 0.5 * (CURVE * (y - CENTRE) ** 2).sum(-1, keepdim=True)

    def batch(k):
        return Batch((number(drift * k),), number(1))

    def full():
        return [(Batch((number(0.0),), number(2)), 2), (Batch((number(3.0),), number(1)), 1)]

    return Work(info(steps, lr, local), Oracle(gradient, batch, lambda k: 10 + k, full))


def raw(y, k=0, drift=0.0):
    return CURVE * (y - CENTRE) + drift * k


# -- the base loop --------------------------------------------------------------


def test_plain_steps():
    y = X
    for k in range(4):
        y = y - 0.1 * raw(y, k, 0.3)
    assert suite.gap(work(drift=0.3).descend(X), y) < 1e-14


def test_the_order_is_correction_clip_decay_momentum():
    local = Local(SGD(0.5), clip=0.7, decay=0.2, l2=0.05)
    c = torch.tensor([0.4, -0.3, 0.2], dtype=F64)
    done = work(local=local).adjust(lambda step, y, grad, c: grad(y) + c, c=c).descend(X)
    y, buffer = X, torch.zeros(3, dtype=F64)
    for _ in range(4):
        v = raw(y) + 0.05 * y + c
        v = v * min(1.0, 0.7 / float(v.norm()))
        buffer = 0.5 * buffer + v + 0.2 * y
        y = y - 0.1 * buffer
    assert suite.gap(done, y) < 1e-14
    for off in ({"clip": None}, {"decay": 0.0}, {"l2": 0.0}, {"optimizer": SGD()}):  # each of them mattered
        without = work(local=replace(local, **off)).adjust(lambda step, y, grad, c: grad(y) + c, c=c).descend(X)
        assert suite.gap(without, y) > 1e-3


def test_adam_without_bias_correction():
    done = work(local=Local(Adam(0.8, 0.95, 1e-3))).descend(X)
    y, m, s = X, 0.0, 0.0
    for _ in range(4):
        g = raw(y)
        m, s = 0.8 * m + 0.2 * g, 0.95 * s + 0.05 * g**2
        y = y - 0.1 * m / (s.sqrt() + 1e-3)
    assert suite.gap(done, y) < 1e-14


def test_a_zero_gradient_is_not_clipped_into_nan():
    at_rest = work(local=Local(clip=0.5)).descend(CENTRE)
    assert torch.equal(at_rest, CENTRE)


@pytest.mark.parametrize("optimizer", [SGD(), SGD(0.9), SGD(1.0), Adam(eps=0.01)])
def test_a_row_that_has_finished_keeps_its_carry(optimizer):
    local = Local(optimizer, clip=0.8, decay=0.1)
    w = work([1, 4, 2], local=local, drift=0.2)
    x = torch.stack([X, X, X])
    together = w.descend(x)
    for row, k in zip(together, (1, 4, 2), strict=True):
        assert suite.gap(row, work(k, local=local, drift=0.2).descend(X)) < 1e-14


# -- adjust, watch, objective, log ---------------------------------------------------


def test_the_outermost_part_is_nearest_to_the_raw_gradient():
    seen = []

    def noted(name, factor):
        def f(step, y, grad):
            g = factor * grad(y)
            seen.append(name)
            return g

        return f

    w = work(1).adjust(noted("outer", 2.0)).adjust(lambda step, y, grad: grad(y) + 1)
    assert suite.gap(w.descend(X), X - 0.1 * (2 * raw(X) + 1)) < 1e-14
    assert seen == ["outer"]


def test_grad_is_the_chain_below_at_any_point():
    z = CENTRE + 1
    w = work(1).adjust(lambda step, y, grad: 3 * grad(y))
    w = w.adjust(lambda step, y, grad, z: grad(y) - grad(z), z=z)
    assert suite.gap(w.descend(X), X - 0.1 * 3 * (raw(X) - raw(z))) < 1e-14
    assert w.book.gradients == 2 * 10  # two gradients of the ten samples of batch 0


def test_numbers_are_passed_as_tensors():
    kinds = []
    w = work(1).adjust(lambda step, y, grad, a: kinds.append(type(a)) or a * grad(y), a=0.5)
    w.descend(X)
    assert kinds == [torch.Tensor]


def test_watch_is_the_mean_of_what_passes_at_the_points_visited():
    w = work(3, drift=0.4).adjust(lambda step, y, grad: grad(y) + 1)
    w, below = w.watch()
    w = w.adjust(lambda step, y, grad: 2 * grad(y))
    w, above = w.watch()
    w.descend(X)
    y, gradients = X, []
    for k in range(3):
        gradients.append(raw(y, k, 0.4) + 1)
        y = y - 0.1 * 2 * gradients[-1]
    mean = torch.stack(gradients).mean(0)
    assert suite.gap(below.value, mean) < 1e-14
    assert suite.gap(above.value, 2 * mean) < 1e-14


def test_watch_means_over_the_steps_of_each_row():
    w, seen = work([1, 3]).watch()
    w.descend(torch.stack([X, X]))
    for row, k in zip(seen.value, (1, 3), strict=True):
        alone, one = work(k).watch()
        alone.descend(X)
        assert suite.gap(row, one.value) < 1e-14


def test_watch_notes_the_first_gradient_of_a_step():
    w, seen = work(1).watch()
    w.adjust(lambda step, y, grad: grad(y) + grad(y + 1)).descend(X)
    assert suite.gap(seen.value, raw(X)) < 1e-14


def test_full_grad_weighs_its_pieces_and_counts_them():
    w = work(local=Local(l2=0.3))
    assert suite.gap(w.full_grad(X), raw(X) + 3.0 * 1 / 3 + 0.3 * X) < 1e-14
    assert w.book.gradients == 3


def test_gradients_count_the_samples_of_each_step():
    w = work(3)
    w.descend(X)
    assert w.book.gradients == 10 + 11 + 12


def test_the_loss_and_the_move_are_noted():
    w = work(2)
    y = w.descend(X)
    between = X - 0.1 * raw(X)
    losses = [0.5 * (CURVE * (p - CENTRE) ** 2).sum() for p in (X, between)]
    assert suite.gap(w.book.loss, sum(losses).reshape(1)) < 1e-14
    assert torch.equal(w.book.move, y - X)


def test_log_keeps_numbers_and_tensors():
    w = work()
    w.log("five", 5)
    w.log("rows", torch.ones(3, 1))
    assert w.book.logged["five"].tolist() == [5.0] and w.book.logged["rows"].shape == (3, 1)


def test_run_is_a_loop_of_ones_own():
    w = work(3)
    (y,) = w.run(lambda step, y, a: (y - a * step.lr * step.grad(y),), X, a=2.0)
    assert suite.gap(y, work(3, lr=0.2).descend(X)) < 1e-14


def line():
    """One linear layer on two samples of two clients, and their losses."""
    module = torch.nn.Linear(2, 1, bias=False).to(F64)
    net = Net(module, lambda outputs, target: (outputs[..., 0] - target).square())
    x, y = torch.randn(2, 3, 2, dtype=F64), torch.randn(2, 3, dtype=F64)
    weight = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=F64)  # the first client has two samples
    return net, Batch((x, y), weight)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_objectives_chain_and_the_raw_loss_is_reported(engine):
    torch.manual_seed(0)
    net, both = line()
    point = torch.randn(2, 2, dtype=F64)
    pull = torch.tensor([[0.5, -1.0], [0.2, 0.3]], dtype=F64)

    def objective(net, y, batch, loss, pull, factor):
        return factor * loss(y, batch) + (y * pull).sum()

    def squared(net, y, batch, loss):
        return loss(y, batch) ** 2

    for i in range(2):
        if engine == "vmap":
            y, batch, given = point, both, pull
            gradient = many_clients(net)
        else:
            y, given = point[i], pull[i]
            batch = Batch(tuple(t[i] for t in both.samples), both.weight[i])
            gradient = one_client(net)
        oracle = Oracle(gradient, lambda k, b=batch: b, lambda k: 1, list)
        w = Work(info([1, 1] if engine == "vmap" else 1), oracle)
        w = w.objective(objective, pull=given, factor=3.0).objective(squared)
        moved = w.descend(y)
        (inputs, target), n = (t[i] for t in both.samples), both.weight[i]
        at = point[i].clone().requires_grad_()
        losses = (inputs @ at - target) ** 2
        whole = (((3 * losses + (at * pull[i]).sum()) ** 2) * n).sum() / n.sum()
        (g,) = torch.autograd.grad(whole, at)
        assert suite.gap(moved[i] if engine == "vmap" else moved, point[i] - 0.1 * g) < 1e-12
        reported = w.book.loss[i] if engine == "vmap" else w.book.loss
        assert suite.gap(reported, ((losses * n).sum() / n.sum()).detach().reshape(1)) < 1e-12


def test_two_parts_cannot_pass_one_name_to_the_objective():
    w = work().objective(lambda net, y, batch, loss, pull: loss(y, batch), pull=X)
    with pytest.raises(TypeError, match="two parts pass pull to `objective`"):
        w.objective(lambda net, y, batch, loss, pull: loss(y, batch), pull=X)


# -- effort and guesses ----------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("guesses", [0, 3])
def test_effort_is_the_way_under_unit_gradients(rho, guesses):
    steps = [1, 3, 4]
    found = info(steps, local=Local(SGD(rho), guesses=guesses)).effort
    for row, k in zip(found, steps, strict=True):
        y, buffer = 0.0, 0.0
        for j in range(k + guesses):
            buffer = rho * buffer + (1.0 if j < k else 0.0)
            y += buffer if j < k or rho else 0.0
        assert float(row) == pytest.approx(y, rel=1e-14)


def test_effort_without_momentum_is_the_number_of_steps():
    assert torch.equal(info([2, 5]).effort, torch.tensor([[2.0], [5.0]], dtype=F64))


@pytest.mark.parametrize("rho", [0.9, 1.0, torch.tensor([[0.9], [0.5], [1.0], [0.2]], dtype=F64)])
def test_a_guess_of_sgd_is_its_steps_with_gradient_zero(rho):
    torch.manual_seed(0)
    v, n = torch.rand(4, 3, dtype=F64), torch.tensor([[0.0], [1.0], [3.0], [7.0]], dtype=F64)
    closed = SGD(rho).guess(0.1, n, 7, 0, v)
    assert suite.gap(closed, Optimizer.guess(SGD(rho), 0.1, n, 7, 0, v)) < 1e-14


def test_guesses_for_ever_and_up_to_a_target():
    v = torch.ones(3, dtype=F64)
    assert suite.gap(SGD(0.9).guess(0.1, math.inf, math.inf, 0, v), -0.1 * 9 * v) < 1e-13
    with pytest.raises(ValueError, match="Adam cannot guess for ever"):
        Adam().guess(0.1, math.inf, math.inf, 0, v, v)
    local = Local(SGD(0.5), target=3)
    short, enough = (work(k, local=local).descend(X) for k in (2, 3))
    assert suite.gap(enough, work(3, local=Local(SGD(0.5))).descend(X)) < 1e-14
    y, buffer = X, 0.0
    for k in range(3):
        buffer = 0.5 * buffer + (raw(y) if k < 2 else 0.0)
        y = y - 0.1 * buffer
    assert suite.gap(short, y) < 1e-14


def test_a_guess_counts_in_the_move():
    w = work(2, local=Local(SGD(0.5), guesses=4))
    y = w.descend(X)
    assert torch.equal(w.book.move, y - X)
