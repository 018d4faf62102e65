"""The methods by the names that people type, each a stack of parts; and the parts, for stacks of one's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..algorithm import Algorithm, Around, stack
from ..codecs import QSGD, ErrorFeedback, TopK
from ..errors import BadInput
from ..registry import Registry
from .adc import ADC
from .blocks import Blocks, ControlledSVRG, Freeze, SubModel
from .control import ControlVariates
from .dynamic import DC, AdaBest, Dyn
from .fedavg import Centralised, FedAvg
from .gel import GEL
from .history import GHBM, LocalGHBM, ServerGHBM, TheoryGHBM
from .mime import Mime, MimeLite, MimeMomentum
from .momentum import ClientMomentum
from .nova import Nova
from .prox import Prox
from .ranges import Fraction, Momentum, NotNegative, Positive
from .server import Adaptive, Lookahead, ServerMomentum

algorithms = Registry("algorithm", group="undrift.algorithms")
parts = Registry("part", group="undrift.parts")

for name, part in {
    "prox": Prox,
    "server-momentum": ServerMomentum,
    "adaptive": Adaptive,
    "lookahead": Lookahead,
    "control-variates": ControlVariates,
    "client-momentum": ClientMomentum,
    "adc": ADC,
    "ghbm": GHBM,
    "ghbm-server": ServerGHBM,
    "ghbm-theory": TheoryGHBM,
    "local-ghbm": LocalGHBM,
    "hbm": partial(LocalGHBM, moving=True, own_anchor=True),
    "mime": Mime,
    "mime-lite": MimeLite,
    "mime-momentum": MimeMomentum,
    "dyn": Dyn,
    "adabest": AdaBest,
    "dc": DC,
    "nova": Nova,
    "gel": GEL,
    "controlled-svrg": ControlledSVRG,
    "freeze": Freeze,
    "sub-model": SubModel,
    "blocks": Blocks,
    "qsgd": QSGD,
    "top-k": TopK,
    "error-feedback": ErrorFeedback,
}.items():
    parts.add(name, part)


@algorithms.register("fedavg", about="the mean of the clients' models (McMahan et al., 2017)")
def fedavg(server_lr: Positive = 1.0) -> Algorithm:
    return FedAvg(server_lr)


@algorithms.register("fedprox", about="a pull towards the received model (Li et al., 2020)")
def fedprox(mu: NotNegative = 0.01, server_lr: Positive = 1.0) -> Algorithm:
    return stack(FedAvg(server_lr), Prox(mu))


@algorithms.register("fedavgm", about="momentum on the server (Hsu et al., 2019)")
def fedavgm(beta: Momentum = 0.9, server_lr: Positive = 1.0) -> Algorithm:
    return stack(FedAvg(server_lr), ServerMomentum(beta))


@algorithms.register("fedadam", about="Adam on the server (Reddi et al., 2021)")
def fedadam(
    b1: Momentum = 0.9, b2: Momentum = 0.99, adaptivity: Positive = 1e-3, server_lr: Positive = 0.01
) -> Algorithm:
    return stack(FedAvg(server_lr), Adaptive("adam", b1, b2, adaptivity))


@algorithms.register("fedyogi", about="Yogi on the server (Reddi et al., 2021)")
def fedyogi(
    b1: Momentum = 0.9, b2: Momentum = 0.99, adaptivity: Positive = 1e-3, server_lr: Positive = 0.01
) -> Algorithm:
    return stack(FedAvg(server_lr), Adaptive("yogi", b1, b2, adaptivity))


@algorithms.register("fedadagrad", about="Adagrad on the server (Reddi et al., 2021)")
def fedadagrad(b1: Momentum = 0.0, adaptivity: Positive = 1e-3, server_lr: Positive = 0.01) -> Algorithm:
    return stack(FedAvg(server_lr), Adaptive("adagrad", b1, adaptivity=adaptivity))


@algorithms.register("scaffold", about="control variates on every client (Karimireddy et al., 2020)")
def scaffold(option: int = 2, server_lr: Positive = 1.0) -> Algorithm:
    if option not in (1, 2):
        raise BadInput(f"algorithm.option must be 1 or 2, not {option}")
    return stack(FedAvg(server_lr), ControlVariates(option))


@algorithms.register("fedcm", about="the last round's mean gradient in every local step (Xu et al., 2021)")
def fedcm(alpha: Fraction = 0.1, server_lr: Positive = 1.0) -> Algorithm:
    return stack(FedAvg(server_lr), ClientMomentum(alpha))


@algorithms.register("fedacg", about="clients start ahead along the server's momentum (Kim et al., 2024)")
def fedacg(lam: Momentum = 0.85, beta: NotNegative = 0.01) -> Algorithm:
    return stack(FedAvg(), Prox(beta), Lookahead(lam))


@algorithms.register("mime", about="the cohort's mean gradient corrects every step (Karimireddy et al., 2021)")
def mime(server_lr: Positive = 1.0) -> Algorithm:
    return stack(FedAvg(server_lr), Mime())


@algorithms.register("centralised", about="all data in one place, as many steps as the cohort's: the ceiling")
def centralised() -> Algorithm:
    return Centralised()


def make(table: dict, key: str = "algorithm", folder: str | Path | None = None) -> Algorithm:
    """The algorithm of `{name = "fedcm", alpha = 0.1, parts = [{part = "lookahead"}]}`: the parts go around what is
    named."""
    named = {"name": "fedavg"} | {k: v for k, v in table.items() if k != "parts"}
    base = algorithms.build(named, key=key, folder=folder, given={"inner": None}, also=("parts",))
    if isinstance(base, Around) and base.inner is None:
        base = stack(FedAvg(), base)  # a part of one's own, named as a method
    if not isinstance(base, Algorithm):
        raise BadInput(f"{key}.name: {named['name']} gives {type(base).__name__}, which is no undrift.Algorithm")
    around = []
    for i, part in enumerate(table.get("parts") or ()):
        at = f"{key}.parts[{i}]"
        one = parts.build(part, key=at, folder=folder, given={"inner": None})
        if not isinstance(one, Around):
            raise BadInput(f"{at}: {type(one).__name__} is no part (a subclass of undrift.Around)")
        around.append(one)
    return stack(base, *around)
