"""Local optimizers, each a pure pair: init(x) -> memory, step(lr, g, *memory) -> (move, *memory)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, where, zeros_like


def repeat(body, carry, times, most: int, least: int = 0):
    """carry <- body(k, *carry), `times` times in each row; a row that has finished keeps its carry."""
    for k in range(most):
        new = body(k, *carry)
        carry = new if k < least else tuple(where(k < times, a, b) for a, b in zip(new, carry, strict=True))
    return carry


@dataclass(frozen=True)
class Optimizer:
    def init(self, x: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def step(self, lr, g: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def numbers(self) -> dict[str, Any]:
        """The fields that a sweep may turn into tensors. A plain zero is structure: it switches the term off."""
        return {
            f.name: v for f in fields(self) if not isinstance(v := getattr(self, f.name), (bool, str)) and not zero(v)
        }

    def having(self, **numbers) -> Optimizer:
        return replace(self, **numbers)

    def guess(self, lr, times, most, least, *memory: Tensor):
        """GEL: where `times` further steps with gradient 0 would go."""
        if most == math.inf:
            raise ValueError(f"guesses = inf: {type(self).__name__} cannot guess for ever, only SGD can")
        still = zeros_like(memory[0])

        def step(k, y, *memory):
            move, *memory = self.step(lr, still, *memory)
            return y + move, *memory

        return repeat(step, (still, *memory), times, most, least)[0]


def zero(value) -> bool:
    return not isinstance(value, Tensor) and value == 0


@dataclass(frozen=True)
class SGD(Optimizer):
    """v = rho v + g, move = -lr v; its guess in closed form: -lr (rho + ... + rho^n) v."""

    momentum: Any = 0.0

    def init(self, x):
        return () if zero(self.momentum) else (zeros_like(x),)

    def step(self, lr, g, *memory):
        if not memory:
            return (-lr * g,)
        v = self.momentum * memory[0] + g
        return -lr * v, v

    def guess(self, lr, times, most, least, *memory):
        if not memory:
            return 0.0
        v = memory[0]
        a, n = (torch.as_tensor(t, dtype=v.dtype, device=v.device) for t in (self.momentum, times))
        return -lr * where(a == 1, n, a * (1 - a**n) / where(a == 1, 1, 1 - a)) * v


@dataclass(frozen=True)
class Adam(Optimizer):
    """m = b1 m + (1-b1) g, s = b2 s + (1-b2) g^2, move = -lr m / (sqrt(s) + eps); no bias correction."""

    b1: Any = 0.9
    b2: Any = 0.999
    eps: Any = 1e-8

    def init(self, x):
        return zeros_like(x), zeros_like(x)

    def step(self, lr, g, m, s):
        m, s = self.b1 * m + (1 - self.b1) * g, self.b2 * s + (1 - self.b2) * g**2
        return -lr * m / (s.sqrt() + self.eps), m, s


OPTIMIZERS = {"sgd": SGD, "adam": Adam}
