"""A run opened again: its records, its model as a plain module, the state_dict that is taken away."""

import json

import pytest
import torch
from running import refused
from safetensors.torch import load_file
from torch import nn

import undrift as ud
from undrift import config
from undrift.errors import BadInput
from undrift.experiment import build
from undrift.files import read_lines, read_tensors
from undrift.running import run

BASE = {
    "data": {"name": "synthetic", "clients": 8, "dim": 16, "classes": 4},
    "model": {"name": "logistic"},
    "local": {"lr": 0.1, "steps": 2, "batch": 5},
    "participation": {"clients": 3},
    "run": {"rounds": 2, "threads": 1, "engine": "loop"},
}

NETS = '''
import torch
from torch import nn


class Odd(nn.Module):
    """Tied weights, frozen parameters, buffers, dropout and BatchNorm."""

    def __init__(self, classes):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.norm, self.drop, self.last = nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, classes)
        self.last.bias.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-1, 1, 16))
        self.norm.running_mean.copy_(self.shift)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.second(torch.tanh(self.first(x + self.shift))))))


def ahead(classes):
    """Another net under the same name as a later file's."""
    return nn.Linear(16, classes)
'''


def play(tmp_path, out="a", **changes):
    e = config.parse(config.derive(BASE, changes), tmp_path)
    run(e, tmp_path / out)
    return e, tmp_path / out


def logits(e, folder, batches, net="server.x"):
    """Those of the evaluation model that the run has, built anew."""
    evaluate = build(e).evaluate
    x = read_tensors(folder / "checkpoint" / ("best.safetensors" if net == "x" else "final.safetensors"))[net]
    return evaluate._outputs((batches, torch.zeros(len(batches), dtype=torch.long)), x)[0]


def inputs(*shape):
    return torch.linspace(-2, 2, 7 * torch.Size(shape).numel()).reshape(7, *shape)


@pytest.fixture
def nets(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


@pytest.mark.parametrize("batchnorm", ["frozen", "group"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_plain_module_gives_the_logits_of_the_evaluation(nets, batchnorm, precision):
    model = {"name": "nets:Odd", "batchnorm": batchnorm}
    e, folder = play(nets, model=model, run={"precision": precision})
    net = ud.load(folder).model()
    kinds = [type(m) for m in net.modules()]
    assert nn.Dropout in kinds and (nn.BatchNorm1d if batchnorm == "frozen" else nn.GroupNorm) in kinds
    assert net.first.weight is net.second.weight
    x = inputs(16).to(getattr(torch, precision))
    assert torch.equal(net(x), logits(e, folder, x))
    fresh = build(e).simulation.net.module
    assert not torch.equal(net.last.weight, fresh.last.weight) and torch.equal(net.last.bias, fresh.last.bias)


@pytest.mark.parametrize("batchnorm", ["frozen", "group"])
def test_the_exported_file_loads_strictly_without_the_users_code(nets, batchnorm):
    e, folder = play(nets, model={"name": "nets:Odd", "batchnorm": batchnorm})
    text = (nets / "nets.py").read_text()
    (nets / "nets.py").unlink()
    path = ud.export(folder)
    assert path == folder / "model.safetensors"
    (nets / "nets.py").write_text(text)
    scope = {}
    exec(text, scope)
    net = scope["Odd"](4)
    net = ud.to_group_norm(net) if batchnorm == "group" else net
    net.load_state_dict(load_file(path), strict=True)
    assert list(load_file(path)) and set(load_file(path)) == set(net.state_dict())
    assert torch.equal(net.eval()(inputs(16)), logits(e, folder, inputs(16)))


def test_lenet_comes_back(tmp_path):
    changes = {"data": {"name": "mnist", "partition": {"name": "iid", "clients": 300}}, "model": {"name": "lenet"}}
    e, folder = play(tmp_path, **changes, run={"rounds": 1})
    net = ud.load(folder).model()
    assert torch.equal(net(inputs(1, 28, 28)), logits(e, folder, inputs(1, 28, 28)))


def test_a_live_module_takes_the_weights_and_stays_as_it_is(nets):
    _, folder = play(nets, model={"name": "nets:ahead"})
    mine = nn.Linear(16, 4)
    before = mine.weight.clone()
    assert torch.equal(ud.load(folder, model=mine).model().weight, ud.load(folder).model().weight)
    assert torch.equal(mine.weight, before)
    with pytest.raises(BadInput, match="does not fit Linear"):
        ud.load(folder, model=nn.Linear(3, 4)).model()


def test_the_users_code_is_the_one_that_the_run_had(nets):
    _, folder = play(nets, model={"name": "nets:ahead"})
    (nets / "nets.py").write_text(NETS + "\n# changed\n")
    with pytest.raises(BadInput, match="its copy is"):
        ud.load(folder).model()


def test_the_best_model_and_a_run_without_one(tmp_path, undrift):
    changes = {"data": {"validation": 0.3}, "local": {"lr": 3.0}}
    e, folder = play(tmp_path, **changes, run={"rounds": 6, "eval_every": 1, "keep_best": True})
    best, last = ud.load(folder).model(best=True), ud.load(folder).model()
    x = inputs(16)
    assert torch.equal(best(x), logits(e, folder, x, "x")) and torch.equal(last(x), logits(e, folder, x))
    assert not torch.equal(best(x), last(x))
    code, out, _ = undrift("export", folder, "--best", "--to", tmp_path / "best.safetensors")
    assert code == 0 and str(tmp_path / "best.safetensors") in out
    assert torch.equal(load_file(tmp_path / "best.safetensors")["1.weight"], best[1].weight)
    _, folder = play(tmp_path, "b")
    refused(undrift("export", folder, "--best"), "run.keep_best", "data.validation")
    refused(undrift("export", tmp_path), "no run")


def test_a_run_goes_on_from_an_exported_file_as_from_its_folder(nets):
    model = {"name": "nets:Odd", "batchnorm": "frozen"}
    for precision in ("float32", "float64"):
        e, folder = play(nets, f"a-{precision}", model=model, run={"precision": precision})
        path = ud.export(folder)
        for given in (path, folder):
            begun = build(config.parse(config.derive(config.document(e), {"model": {"weights": str(given)}}), nets))
            state = begun.simulation.net.module.state_dict()
            assert all(torch.equal(state[name], value) for name, value in load_file(path).items())


def test_a_killed_runs_model_is_the_last_checkpoints(tmp_path):
    """The state after round 2 of a run that stops in round 3, beside a run of 2 rounds."""

    class Killed(BaseException):
        pass

    def kill(record):
        if record["round"] == 3:
            raise Killed

    e = config.parse(config.derive(BASE, {"run": {"rounds": 5, "checkpoint_every": 2}}))
    with pytest.raises(Killed):
        run(e, tmp_path / "killed", on_round=kill)
    _, whole = play(tmp_path, "whole")
    killed, whole = ud.load(tmp_path / "killed"), ud.load(whole)
    assert torch.equal(killed.model()[1].weight, whole.model()[1].weight)
    assert whole.config["run"]["rounds"] == 2
    assert whole.records == read_lines(tmp_path / "whole" / "metrics.jsonl")


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    def kill(record):
        raise KeyError

    with pytest.raises(KeyError):
        run(config.parse(BASE), tmp_path / "a", on_round=kill)
    with pytest.raises(BadInput, match="no checkpoint yet"):
        ud.load(tmp_path / "a").model()


def test_a_method_that_evaluates_another_model_gives_that_one(tmp_path):
    (tmp_path / "half.py").write_text(HALF)
    _, folder = play(tmp_path, algorithm={"name": "half:Half"})
    server = read_tensors(folder / "checkpoint" / "final.safetensors")["server.x"]
    found = ud.load(folder).model().state_dict()
    assert torch.equal(torch.cat([v.reshape(-1) for v in found.values()]), server / 2)


HALF = """
from undrift.algorithms.fedavg import FedAvg


class Half(FedAvg):
    def model(self, x):
        return x / 2
"""


def test_a_comparison_is_not_a_run(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(BadInput, match="name one of the runs"):
        ud.load(tmp_path)
