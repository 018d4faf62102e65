"""A module's trainable parameters as one flat vector, and back."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn


class Deferred(Exception):
    """A part asked for layers or facts that only the real model and data have; it is asked again before round 1."""


class Views(dict):
    """name -> view; a name that is not there is an error that lists what is, or, in a toy round, waits for the real
    one."""

    def __init__(self, items, toy: bool):
        super().__init__(items)
        self.toy = toy

    def __missing__(self, name):
        if self.toy:
            raise Deferred(name)
        raise KeyError(f"no parameter {name!r}: the model has {', '.join(self)}")


@dataclass(frozen=True)
class Layout:
    """Where each named parameter lies in a vector [..., P]. The order is the module's own; tied weights appear once."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    toy: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        trainable = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
        return cls(tuple(n for n, _ in trainable), tuple(s for _, s in trainable))

    @property
    def sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def offsets(self) -> list[int]:
        return [sum(self.sizes[:i]) for i in range(len(self.names))]

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """{name: [..., *shape]}, views of v [..., P]."""
        parts = v.split(self.sizes, -1)
        return Views(
            {n: p.reshape((*v.shape[:-1], *s)) for n, p, s in zip(self.names, parts, self.shapes, strict=True)},
            self.toy,
        )

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        """The vector [P] of one client's tensors by name."""
        return torch.cat([tensors[n].reshape(-1) for n in self.names])

    def mask(self, *patterns: str) -> Tensor:
        """[P] bool: the coordinates of the parameters whose name fits one of the patterns ("fc*", "*.bias")."""
        fits = [any(fnmatchcase(n, p) for p in patterns) for n in self.names]
        if not any(fits):
            if self.toy:
                raise Deferred(patterns)
            raise KeyError(f"no parameter fits {', '.join(patterns)}: the model has {', '.join(self.names)}")
        return torch.cat([torch.full((k,), fit) for fit, k in zip(fits, self.sizes, strict=True)])

    def pieces(self, n: int) -> list[Tensor]:
        """n blocks [P] bool that cut the vector into pieces that differ by one coordinate at most."""
        edges = [i * self.size // n for i in range(n + 1)]
        index = torch.arange(self.size)
        return [(a <= index) & (index < b) for a, b in pairwise(edges)]


def parameters(module: nn.Module, layout: Layout, dtype: torch.dtype, device=None) -> Tensor:
    """The vector [P] that a module holds."""
    held = dict(module.named_parameters())
    return layout.join({n: held[n].detach() for n in layout.names}).to(device=device, dtype=dtype, copy=True)


def load(module: nn.Module, layout: Layout, x: Tensor) -> nn.Module:
    """Write the vector [P] into a module."""
    held = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in layout.split(x).items():
            held[name].copy_(value)
    return module
