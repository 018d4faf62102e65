import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

from undrift.errors import BadInput
from undrift.metrics import AUROC, R2, AbsoluteError, Accuracy, SquaredError, metrics
from undrift.tasks import Task, default_task, losses, parts

torch.set_num_threads(1)


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(name):
    return Task.make({"loss": name, "metrics": []}).loss


# -- losses ----------------------------------------------------------------------


def test_losses_are_what_they_say():
    out, y = random(4, 3), random(4, 3, seed=1)
    classes = whole(3, 4)
    p = out.softmax(-1)
    assert torch.allclose(loss_of("cross-entropy")(out, classes), -p[torch.arange(4), classes].log())
    assert torch.allclose(loss_of("squared-error")(out, y), ((out - y) ** 2).mean(1))
    assert torch.allclose(loss_of("absolute-error")(out, y), (out - y).abs().mean(1))
    there, s = whole(2, 4, 3), out.sigmoid()
    expected = -(there * s.log() + (1 - there) * (1 - s).log()).mean(1)
    assert torch.allclose(loss_of("binary-cross-entropy")(out, there), expected)


def test_cross_entropy_of_texts_is_the_mean_over_their_characters():
    out, target = random(4, 6, 5), whole(5, 4, 6)
    expected = torch.stack([loss_of("cross-entropy")(out[:, t], target[:, t]) for t in range(6)]).mean(0)
    assert torch.allclose(loss_of("cross-entropy")(out, target), expected)


@pytest.mark.parametrize("name", ["squared-error", "absolute-error", "binary-cross-entropy"])
def test_a_single_output_meets_flat_labels(name):
    out, target = random(5, 1), whole(2, 5)
    loss = loss_of(name)(out, target)
    assert loss.shape == (5,)
    assert torch.equal(loss, loss_of(name)(out[:, 0], target))
    assert torch.equal(loss, loss_of(name)(out[:, 0], target[:, None]))


@pytest.mark.parametrize("name", losses.names())
def test_losses_refuse_shapes_that_broadcasting_would_take(name):
    with pytest.raises(BadInput, match=r"^model\.name"):
        loss_of(name)(random(4, 1), whole(2, 4, 4))
    with pytest.raises(BadInput, match=r"^model\.name"):
        loss_of(name)(random(4), whole(2, 1))


CASES = [
    ("cross-entropy", 3, lambda c: whole(3, c, 4)),
    ("squared-error", 3, lambda c: random(c, 4, 3)),
    ("squared-error", 1, lambda c: random(c, 4).float()),
    ("absolute-error", 3, lambda c: random(c, 4, 3)),
    ("binary-cross-entropy", 3, lambda c: whole(2, c, 4, 3)),
    ("binary-cross-entropy", 1, lambda c: whole(2, c, 4)),
]


@pytest.mark.parametrize(("name", "width", "targets"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_gradients_of_a_cohort_are_those_of_its_clients(name, width, targets, dtype, tolerance):
    module, loss = nn.Linear(5, width).to(dtype), loss_of(name)
    x, target = random(3, 4, 5, seed=2).to(dtype), targets(3)
    start = {n: p.detach() for n, p in module.named_parameters()}

    def mean(parameters, x, target):
        return loss(functional_call(module, parameters, (x,)), target).mean()

    together = vmap(grad(mean), in_dims=(None, 0, 0))(start, x, target)
    for i in range(3):
        alone = {n: p.clone().requires_grad_() for n, p in start.items()}
        gradient = torch.autograd.grad(mean(alone, x[i], target[i]), list(alone.values()))
        for n, g in zip(alone, gradient, strict=True):
            assert together[n].dtype == dtype
            assert (together[n][i] - g).abs().max() <= tolerance * g.abs().max()


# -- metrics ----------------------------------------------------------------------


def after(metric, *batches):
    for outputs, target in batches:
        metric.update(outputs, target)
    return metric.result()


def test_accuracy_counts_classes_characters_and_labels():
    out = torch.tensor([[1.0, 0], [0, 1], [2, 1]])
    assert after(Accuracy(), (out, torch.tensor([0, 0, 0]))) == 2 / 3
    assert after(Accuracy(), (torch.stack([out, out]), torch.tensor([[0, 1, 0], [0, 1, 1]]))) == 5 / 6
    assert after(Accuracy(), (torch.tensor([[1.0], [-1], [-2]]), torch.tensor([1, 1, 0]))) == 2 / 3
    assert after(Accuracy(), (torch.tensor([[1.0, -1], [-2, 2]]), torch.tensor([[1, 0], [1, 1]]))) == 3 / 4


def pairs_won(scores, present):
    """The definition: over all pairs of one with the label and one without, wins and half the ties."""
    yes, no = scores[present], scores[~present]
    if not len(yes) or not len(no):
        return None
    apart = yes[:, None] - no[None, :]
    return float(((apart > 0).double() + 0.5 * (apart == 0).double()).mean())


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
def test_auroc_is_its_definition_with_ties_and_labels_of_one_kind(n, labels, levels, seed):
    outputs, target = whole(levels, n, labels, seed=seed).double(), whole(2, n, labels, seed=seed + 1)
    areas = [pairs_won(outputs[:, k], target[:, k] == 1) for k in range(labels)]
    areas = [a for a in areas if a is not None]
    result = after(AUROC(), (outputs, target))
    assert result == (pytest.approx(sum(areas) / len(areas), abs=1e-12) if areas else None)


def test_auroc_of_classes_is_each_against_the_rest_by_probability():
    outputs, target = random(40, 4), whole(3, 40)  # the last class never comes
    areas = [pairs_won(outputs.softmax(-1)[:, k], target == k) for k in range(3)]
    assert after(AUROC(), (outputs, target)) == pytest.approx(sum(areas) / 3, abs=1e-12)
    two = whole(2, 40)
    margin = outputs[:, 1] - outputs[:, 0]
    assert after(AUROC(), (outputs[:, :2], two)) == pytest.approx(pairs_won(margin, two == 1), abs=1e-12)
    assert after(AUROC(), (margin, two)) == pytest.approx(pairs_won(margin, two == 1), abs=1e-12)


def test_auroc_without_an_answer_is_none():
    assert AUROC().result() is None
    assert after(AUROC(), (random(3, 2), torch.ones(3, 2))) is None
    assert after(AUROC(), (random(3, 2) * float("nan"), whole(2, 3, 2))) is None


def test_errors_and_r2_are_what_they_say():
    out, y = random(20, 3), random(20, 3, seed=1)
    assert after(SquaredError(), (out, y)) == pytest.approx(float((out - y).square().mean()))
    assert after(AbsoluteError(), (out, y)) == pytest.approx(float((out - y).abs().mean()))
    explained = 1 - (out - y).square().sum(0) / (y - y.mean(0)).square().sum(0)
    assert after(R2(), (out, y)) == pytest.approx(float(explained.mean()))
    y[:, 0] = 1  # an output whose labels do not vary is left out
    assert after(R2(), (out, y)) == pytest.approx(float(explained[1:].mean()))
    assert after(R2(), (out[:, :1], y[:, 0])) is None
    assert after(R2(), (y[:, 1:] * 2 + 1e9, y[:, 1:] * 2 + 1e9)) == 1


def test_r2_does_not_cancel_far_from_zero():
    out, y = random(50, 1), random(50, 1, seed=1)
    near = after(R2(), (out, y))
    assert after(R2(), (out + 1e6, y + 1e6)) == pytest.approx(near, rel=1e-6)


KINDS = {
    "accuracy": lambda n, seed: (random(n, 3, seed=seed), whole(3, n, seed=seed + 1)),
    "auroc": lambda n, seed: (random(n, 3, seed=seed), whole(2, n, 3, seed=seed + 1)),
    "squared-error": lambda n, seed: (random(n, 2, seed=seed), random(n, 2, seed=seed + 1)),
    "absolute-error": lambda n, seed: (random(n, 2, seed=seed), random(n, 2, seed=seed + 1)),
    "r2": lambda n, seed: (random(n, 2, seed=seed), random(n, 2, seed=seed + 1)),
}


@pytest.mark.parametrize("name", metrics.names())
@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 7), min_size=0, max_size=6), st.integers(0, 6), st.integers(0, 10**6))
def test_merging_is_updating_with_everything(name, sizes, cut, seed):
    def metric():
        return metrics.build(name, key="task.metrics")

    batches = [KINDS[name](n, seed + 2 * i) for i, n in enumerate(sizes)]
    whole_ = after(metric(), *batches)
    left, right, empty = metric(), metric(), metric()
    after(left, *batches[:cut])
    after(right, *batches[cut:])
    left.merge(right)
    left.merge(metric())
    empty.merge(left)
    expected = None if whole_ is None else pytest.approx(whole_, rel=1e-9, abs=1e-12)
    assert left.result() == expected
    assert empty.result() == expected
    if sum(sizes):
        at_once = metric()
        at_once.update(*(torch.cat(both) for both in zip(*batches, strict=True)))
        assert at_once.result() == expected


# -- tasks -----------------------------------------------------------------------


def test_the_default_follows_from_the_data_and_the_loss():
    task = default_task(10)
    assert task.loss is loss_of("cross-entropy")
    assert [m.name for m in task.metrics] == ["accuracy"]
    task = default_task(None)
    assert task.loss is loss_of("squared-error")
    assert [m.name for m in task.metrics] == ["squared-error"]
    assert [m.name for m in Task.make({"loss": "binary-cross-entropy"}, None).metrics] == ["auroc"]
    assert Task.make({"metrics": []}, 3).metrics == ()
    two = Task.make({"metrics": ["auroc", {"name": "accuracy"}]}, 3)
    assert [(m.name, m.better) for m in two.metrics] == [("auroc", "higher"), ("accuracy", "higher")]


def test_fresh_metrics_share_nothing_and_a_task_travels():
    task = Task.make({"metrics": ["accuracy", "auroc"]}, 2)
    a, b = task.fresh(), task.fresh()
    for metric in a:
        metric.update(random(6, 2), whole(2, 6))
    assert [m.result() for m in a] != [None, None]
    assert [m.result() for m in b] == [None, None]
    assert pickle.loads(pickle.dumps(task)).loss is task.loss


def test_losses_and_metrics_of_the_users_own(tmp_path):
    (tmp_path / "own.py").write_text(
        "class Hits:\n"
        "    name, better = 'hits', 'higher'\n\n"
        "    def __init__(self, at=0.5):\n        self.at, self.n = at, 0\n\n"
        "    def update(self, outputs, target):\n        self.n += int((outputs > self.at).sum())\n\n"
        "    def merge(self, other):\n        self.n += other.n\n\n"
        "    def result(self):\n        return float(self.n)\n\n\n"
        "class Odd(Hits):\n    better = 'more'\n\n\n"
        "class Half:\n    name = 'half'\n\n\n"
        "class Taken(Hits):\n    name = 'loss'\n\n\n"
        "def power(got, wanted, exponent: float = 2.0):\n"
        "    return (got - wanted).abs().pow(exponent).flatten(1).mean(1)\n"
    )

    def own(loss="own:power", metrics=("own:Hits",)):
        return Task.make({"loss": loss, "metrics": list(metrics)}, None, tmp_path)

    out, y = random(4, 2), random(4, 2, seed=1)
    assert torch.allclose(own().loss(out, y), loss_of("squared-error")(out, y))
    assert torch.allclose(own({"name": "own:power", "exponent": 1.0}).loss(out, y), loss_of("absolute-error")(out, y))
    assert Task.make({"loss": "own:power"}, None, tmp_path).metrics == ()
    (hits,) = own(metrics=[{"name": "own:Hits", "at": -100.0}]).fresh()
    hits.update(out, y)
    assert hits.result() == 8
    for made, words in [
        (lambda: own({"name": "own:power", "exponant": 1.0}), r"task\.loss\.exponant"),
        (lambda: own({"name": "cross-entropy", "weight": 1}), r"task\.loss\.weight"),
        (lambda: own("cross-entrop"), r"task\.loss: .*did you mean cross-entropy"),
        (lambda: own(metrics=["acuracy"]), r"task\.metrics: .*did you mean accuracy"),
        (lambda: own(metrics=["own:Half"]), r"task\.metrics: .* has no better and no update"),
        (lambda: own(metrics=["own:Odd"]), r"hits\.better must be"),
        (lambda: own(metrics=["own:Taken"]), "loss would be reported twice"),
        (lambda: own(metrics=["r2", "r2"]), "r2 would be reported twice"),
    ]:
        with pytest.raises(BadInput, match=words):
            made()


def test_samples_end_in_their_target():
    a, b, y = random(2), random(2), random(2)
    assert parts((a, b, y)) == ((a, b), {}, y)
    assert parts({"target": y, "left": a, "right": b}) == ((), {"left": a, "right": b}, y)
