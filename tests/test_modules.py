import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

from undrift.errors import BadInput, RunFailed
from undrift.modules import CounterDropout, check_output, draw_from, initial, prepare, to_group_norm
from undrift.rng import Stream, Use
from undrift.tasks import Task, default_task

torch.set_num_threads(1)


def counter(client=0, step=0):
    return torch.tensor([step * 7 + 1, 5, client, 0])


# -- initial ---------------------------------------------------------------------


def test_initial_repeats_and_leaves_the_global_generator_alone():
    def make():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.LSTM(4, 5), nn.Embedding(6, 7), nn.MultiheadAttention(8, 2), nn.Bilinear(2, 3, 4)
        )

    before = torch.get_rng_state()
    a, b, other = (initial(make, seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a[n], b[n]) for n in a)
    random = [n for n in a if a[n].unique().numel() > 1]
    assert len(random) > 10
    assert not any(torch.equal(a[n], other[n]) for n in random)


def test_initial_does_not_depend_on_the_global_generator():
    def make():
        module = nn.Linear(4, 4)
        nn.init.sparse_(module.weight, 0.5)  # a permutation, which counters do not draw
        module.noise = nn.Parameter(torch.randn(3) + torch.rand(3) + torch.empty(3).bernoulli_(0.5))
        return module

    torch.manual_seed(1)
    a = initial(make, 0).state_dict()
    torch.manual_seed(2)
    b = initial(make, 0).state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_initial_draws_its_numbers_from_counters():
    weight = initial(lambda: nn.Embedding(4, 3), 9).weight
    expected = Stream(9, Use.MODEL, 1).normal(12).reshape(4, 3).astype(np.float32)
    assert np.array_equal(weight.detach().numpy(), expected)


def test_initial_has_pytorchs_distributions():
    layer = initial(lambda: nn.Linear(100, 400), 0)
    bound = 1 / 10  # kaiming_uniform with a = sqrt(5): 1 / sqrt(fan in)
    for values in (layer.weight, layer.bias):
        assert values.abs().max() <= bound
        assert values.abs().max() > 0.98 * bound
    w = layer.weight.detach().double().flatten()
    assert abs(w.mean()) < 5 * bound / (3 * len(w)) ** 0.5
    assert abs(w.var() / (bound**2 / 3) - 1) < 0.03
    e = initial(lambda: nn.Embedding(200, 200), 0).weight.detach().double()
    assert abs(e.mean()) < 0.025
    assert abs(e.std() - 1) < 0.02
    assert 0.67 < (e.abs() < 1).double().mean() < 0.695
    t = initial(lambda: nn.init.trunc_normal_(torch.empty(9999), 2.0, 0.5, 1.5, 2.5), 0)
    assert 1.5 <= t.min() < t.max() <= 2.5


def test_layers_of_one_shape_start_differently():
    net = initial(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), 0)
    assert not torch.equal(net[0].weight, net[1].weight)


# -- norms -----------------------------------------------------------------------


def normed():
    shared = nn.BatchNorm2d(6)
    return nn.Sequential(nn.Conv2d(3, 6, 3), shared, nn.Sequential(nn.ReLU(), shared), nn.InstanceNorm2d(6))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.LazyBatchNorm2d(),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.BatchNorm1d(4, track_running_stats=False),
    ],
)
def test_running_statistics_are_refused_with_both_ways_out(layer):
    with pytest.raises(BadInput) as refused:
        prepare(nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer)))
    for words in ("model.name", "1.0", type(layer).__name__, "undrift.to_group_norm", 'batchnorm = "frozen"'):
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm2d(6), (5, 6, 4, 4)),
        (nn.BatchNorm1d(6, affine=False), (5, 6)),
        (nn.InstanceNorm2d(6, affine=True, track_running_stats=True), (5, 6, 4, 4)),
    ],
)
def test_frozen_norms_are_what_evaluation_is(norm, shape):
    x = torch.randn(shape)
    norm(x * 3 + 1)  # statistics of its own
    names, expected = list(norm.state_dict()), norm.eval()(x)
    frozen = prepare(nn.Sequential(norm.train(), nn.Linear(shape[-1], 1)), "frozen")
    assert torch.allclose(frozen.train()[0](x), expected, atol=1e-6)
    assert torch.allclose(frozen.eval()[0](x), expected, atol=1e-6)
    assert list(frozen[0].state_dict()) == names
    assert {n for n, _ in frozen[0].named_parameters()} == ({"weight", "bias"} if norm.affine else set())


def test_frozen_norms_train_and_go_through_vmap():
    net = prepare(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)), "frozen"
    ).double()
    compare_vmap_with_loop(net, torch.randn(3, 2, 1, 5, 5, dtype=torch.float64))


def test_frozen_needs_statistics_and_a_known_word():
    with pytest.raises(BadInput, match=r'model\.batchnorm = "frozen" needs statistics'):
        prepare(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "frozen")
    with pytest.raises(BadInput, match=r"model\.batchnorm must be"):
        prepare(nn.Linear(3, 3), "freeze")


def test_to_group_norm_keeps_weights_and_sharing():
    net = normed()
    with torch.no_grad():
        net[1].weight.uniform_()
    net[1].bias.requires_grad_(False)
    weight = net[1].weight
    net = to_group_norm(net)
    assert isinstance(net[1], nn.GroupNorm)
    assert net[1] is net[2][1]
    assert net[1].weight is weight
    assert not net[1].bias.requires_grad
    assert net[1].num_groups == 2
    assert isinstance(net[3], nn.InstanceNorm2d)  # keeps no statistics, so it stays
    x = torch.randn(2, 6, 4, 4)
    assert torch.equal(net[1](x), F.group_norm(x, 2, weight, net[1].bias))


@given(st.integers(1, 40), st.integers(1, 50))
def test_to_group_norm_takes_the_largest_divisor_up_to_groups(channels, groups):
    norm = to_group_norm(nn.BatchNorm2d(channels), groups)
    divisors = [d for d in range(1, channels + 1) if channels % d == 0]
    assert norm.num_groups == max(d for d in divisors if d <= groups)


def test_batchnorm_group_converts_and_an_instance_norm_keeps_its_function():
    assert isinstance(prepare(normed(), "group")[2][1], nn.GroupNorm)
    norm, x = nn.InstanceNorm2d(6, affine=True, track_running_stats=True), torch.randn(3, 6, 5, 5)
    assert torch.allclose(prepare(norm, "group")(x), norm.train()(x), atol=1e-5)
    with pytest.raises(BadInput, match="LazyBatchNorm2d"):
        to_group_norm(nn.LazyBatchNorm2d())
    with pytest.raises(BadInput, match="groups"):
        to_group_norm(nn.BatchNorm2d(4), 0)


# -- what else is refused --------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "advice"),
    [
        (nn.AlphaDropout(), "nn.Dropout"),
        (nn.FeatureAlphaDropout(), "nn.Dropout"),
        (nn.RReLU(), "nn.LeakyReLU"),
        (nn.FractionalMaxPool2d(2, output_size=2), "nn.MaxPool2d"),
        (nn.GRU(4, 4, 2, dropout=0.1), "dropout = 0"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "dropout = 0"),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1), "dropout = 0"),
    ],
)
def test_other_random_modules_are_refused_with_advice(layer, advice):
    with pytest.raises(BadInput, match=r"^model\.name: layer 1") as refused:
        prepare(nn.Sequential(nn.Linear(4, 4), layer))
    assert advice in str(refused.value)


def test_modules_that_cannot_train_are_refused():
    with pytest.raises(BadInput, match="nothing to train"):
        prepare(nn.Sequential(nn.ReLU()))
    with pytest.raises(BadInput, match="nothing to train"):
        prepare(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(BadInput, match="1.weight, 1.bias wait for a first input"):
        prepare(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))
    broken = nn.Linear(2, 2)
    with torch.no_grad():
        broken.bias[0] = float("nan")
    with pytest.raises(BadInput, match="bias begin with values that are not finite"):
        prepare(broken)


def test_what_is_fine_stays_as_it_is():
    net = nn.Sequential(nn.LSTM(3, 3, 2), nn.MultiheadAttention(4, 2), nn.LayerNorm(3), nn.GroupNorm(1, 3))
    before = dict(net.named_modules())
    assert dict(prepare(net).named_modules()) == before


# -- dropout ---------------------------------------------------------------------


def dropping():
    return prepare(
        nn.Sequential(nn.Conv2d(1, 6, 3), nn.Dropout2d(0.4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(54, 2))
    )


def compare_vmap_with_loop(net, x):
    """Gradients of clients [C, B, ...] under vmap and one at a time; they see counters of their own."""
    counters = torch.stack([counter(client=i) for i in range(len(x))])
    start = {n: p.detach() for n, p in net.named_parameters()}

    def loss(parameters, x, counter):
        draw_from(net, counter)
        return functional_call(net, parameters, (x,)).square().sum()

    together = vmap(grad(loss), in_dims=(None, 0, 0))(start, x, counters)
    for i in range(len(x)):
        alone = {n: p.clone().requires_grad_() for n, p in start.items()}
        gradient = torch.autograd.grad(loss(alone, x[i], counters[i]), list(alone.values()))
        for n, g in zip(alone, gradient, strict=True):
            assert (together[n][i] - g).abs().max() <= 1e-10 * g.abs().max(), n
    draw_from(net, None)


def test_dropout_under_vmap_is_dropout_alone():
    compare_vmap_with_loop(dropping().double(), torch.randn(3, 4, 1, 5, 5, dtype=torch.float64))


def test_dropout_masks_are_the_same_bits_under_vmap_and_nested():
    drop = CounterDropout(0.5, 2)
    x = torch.ones(4, 3)
    counters = torch.stack([counter(client=i) for i in range(6)]).view(2, 3, 4)

    def mask(c):
        draw_from(drop, c)
        return drop(x)

    nested = vmap(vmap(mask))(counters)
    for i in range(2):
        for j in range(3):
            assert torch.equal(nested[i, j], mask(counters[i, j]))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 7), st.sampled_from([None, 2]))
def test_a_samples_mask_does_not_depend_on_how_many_follow(few, more, width, axes):
    drop = CounterDropout(0.5, 1, axes)
    x = torch.ones(few + more, width, 3)
    draw_from(drop, counter())
    long = drop(x)
    draw_from(drop, counter())
    assert torch.equal(drop(x[:few]), long[:few])


def test_masks_differ_by_client_key_layer_and_pass_and_not_by_precision():
    x, drop, other = torch.ones(8, 16), CounterDropout(0.5, 0), CounterDropout(0.5, 1)
    draw_from(drop, counter())
    draw_from(other, counter())
    first, second = drop(x), drop(x)
    assert not torch.equal(first, second)  # the same layer again in one pass
    assert not torch.equal(first, other(x))
    for c in (counter(client=1), counter(step=1), torch.tensor([1, 6, 0, 0]), torch.tensor([1, 5, 0, 1])):
        draw_from(drop, c)
        assert not torch.equal(first, drop(x))
    draw_from(drop, counter())
    assert torch.equal(first.double(), drop(x.double()))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_drops_the_share_it_says_and_keeps_the_mean(p):
    drop = CounterDropout(p, 0)
    draw_from(drop, counter())
    x = torch.full((100, 400), 2.0)
    out = drop(x)
    assert abs((out == 0).float().mean() - p) < 0.01
    assert torch.allclose(out[out != 0], torch.tensor(2 / (1 - p) if p < 1 else 0.0))


def test_channel_dropout_drops_whole_channels():
    drop = prepare(nn.Sequential(nn.Linear(1, 1), nn.Dropout2d(0.5)))[1]
    draw_from(drop, counter())
    out = drop(torch.ones(10, 12, 3, 3)).flatten(2)
    assert (out.amax(-1) == out.amin(-1)).all()
    assert 0.3 < (out[..., 0] == 0).float().mean() < 0.7


def test_dropout_is_off_in_evaluation_and_without_a_counter():
    net, x = dropping(), torch.randn(2, 1, 5, 5)
    undropped = net(x)
    draw_from(net, counter())
    assert not torch.equal(net(x), undropped)
    assert torch.equal(net.eval()(x), undropped)
    draw_from(net.train(), None)
    assert torch.equal(net(x), undropped)


def test_every_plain_dropout_becomes_a_numbered_one():
    twice = nn.Dropout(0.2)
    net = nn.Sequential(nn.Linear(2, 2), twice, nn.Dropout1d(0.3), nn.Dropout3d(0.1), twice)
    names = list(net.state_dict())
    net = prepare(net)
    assert [(m.p, m.number, m.axes) for m in net[1:4]] == [(0.2, 0, None), (0.3, 1, 2), (0.1, 2, 2)]
    assert net[4] is net[1]
    assert list(net.state_dict()) == names
    assert type(prepare(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)).dropout1) is CounterDropout


def test_a_layer_keeps_its_mode():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    assert not prepare(net)[1].training


# -- does it fit the data? --------------------------------------------------------

LABELS = torch.tensor([0, 2, 1])


@pytest.mark.parametrize(
    ("module", "samples", "task", "words"),
    [
        (nn.Linear(4, 3), (torch.zeros(3, 5), LABELS), default_task(3), "model.name: .* inputs of shape .5.: "),
        (nn.Linear(4, 2), (torch.zeros(3, 4), LABELS), default_task(3), "model.name: .* 2 outputs, .* it needs 3"),
        (nn.Linear(4, 3), (torch.zeros(3, 4), LABELS - 1), default_task(3), "task.loss: .* count from 0, .* -1"),
        (nn.Linear(4, 3), (torch.zeros(3, 4), LABELS / 2), default_task(3), "task.loss: .* not whole"),
        (nn.Linear(4, 3), (torch.zeros(3, 4), torch.zeros(3, 2, dtype=int)), default_task(3), "model.name: .*classes"),
        (nn.Linear(4, 3), (torch.zeros(3, 4), torch.zeros(3, 2)), default_task(None), "model.name: .*.3. and .2."),
        (nn.LSTM(4, 3), (torch.zeros(3, 4), LABELS), default_task(3), "model.name: .* one tensor, .* tuple"),
        (nn.Linear(4, 3), {"a": torch.zeros(3, 4), "target": LABELS}, default_task(3), "model.name: .* inputs"),
        (
            nn.Linear(4, 1),
            (torch.zeros(3, 4), LABELS),
            Task.make({"loss": "binary-cross-entropy"}),
            "task.loss: .* from 0 to 1",
        ),
        (nn.Linear(4, 1), (torch.zeros(3, 4), LABELS), Task(lambda o, t: o.mean()), "task.loss must return one number"),
    ],
)
def test_what_does_not_fit_the_data_is_one_sentence(module, samples, task, words):
    with pytest.raises(BadInput, match=words) as refused:
        check_output(module, samples, task)
    assert "\n" not in str(refused.value)


def test_a_users_own_loss_that_fails_is_shown_with_its_line():
    with pytest.raises(RunFailed, match=r"task: a loss or metric failed at .*test_modules.py, line \d+, `.*o @ o"):
        check_output(nn.Linear(4, 1), (torch.zeros(3, 4), LABELS), Task(lambda o, t: o @ o))


def test_what_fits_passes_and_nothing_is_changed():
    net, named = dropping(), nn.Linear(4, 3)
    state, before = {n: t.clone() for n, t in net.state_dict().items()}, torch.get_rng_state()
    check_output(net, (torch.zeros(3, 1, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 1])), default_task(2))
    check_output(named, {"input": torch.zeros(3, 4), "target": LABELS}, default_task(3))
    assert net.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(t, state[n]) for n, t in net.state_dict().items())


class Noisy(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return super().forward(x)


def test_hidden_draws_and_buffers_that_move_are_found():
    with pytest.raises(BadInput, match="draws random numbers of its own"):
        check_output(Noisy(4, 3), (torch.zeros(3, 4), LABELS), default_task(3))
    net = Counting(4, 3)
    with pytest.raises(BadInput, match="seen change while the module trains"):
        check_output(net, (torch.zeros(3, 4), LABELS), default_task(3))
    assert net.seen == 0
