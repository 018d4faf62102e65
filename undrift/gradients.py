"""Gradients of per-sample losses: of one client by plain autograd, of many by vmap. The same numbers to rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_map

from .modules import draw_from
from .tasks import parts
from .vector import Layout
from .work import Batch, bare


class Net:
    """A module whose trainable parameters come from a vector; frozen parameters and buffers are its own."""

    def __init__(self, module: nn.Module, loss: Callable, layout: Layout | None = None):
        self.module, self.loss = module, loss
        self.layout = layout or Layout.of(module)

    def outputs(self, y: Tensor, batch: Batch):
        """The module at parameters y [P] on one client's batch."""
        inputs, named, _ = parts(batch.samples)
        draw_from(self.module, batch.counter)
        return functional_call(self.module, dict(self.layout.split(y)), inputs, named)

    def losses(self, y: Tensor, batch: Batch) -> Tensor:
        """[B] of one client."""
        return self.loss(self.outputs(y, batch), parts(batch.samples)[2])


class Heard:
    """A net that remembers the first bare losses it was asked for: they are reported, whatever the objective makes
    of them."""

    def __init__(self, net):
        self.net, self.losses_heard = net, None

    def __getattr__(self, name):
        return getattr(self.net, name)

    def losses(self, y, batch):
        out = self.net.losses(y, batch)
        if self.losses_heard is None:
            self.losses_heard = out.detach()
        return out


def mean(net, losses: Callable, y: Tensor, batch: Batch, vectors: dict) -> tuple[Tensor, Tensor]:
    """(weighted mean of the objective, that of the bare loss): padding has weight 0, an all padded row gives 0."""
    heard, count = Heard(net), batch.weight.sum().clamp(min=1)
    objective = (losses(heard, y, batch, **vectors) * batch.weight).sum() / count
    bare_losses = heard.losses_heard
    return objective, objective.detach() if bare_losses is None else (bare_losses * batch.weight).sum() / count


def one_client(net) -> Callable:
    """Leading axes (): plain Python all the way, so that `print` and `breakpoint()` work in every method and module."""

    def gradient(losses, vectors, y, batch):
        with torch.enable_grad():
            at = y.detach().requires_grad_()
            objective, raw = mean(net, losses, at, batch, vectors)
            (g,) = torch.autograd.grad(objective, at)
        return g, raw.reshape(1)

    return gradient


def many_clients(net) -> Callable:
    """Leading axes (C,) or (R, C)."""

    def gradient(losses, vectors, y, batch):
        def of_one(y, batch, vectors):
            return mean(net, losses, y, batch, vectors)

        lead = y.shape[:-1]
        vectors = {k: v.expand(*lead, v.shape[-1] if v.dim() else 1) for k, v in vectors.items()}
        axes = tree_map(lambda t: None if t is None else 0, (y, batch, vectors))
        of_all = grad(of_one, has_aux=True)
        for _ in lead:
            of_all = vmap(of_all, in_dims=axes)
        g, raw = of_all(y, batch, vectors)
        return g, raw.unsqueeze(-1)

    return gradient


ENGINES = {"loop": one_client, "vmap": many_clients}


def vmap_trouble(net, x: Tensor, batch: Batch) -> str | None:
    """Why vmap cannot serve this module, or only one client at a time; None where it can. `batch` is one client's."""
    pair = tree_map(lambda t: None if t is None else torch.stack([t, t]), batch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            g, _ = many_clients(net)(bare, {}, torch.stack([x, x]), pair)
        except Exception as error:  # whatever a user's module raises under vmap: the loop is there for it
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    slow = [str(w.message).split(" for ")[-1] for w in said if "performance drop" in str(w.message)]
    if slow:
        return f"no batching rule for {slow[0].split('.')[0]}"
    alone, _ = one_client(net)(bare, {}, x, batch)
    gap, size = (g[0] - alone).abs().max(), alone.abs().max()
    if not gap <= 1e-3 * size + 1e-6:
        return f"its gradients differ from those of one client alone by {float(gap):.1g}"
    return None
