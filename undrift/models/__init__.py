"""The reference models by name, and how the name, table or factory of [model] becomes a module ready to train."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from ..errors import BadInput
from ..modules import initial, prepare
from ..registry import Registry
from .char_lstm import char_lstm
from .dense import logistic, mlp
from .lenet import lenet
from .resnet import resnet18, resnet20

models = Registry("model")
models.add("logistic", logistic)
models.add("mlp", mlp)
models.add("lenet", lenet)
models.add("resnet20", resnet20)
models.add("resnet18", resnet18)
models.add("char-lstm", char_lstm)

_READ_ELSEWHERE = ("name", "weights", "seed", "batchnorm")


def build(
    table: Mapping,
    *,
    shape,
    classes: int | None,
    seed: int,
    key: str = "model",
    batchnorm: str | None = None,
    folder: str | Path | None = None,
) -> nn.Module:
    """The initial model of `table`, fit for federated training."""
    return prepare(plain(table, shape=shape, classes=classes, seed=seed, key=key, folder=folder), batchnorm, key)


def plain(
    table: Mapping,
    *,
    shape,
    classes: int | None,
    seed: int,
    key: str = "model",
    folder: str | Path | None = None,
) -> nn.Module:
    """The module of `table` as it is made: by a registered name or `package.module:factory`, and its options.

    A factory that has parameters `shape` (of one input sample; a list of shapes where there are several inputs) and
    `classes` (1 where the data have none: one output) is given them, unless the table sets them.
    """
    given = {"shape": shape, "classes": 1 if classes is None else classes}
    given = {name: value for name, value in given.items() if name not in table}

    def make():
        return models.build(table, key=key, folder=folder, given=given, also=_READ_ELSEWHERE)

    module = initial(make, seed)
    if not isinstance(module, nn.Module):
        raise BadInput(f"{key}.name must make an nn.Module, and {table['name']} makes a {type(module).__name__}")
    if module is table["name"]:  # a live module of the caller's, which stays as it is
        module = copy.deepcopy(module)
    return module
