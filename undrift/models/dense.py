"""Logistic regression and the multilayer perceptron: inputs of any shape, flattened."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from torch import nn

from .shapes import Size, Sizes, single


def logistic(shape, classes: Size) -> nn.Module:
    """Logistic regression: one linear layer on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(single(shape, "logistic")), classes))


def mlp(shape, classes: Size, hidden: Sizes = (64,)) -> nn.Module:
    """A multilayer perceptron with ReLU on the flattened input; `hidden` lists the widths of its hidden layers."""
    widths = [prod(single(shape, "mlp")), *hidden]
    inner = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *inner, nn.Linear(widths[-1], classes))
