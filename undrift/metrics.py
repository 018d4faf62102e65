"""What is reported: metrics that batches update, parts merge, and `result` reads.

A metric has `name`, `better` ("higher" or "lower"), `update(outputs, target)`, `merge(other)` and `result()`, a float
or None where it is not defined. Merging two metrics is the same as updating one with what both have seen.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .errors import BadInput
from .registry import Registry


class Metric(Protocol):
    """What a metric answers; a user's own class needs no more."""

    name: str
    better: str

    def update(self, outputs: Tensor, target: Tensor) -> None: ...

    def merge(self, other: Metric) -> None: ...

    def result(self) -> float | None: ...


def as_outputs(outputs: Tensor, target: Tensor, what: str) -> Tensor:
    """The target in the shape and dtype of the outputs; axes of one (as in [B, 1] for [B]) may come or go."""
    if outputs.shape[:1] != target.shape[:1] or _wide(outputs) != _wide(target):
        raise BadInput(
            f'model.name: "{what}" compares outputs and labels of one shape, and they are '
            f"{list(outputs.shape[1:])} and {list(target.shape[1:])}"
        )
    return target.reshape(outputs.shape).to(outputs.dtype)


def _wide(x: Tensor) -> list[int]:
    return [n for n in x.shape[1:] if n != 1]


def flat(x: Tensor) -> Tensor:
    """[B, L] of [B, ...], where B may be 0."""
    return x.unsqueeze(-1).flatten(1)


def is_class_target(outputs: Tensor, target: Tensor) -> bool:
    """Whether the target holds one of several classes: logits [B, ..., K] for whole numbers [B, ...]."""
    one_of = outputs.dim() == target.dim() + 1 and outputs.shape[:-1] == target.shape
    return one_of and outputs.shape[-1] > 1 and not target.is_floating_point()


class Accuracy:
    """The share of labels that are right: of classes, of characters [B, T], or of yes and no under several labels."""

    name: ClassVar[str] = "accuracy"
    better: ClassVar[str] = "higher"

    def __init__(self):
        self.right = self.count = 0

    def update(self, outputs: Tensor, target: Tensor) -> None:
        if is_class_target(outputs, target):
            hits = outputs.argmax(-1) == target
        else:
            hits = (outputs > 0) == (as_outputs(outputs, target, self.name) > 0.5)
        self.right += int(hits.sum())
        self.count += hits.numel()

    def merge(self, other: Accuracy) -> None:
        self.right += other.right
        self.count += other.count

    def result(self) -> float | None:
        return self.right / self.count if self.count else None


class AUROC:
    """The area under the ROC curve, exact with ties: the mean over the labels, or over each class against the rest.

    A label that is always or never there has no area and is left out of the mean. The scores of classes are their
    softmax probabilities, as samples are ranked against each other by them. It keeps all it has seen until `result`.
    """

    name: ClassVar[str] = "auroc"
    better: ClassVar[str] = "higher"

    def __init__(self):
        self.scores: list[Tensor] = []  # [n, L] float64
        self.present: list[Tensor] = []  # [n, L] bool

    def update(self, outputs: Tensor, target: Tensor) -> None:
        if is_class_target(outputs, target):
            classes = outputs.shape[-1]
            scores = outputs.detach().double().log_softmax(-1).reshape(-1, classes)
            present = target.reshape(-1, 1) == torch.arange(classes, device=target.device)
        else:
            present = flat(as_outputs(outputs, target, self.name) > 0.5)
            scores = flat(outputs.detach().double())
        self.scores.append(scores.cpu())
        self.present.append(present.cpu())

    def merge(self, other: AUROC) -> None:
        self.scores += other.scores
        self.present += other.present

    def result(self) -> float | None:
        if not self.scores:
            return None
        scores, present = torch.cat(self.scores), torch.cat(self.present)
        if scores.isnan().any():
            return None
        areas = [a for a in map(area, scores.unbind(1), present.unbind(1)) if a is not None]
        return sum(areas) / len(areas) if areas else None


def area(scores: Tensor, present: Tensor) -> float | None:
    """The probability that a sample where the label is there scores higher than one where it is not; a tie is half."""
    yes = int(present.sum())
    no = len(present) - yes
    if not yes or not no:
        return None
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    below = count.cumsum(0) - count
    twice_rank = (2 * below + count + 1)[place]  # whole numbers: ties share the middle of their ranks
    return (int(twice_rank[present].sum()) - yes * (yes + 1)) / (2 * yes * no)


class MeanError:
    """The mean of an error over all outputs."""

    better: ClassVar[str] = "lower"
    name: str

    def __init__(self):
        self.total, self.count = 0.0, 0

    def error(self, difference: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, outputs: Tensor, target: Tensor) -> None:
        outputs = outputs.detach().double()
        errors = self.error(outputs - as_outputs(outputs, target, self.name))
        self.total += float(errors.sum())
        self.count += errors.numel()

    def merge(self, other: MeanError) -> None:
        self.total += other.total
        self.count += other.count

    def result(self) -> float | None:
        return self.total / self.count if self.count else None


class SquaredError(MeanError):
    """The mean squared error."""

    name: ClassVar[str] = "squared-error"

    def error(self, difference: Tensor) -> Tensor:
        return difference.square()


class AbsoluteError(MeanError):
    """The mean absolute error."""

    name: ClassVar[str] = "absolute-error"

    def error(self, difference: Tensor) -> Tensor:
        return difference.abs()


class R2:
    """The share of the labels' variance that the outputs explain: the mean over outputs whose labels vary."""

    name: ClassVar[str] = "r2"
    better: ClassVar[str] = "higher"

    def __init__(self):
        self.count, self.mean, self.spread, self.residual = 0, 0.0, 0.0, 0.0  # then [L] float64

    def update(self, outputs: Tensor, target: Tensor) -> None:
        outputs = outputs.detach().double().cpu()
        outputs, target = flat(outputs), flat(as_outputs(outputs, target.cpu(), self.name))
        if len(target):
            mean = target.mean(0)
            self._join(len(target), mean, (target - mean).square().sum(0), (target - outputs).square().sum(0))

    def merge(self, other: R2) -> None:
        if other.count:
            self._join(other.count, other.mean, other.spread, other.residual)

    def _join(self, count: int, mean, spread, residual) -> None:
        """Chan's update: the spread about a common mean, without the cancellation of a sum of squares."""
        total, apart = self.count + count, mean - self.mean
        self.spread = self.spread + spread + apart**2 * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.residual = self.residual + residual
        self.count = total

    def result(self) -> float | None:
        if not self.count:
            return None
        varies = self.spread > 0
        return float((1 - self.residual[varies] / self.spread[varies]).mean()) if varies.any() else None


metrics = Registry("metric")
metrics.add("accuracy", Accuracy, "share of labels that are right")
metrics.add("auroc", AUROC, "area under the ROC curve, mean over labels or classes")
metrics.add("squared-error", SquaredError, "mean squared error")
metrics.add("absolute-error", AbsoluteError, "mean absolute error")
metrics.add("r2", R2, "share of the labels' variance that the outputs explain")
