"""What a model does on data that no client trains on: loss and metrics of the test set, by group, on validation
shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .data import Samples, Source
from .data.source import each, length
from .gradients import Net
from .rng import Stream, Use
from .tasks import Task, parts
from .work import Batch

BATCH = 1000
MOST_CLIENTS = 1000  # whose validation shares are looked at; of a larger population always the same ones


@dataclass(frozen=True)
class Evaluator:
    """`evaluate(x)` -> {"test_loss": ..., "test_accuracy": ..., "validation_...": ..., "client_..._mean": ...}.

    `pause` is called between batches: it may raise to end an evaluation early.
    """

    net: Net
    task: Task
    source: Source
    validated: bool  # the source holds out a share of every client's data
    seed: int
    pause: Callable[[], None] = lambda: None

    def __call__(self, x: Tensor) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        if (test := self.source.test()) is not None:
            loss, metrics = self._over([test], x)
            found |= named("test", loss, metrics[0])
        apart = None
        if self.validated:
            shares = [self.source.validation(int(i)) for i in self._clients()]
            shares = [s for s in shares if length(s)]
            loss, apart = self._over(shares, x)
            together = self.task.fresh()
            for one in apart:
                for whole, part in zip(together, one, strict=True):
                    whole.merge(part)
            found |= named("validation", loss, together)
        if (groups := self.source.groups()) is not None:
            apart = self._over(groups, x)[1]
        return found | (self._spread(apart) if apart else {})

    def _clients(self) -> np.ndarray:
        population = self.source.population
        if population <= MOST_CLIENTS:
            return np.arange(population)
        return Stream(self.seed, Use.HOLDOUT, 1).subset(population, MOST_CLIENTS)

    def _over(self, sets: Sequence[Samples], x: Tensor) -> tuple[float, list[list]]:
        """The mean loss over all sets together, and the metrics of each."""
        total, count, metrics = 0.0, 0, []
        for samples in sets:
            fresh = self.task.fresh()
            for start in range(0, length(samples), BATCH):
                self.pause()
                piece = each(lambda t, at=start: t[at : at + BATCH], samples)
                outputs, target = self._outputs(piece, x)
                total += float(self.task.loss(outputs, target).double().sum())
                count += len(target)
                for metric in fresh:
                    metric.update(outputs, target)
            metrics.append(fresh)
        return total / max(count, 1), metrics

    @torch.no_grad()
    def _outputs(self, samples: Samples, x: Tensor) -> tuple[Tensor, Tensor]:
        samples = each(lambda t: t.to(x.device, x.dtype if t.is_floating_point() else t.dtype), samples)
        self.net.module.eval()
        outputs = self.net.outputs(x, Batch(samples, torch.ones(1)))
        self.net.module.train()
        return outputs, parts(samples)[2]

    def _spread(self, apart: list[list]) -> dict[str, float | None]:
        """Over groups or clients: the mean, and the mean of the worst tenth."""
        found = {}
        for j, metric in enumerate(self.task.metrics):
            values = sorted(v for one in apart if (v := one[j].result()) is not None)
            if metric.better == "lower":
                values.reverse()
            worst = values[: -(-len(values) // 10)]
            for what, some in (("mean", values), ("worst10", worst)):
                found[f"client_{metric.name}_{what}"] = float(np.mean(some)) if some else None
        return found


def named(where: str, loss: float, metrics: list) -> dict[str, float | None]:
    return {f"{where}_loss": loss, **{f"{where}_{m.name}": m.result() for m in metrics}}
