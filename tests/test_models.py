import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from undrift.errors import BadInput
from undrift.models import build, models
from undrift.modules import check_output
from undrift.tasks import default_task

torch.set_num_threads(1)

SMALL = {
    "logistic": ({}, (3, 4, 4)),
    "mlp": ({"hidden": [7, 5]}, (3, 4, 4)),
    "lenet": ({}, (1, 16, 17)),
    "resnet20": ({}, (3, 8, 8)),
    "resnet18": ({"groups": 4}, (1, 8, 8)),
    "char-lstm": ({"hidden": 6}, (5,)),
}


def made(name, shape, classes=10, seed=0, **options):
    return build({"name": name, **options}, shape=shape, classes=classes, seed=seed)


def inputs(name, shape, *lead):
    generator = torch.Generator().manual_seed(1)
    if name == "char-lstm":
        return torch.randint(0, 10, (*lead, *shape), generator=generator)
    return torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_every_model_is_tried_here():
    assert set(models.names()) == set(SMALL)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("logistic", (1, 28, 28), 10, 7_850),
        ("mlp", (1, 28, 28), 10, 50_890),
        ("resnet20", (3, 32, 32), 10, 269_722),  # Idelbayev's, whose BatchNorm has as many
        ("resnet18", (3, 32, 32), 10, 11_173_962),  # He et al. with a 3 x 3 stem
        ("char-lstm", (80,), 80, 819_920),
    ],
)
def test_number_of_parameters(name, shape, classes, parameters):
    assert count(made(name, shape, classes)) == parameters


def test_the_weights_of_lenet_are_those_of_fedbcgd_table_7():
    weights = [p.numel() for n, p in made("lenet", (3, 32, 32)).named_parameters() if n.endswith("weight")]
    assert weights == [4_800, 102_400, 614_400, 73_728, 1_920]


def test_char_lstm_is_the_one_of_adaptive_federated_optimization():
    """820,522 parameters for 90 characters, with one bias per gate where PyTorch keeps two that add up."""
    assert count(made("char-lstm", (80,), 90)) - 2 * 4 * 256 == 820_522


@pytest.mark.parametrize("name", SMALL)
def test_gradients_of_a_cohort_are_those_of_its_clients(name):
    options, shape = SMALL[name]
    module = made(name, shape, **options).double()
    x, target = inputs(name, shape, 3, 4), torch.arange(12).view(3, 4) % 10
    start = dict(module.named_parameters())
    clients = {n: torch.stack([p.detach() * (1 + 0.1 * i) for i in range(3)]) for n, p in start.items()}

    def loss(parameters, x, target):
        return F.cross_entropy(functional_call(module, parameters, (x,)), target)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback of vmap to one client at a time warns
        together = vmap(grad(loss))(clients, x, target)
    for i in range(3):
        alone = {n: p[i].clone().requires_grad_() for n, p in clients.items()}
        gradient = torch.autograd.grad(loss(alone, x[i], target[i]), list(alone.values()))
        for n, g in zip(alone, gradient, strict=True):
            assert (together[n][i] - g).abs().max() <= 1e-10 * g.abs().max().clamp(min=1e-6), n


@pytest.mark.parametrize("name", SMALL)
def test_equal_seeds_start_equal_and_others_do_not(name):
    options, shape = SMALL[name]
    a, b, other = (made(name, shape, seed=s, **options).state_dict() for s in (5, 5, 6))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not all(torch.equal(a[n], other[n]) for n in a)


@pytest.mark.parametrize("name", SMALL)
def test_a_sample_does_not_feel_the_others_and_fits_its_labels(name):
    options, shape = SMALL[name]
    module = made(name, shape, **options).double()
    x = inputs(name, shape, 3)
    assert torch.allclose(module(x)[1:2], module(x[1:2]), atol=1e-12)
    check_output(module, (x, torch.tensor([0, 9, 3])), default_task(10))


def test_char_lstm_reads_the_whole_text():
    module = made("char-lstm", (5,), hidden=6)
    x = torch.zeros(2, 5, dtype=torch.int64)
    x[1, 0] = 1
    out = module(x)
    assert out.shape == (2, 10)
    assert not torch.equal(out[0], out[1])


def test_resnet_shortcuts_without_parameters_pass_every_second_pixel():
    module = made("resnet20", (3, 8, 8))
    x = torch.randn(2, 16, 8, 8)
    y = module.blocks[3].shortcut(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


def test_lenet_pools_before_relu_without_changing_the_function():
    module = made("lenet", (3, 32, 32))
    x = torch.randn(2, 3, 32, 32)
    y = F.max_pool2d(F.relu(module.conv1(x)), 2)
    y = F.max_pool2d(F.relu(module.conv2(y)), 2).flatten(1)
    assert torch.equal(module.fc3(F.relu(module.fc2(F.relu(module.fc1(y))))), module(x))


@pytest.mark.parametrize(
    ("table", "shape", "key"),
    [
        ({"name": "lenet"}, (60,), "model.name"),
        ({"name": "lenet"}, (3, 15, 32), "model.name"),
        ({"name": "resnet18"}, (28, 28), "model.name"),
        ({"name": "mlp"}, [(3,), (4,)], "model.name"),
        ({"name": "mlp", "hidden": [0]}, (3,), "model.hidden"),
        ({"name": "mlp", "hidden": 5}, (3,), "model.hidden"),
        ({"name": "resnet20", "groups": 3}, (3, 8, 8), "model.groups"),
        ({"name": "char-lstm", "layers": 0}, (80,), "model.layers"),
        ({"name": "mlp", "hiden": [3]}, (3,), "model.hiden"),
        ({"name": "math:hypot"}, (3,), "model.name"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(table, shape, key):
    with pytest.raises(BadInput, match=f"^{key}") as refused:
        build(table, shape=shape, classes=10, seed=0)
    assert "\n" not in str(refused.value)


def test_a_factory_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "def net(shape, classes, width, drop=0.5):\n"
        "    return nn.Sequential(nn.Linear(shape[0], width), nn.Dropout(drop), nn.Linear(width, classes))\n\n\n"
        "def fixed():\n    return nn.Linear(4, 2)\n\n\n"
        "def nothing():\n    return 3\n"
    )

    def mine(name, **options):
        return build({"name": f"mine:{name}", **options}, shape=(4,), classes=3, seed=0, folder=tmp_path)

    net = mine("net", width=6)
    assert (net[0].weight.shape, net[2].weight.shape) == ((6, 4), (3, 6))
    assert mine("net", width=6, classes=7)[2].weight.shape == (7, 6)
    assert mine("fixed").weight.shape == (2, 4)
    with pytest.raises(BadInput, match="model.width is missing"):
        mine("net")
    with pytest.raises(BadInput, match=r"model\.name must make an nn\.Module"):
        mine("nothing")


def test_data_without_classes_get_one_output():
    assert build({"name": "mlp"}, shape=(4,), classes=None, seed=0)(torch.zeros(2, 4)).shape == (2, 1)


def test_a_live_module_is_copied():
    mine = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    built = build({"name": mine}, shape=(3,), classes=3, seed=0)
    assert isinstance(mine[1], nn.Dropout)
    assert built[0].weight is not mine[0].weight
    assert torch.equal(built[0].weight, mine[0].weight)
