"""Any nn.Module made fit for federated training: started from counters, without running statistics or hidden draws."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import BadInput
from .rng import Stream, Use, philox
from .tasks import Task, binary_cross_entropy, cross_entropy, parts
from .userfiles import users_failure, users_frames

# -- the initial model ---------------------------------------------------------


class CounterDraws(TorchDispatchMode):
    """Every uniform and normal draw of PyTorch comes from counters, each call under a number of its own."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.calls = seed, 0
        aten = torch.ops.aten
        self.fillers = {aten.uniform_.default: self.uniform, aten.normal_.default: self.normal}
        self.makers = {aten.rand.default: self.uniform, aten.randn.default: self.normal}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in self.fillers:
            kwargs.pop("generator", None)
            return self.fillers[func](*args, **kwargs)
        if func in self.makers:
            return self.makers[func](torch.empty(*args, **kwargs))
        return func(*args, **kwargs)

    def stream(self) -> Stream:
        self.calls += 1
        return Stream(self.seed, Use.MODEL, self.calls)

    def uniform(self, out: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        u = torch.from_numpy(self.stream().uniform(out.numel()))
        return out.copy_((low + (high - low) * u).view(out.shape))

    def normal(self, out: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        z = torch.from_numpy(self.stream().normal(out.numel()))
        return out.copy_((mean + std * z).view(out.shape))


def initial(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What `make()` returns, its random start drawn from counters; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]), CounterDraws(seed):
        # What counters do not draw (permutations, Bernoulli masks) repeats from the seed at least.
        torch.default_generator.manual_seed(int(Stream(seed, Use.MODEL).longs(1)[0]))
        return make()


# -- modules that federated training cannot use as they are ----------------------


def prepare(module: nn.Module, batchnorm: str | None = None, key: str = "model") -> nn.Module:
    """The module with BatchNorm converted as asked and Dropout drawn from counters, or BadInput with what to do."""
    module = _without_statistics(module, batchnorm, key)
    for name, layer in module.named_modules():
        if advice := _randomness(layer):
            raise BadInput(f"{key}.name: layer {_called(name)} is {type(layer).__name__}, {advice}")
    module = _with_counter_dropout(module)
    lazy = [name for name, p in (*module.named_parameters(), *module.named_buffers()) if is_lazy(p)]
    if lazy:
        raise BadInput(
            f"{key}.name: {', '.join(lazy)} wait for a first input to get a shape; give the layers their sizes"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise BadInput(f"{key}.name: the module has no parameter with requires_grad, so there is nothing to train")
    wild = [name for name, p in module.named_parameters() if not p.isfinite().all()]
    if wild:
        raise BadInput(f"{key}.name: {', '.join(wild)} begin with values that are not finite")
    return module


def converted(module: nn.Module, batchnorm: str | None) -> nn.Module:
    """The plain module that `batchnorm` makes: with GroupNorm as asked; one that is frozen keeps its own layers."""
    return to_group_norm(module) if batchnorm == "group" else module


def _keeps_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats)


def _without_statistics(module: nn.Module, batchnorm: str | None, key: str) -> nn.Module:
    found = {name: layer for name, layer in module.named_modules() if _keeps_statistics(layer)}
    if batchnorm == "group":
        return to_group_norm(module)
    if batchnorm == "frozen":
        for name, layer in found.items():
            if layer.running_mean is None:
                raise BadInput(
                    f'{key}.batchnorm = "frozen" needs statistics, and layer {_called(name)} keeps none: "group" works'
                )
        return _replaced(module, lambda layer: FrozenNorm(layer) if _keeps_statistics(layer) else None)
    if batchnorm is not None:
        raise BadInput(f'{key}.batchnorm must be "frozen" or "group", not {batchnorm!r}')
    if found:
        kinds = " and ".join(sorted({type(layer).__name__ for layer in found.values()}))
        raise BadInput(
            f"{key}.name: {', '.join(map(_called, found))} keep running statistics ({kinds}), which clients whose data "
            f"differ cannot share; convert the module with undrift.to_group_norm "
            f'({key}.batchnorm = "group" does it), or hold its statistics as they are with '
            f'{key}.batchnorm = "frozen"'
        )
    return module


class FrozenNorm(nn.Module):
    """A BatchNorm (or InstanceNorm with statistics) that always normalises by the running statistics it came with."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.eps, self.weight, self.bias = layer.eps, layer.weight, layer.bias
        for name, buffer in layer.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def to_group_norm(module: nn.Module, groups: int = 2) -> nn.Module:
    """The module with every BatchNorm replaced, in place, by GroupNorm of `groups` groups with the same weights.

    Where `groups` does not divide the channels, the largest number below it that does is taken. An InstanceNorm that
    keeps statistics becomes its own kind of GroupNorm, one group for each channel.
    """
    if not isinstance(groups, int) or groups < 1:
        raise BadInput(f"to_group_norm(groups=...) must be a whole number above 0, not {groups!r}")

    def convert(layer):
        if not _keeps_statistics(layer):
            return None
        channels = layer.num_features
        if not channels:
            raise BadInput(
                f"to_group_norm needs the number of channels, which {type(layer).__name__} does not know yet"
            )
        n = channels if isinstance(layer, _InstanceNorm) else groups
        n = max(d for d in range(1, min(n, channels) + 1) if channels % d == 0)
        norm = nn.GroupNorm(n, channels, eps=layer.eps, affine=False)
        norm.affine, norm.weight, norm.bias = layer.affine, layer.weight, layer.bias
        return norm

    return _replaced(module, convert)


def _randomness(layer: nn.Module) -> str | None:
    """Why this layer's draws in training cannot come from counters and what to do about it; None where they can."""
    instead = "which draws in a way that undrift cannot repeat; use"
    if isinstance(layer, _DropoutNd) and _dropped_axes(layer) is None:
        return f"{instead} nn.Dropout, nn.Dropout1d, nn.Dropout2d or nn.Dropout3d"
    if isinstance(layer, nn.RReLU):
        return f"{instead} nn.LeakyReLU"
    if isinstance(layer, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return f"{instead} nn.MaxPool2d or nn.MaxPool3d"
    if isinstance(layer, nn.RNNBase) and layer.dropout > 0:
        return "whose dropout undrift cannot repeat; set its dropout = 0 and put nn.Dropout between layers of your own"
    if isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0:
        return "whose dropout undrift cannot repeat; set its dropout = 0 and put nn.Dropout around it"
    return None


# -- dropout from counters --------------------------------------------------------


class CounterDropout(nn.Module):
    """Dropout whose mask is a function of a counter, the layer's number and the place in the activation [B, ...].

    The batch axis leads the places, so a sample's mask does not depend on how many follow it. `axes` of 2 draws one
    number for each sample and channel (Dropout1d, 2d, 3d), of None one for each element.
    """

    counter: Tensor | None = None  # int64 [4]: two words of key, two of client; None: no dropout
    calls = 0

    def __init__(self, p: float, number: int, axes: int | None = None):
        super().__init__()
        self.p, self.number, self.axes = p, number, axes

    def extra_repr(self) -> str:
        return f"p={self.p}, number={self.number}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.counter is None or self.p == 0:
            return x
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return torch.where(self._kept(x), x * scale, 0)

    def _kept(self, x: Tensor) -> Tensor:
        """The mask, which broadcasts against x."""
        shape = x.shape[: self.axes]
        k0, k1, low, high = self.counter.unbind(-1)
        # A layer that the module runs twice in one pass draws anew: the passes' number stands above the layer's.
        number = self.number | self.calls << 16
        self.calls += 1
        block = torch.arange(-(-shape.numel() // 4), device=x.device)
        words = torch.stack(torch.broadcast_tensors(*philox((block, number, low, high), (k0, k1))), -1)
        kept = words.flatten()[: shape.numel()] >= round(self.p * 2**32)
        return kept.view(*shape, *[1] * (x.dim() - len(shape)))


def draw_from(module: nn.Module, counter: Tensor | None) -> None:
    """Begin a pass: every CounterDropout draws from `counter` (int64 [4]), or drops nothing where it is None.

    Under vmap it is called inside the mapped function, where `counter` is one client's.
    """
    for layer in module.modules():
        if isinstance(layer, CounterDropout):
            layer.counter, layer.calls = counter, 0


_WHOLE = {nn.Dropout: (None,), nn.Dropout1d: (2,), nn.Dropout2d: (2,), nn.Dropout3d: (2,)}


def _dropped_axes(layer: nn.Module) -> tuple[int | None] | None:
    """(axes,) of the mask where the layer drops as one of PyTorch's four plain kinds does."""
    for kind, axes in _WHOLE.items():
        if type(layer).forward is kind.forward:
            return axes
    return None


def _with_counter_dropout(module: nn.Module) -> nn.Module:
    drops = [m for m in module.modules() if isinstance(m, _DropoutNd)]
    number = {layer: i for i, layer in enumerate(drops)}
    return _replaced(module, lambda m: CounterDropout(m.p, number[m], *_dropped_axes(m)) if m in number else None)


def _replaced(module: nn.Module, swap: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """The module with swap(layer) in the place of every layer for which that is one; shared layers stay shared."""
    new = {layer: other.train(layer.training) for layer in module.modules() if (other := swap(layer)) is not None}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child in new:
                parent.register_module(name, new[child])
    return new.get(module, module)


def _called(name: str) -> str:
    return name or "the module itself"


# -- does it fit the data? ----------------------------------------------------------


def check_output(module: nn.Module, samples, task: Task, key: str = "model") -> None:
    """BadInput unless the module takes the samples, the task takes its output, and training changes and draws nothing
    that undrift does not know of. Labels are looked at in all samples, the module runs on two."""
    inputs, named, target = parts(samples)
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    inputs, named = [_cast(x[:2], dtype) for x in inputs], {k: _cast(x[:2], dtype) for k, x in named.items()}
    shapes = " and ".join(str(list(x.shape[1:])) for x in (*inputs, *named.values()))
    training = module.training
    try:
        with torch.no_grad():
            outputs = module.eval()(*inputs, **named)
            _check_training(module, inputs, named, key)
    except (RuntimeError, ValueError, IndexError, TypeError) as e:
        raise BadInput(f"{key}.name: the module does not take inputs of shape {shapes}: {_line(e)}") from e
    finally:
        module.train(training)
    if not isinstance(outputs, Tensor):
        raise BadInput(f"{key}.name: the module must return one tensor, and it returns a {type(outputs).__name__}")
    _check_labels(outputs, target, task, key)
    _check_task(outputs, target[:2], task, key)


def _check_training(module: nn.Module, inputs, named, key: str) -> None:
    draw_from(module, None)
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        functional_call(module.train(), buffers, tuple(inputs), named)
        drew = not torch.equal(before, torch.get_rng_state())
    if drew:
        raise BadInput(
            f"{key}.name: the module draws random numbers of its own while it trains (F.dropout?), which undrift "
            f"cannot repeat; use nn.Dropout"
        )
    moved = [name for name, b in module.named_buffers() if not torch.equal(b, buffers[name])]
    if moved:
        raise BadInput(
            f"{key}.name: {', '.join(moved)} change while the module trains, which no client would send back"
        )


def _check_labels(outputs: Tensor, target: Tensor, task: Task, key: str) -> None:
    low, high = target.min().item(), target.max().item()
    if task.loss is binary_cross_entropy and not 0 <= low <= high <= 1:
        raise BadInput(f'task.loss: "binary-cross-entropy" takes labels from 0 to 1, and the data hold {low} to {high}')
    if task.loss is not cross_entropy:
        return
    if target.is_floating_point() or low < 0:
        found = "numbers that are not whole" if target.is_floating_point() else low
        raise BadInput(f'task.loss: "cross-entropy" takes labels that count from 0, and the data hold {found}')
    if outputs.shape[:-1] == target[:2].shape and high >= outputs.shape[-1]:
        raise BadInput(
            f"{key}.name: the module has {outputs.shape[-1]} outputs, and the labels go up to {high}: "
            f"it needs {high + 1}"
        )


def _check_task(outputs: Tensor, target: Tensor, task: Task, key: str) -> None:
    fit = f"{key}.name: outputs of shape {list(outputs.shape[1:])} and labels of shape {list(target.shape[1:])}"
    try:
        losses = task.loss(outputs, target)
        for metric in task.fresh():
            metric.update(outputs, target)
    except BadInput:
        raise
    except Exception as e:  # a user's own loss or metric may raise anything
        if users_frames(e):
            raise users_failure(e, "task", "a loss or metric") from e
        raise BadInput(f"{fit} do not fit the task: {_line(e)}") from e
    if not isinstance(losses, Tensor) or losses.shape != target.shape[:1]:
        found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise BadInput(f"task.loss must return one number per sample, {list(target.shape[:1])}, and it returns {found}")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
