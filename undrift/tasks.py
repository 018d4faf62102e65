"""What a client minimises, a loss per sample, and what is reported, metrics."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from .errors import BadInput
from .metrics import Metric, as_outputs, flat, metrics
from .registry import Registry, check, refuse
from .words import shown


def parts(samples) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor]:
    """Samples as the module's positional inputs, its keyword inputs, and the target."""
    if isinstance(samples, dict):
        return (), {k: x for k, x in samples.items() if k != "target"}, samples["target"]
    return tuple(samples[:-1]), {}, samples[-1]


def cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    """[B] of logits [B, K] and classes [B], or the mean over T of [B, T, K] and [B, T]."""
    if outputs.shape[:-1] != target.shape or outputs.dim() < 2:
        raise BadInput(
            f'model.name: "cross-entropy" takes an output for every class, [{_axes(target)}classes], and the module '
            f"returns {list(outputs.shape[1:])}"
        )
    losses = F.cross_entropy(outputs.flatten(0, -2), target.flatten().long(), reduction="none")
    return _per_sample(losses.view(target.shape))


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """[B], the mean over a sample's outputs of (output - target)^2."""
    return _per_sample((outputs - as_outputs(outputs, target, "squared-error")).square())


def absolute_error(outputs: Tensor, target: Tensor) -> Tensor:
    """[B], the mean over a sample's outputs of |output - target|."""
    return _per_sample((outputs - as_outputs(outputs, target, "absolute-error")).abs())


def binary_cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    """[B], the mean over a sample's labels, each there (1) or not (0); outputs are logits."""
    target = as_outputs(outputs, target, "binary-cross-entropy")
    return _per_sample(F.binary_cross_entropy_with_logits(outputs, target, reduction="none"))


def _per_sample(losses: Tensor) -> Tensor:
    return flat(losses).mean(1)


def _axes(target: Tensor) -> str:
    return "".join(f"{n}, " for n in target.shape[1:])


losses = Registry("loss")
losses.add("cross-entropy", cross_entropy, "one of several classes, or of several characters at each place")
losses.add("squared-error", squared_error, "regression")
losses.add("absolute-error", absolute_error, "regression")
losses.add("binary-cross-entropy", binary_cross_entropy, "several labels, each there or not")

# What is reported where `task.metrics` is not set.
_REPORTED = {
    "cross-entropy": "accuracy",
    "squared-error": "squared-error",
    "absolute-error": "absolute-error",
    "binary-cross-entropy": "auroc",
}


@dataclass(frozen=True)
class Task:
    """A loss per sample, and the metrics that are reported, before any update; the first decides what is best."""

    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: tuple[Metric, ...] = ()

    @classmethod
    def make(cls, table: Mapping, classes: int | None = None, folder=None) -> Task:
        """The task of [task] = `table`; what it does not say follows from the number of classes (None: regression)."""
        loss = table.get("loss") or ("squared-error" if classes is None else "cross-entropy")
        reported = table.get("metrics")
        if reported is None:
            name = loss.get("name") if isinstance(loss, Mapping) else loss
            reported = [_REPORTED[name]] if isinstance(name, str) and name in _REPORTED else []
        return cls(_loss(loss, folder), _metrics(reported, folder))

    def fresh(self) -> list[Metric]:
        """The metrics, having seen nothing."""
        return copy.deepcopy(list(self.metrics))


def default_task(source_classes: int | None) -> Task:
    """Cross-entropy and accuracy for classes, the squared error where there are none."""
    return Task.make({}, source_classes)


def _loss(entry, folder) -> Callable[[Tensor, Tensor], Tensor]:
    """The function a name or table says; keys beside `name` become its further arguments, or a class's settings."""
    options = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    name = options.pop("name", None)
    found = losses.find(name, "task.loss", folder) if isinstance(name, str) else name
    if inspect.isclass(found) or not callable(found):
        found = losses.build(entry, key="task.loss", folder=folder)
        if not callable(found):
            raise BadInput(f"task.loss must be a function of outputs and target, and {shown(name)} is not one")
    elif options:
        first_two = list(inspect.signature(found).parameters)[:2]
        arguments, problems = check(found, options, key="task.loss", who=shown(name), given=dict.fromkeys(first_two))
        refuse(problems)
        return partial(found, **{k: v for k, v in arguments.items() if k not in first_two})
    return found


def _metrics(entries, folder) -> tuple[Metric, ...]:
    made = tuple(metrics.build(entry, key="task.metrics", folder=folder) for entry in entries)
    for metric, entry in zip(made, entries, strict=True):
        lacks = [a for a in ("name", "better", "update", "merge", "result") if not hasattr(metric, a)]
        if lacks:
            raise BadInput(f"task.metrics: {shown(entry)} is no metric: it has no {' and no '.join(lacks)}")
        if metric.better not in ("higher", "lower"):
            raise BadInput(
                f'task.metrics: {metric.name}.better must be "higher" or "lower", not {shown(metric.better)}'
            )
    names = ["loss", *(metric.name for metric in made)]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise BadInput(
            f"task.metrics: {twice[0]} would be reported twice" + (", the loss always is" * (twice[0] == "loss"))
        )
    return made
