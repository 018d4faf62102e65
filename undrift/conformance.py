"""Replays conformance vectors: trajectories on small problems with given cohorts, steps and mini-batches, to 1e-9.

The product's own round plays them, and the methods come from the registry that `[algorithm]` uses; `METHODS` is the one
table of what the vectors call by other names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from .algorithm import Algorithm, Around
from .algorithms import make
from .cohort import Plan
from .errors import BadInput
from .gradients import Net
from .optim import SGD, Adam
from .round import Simulation
from .vector import parameters
from .work import Batch, Local, Work

VECTORS = Path(__file__).parent / "vectors"
TOLERANCE = 1e-9


class Unknown(Exception):
    """A run that names a method, a setting or a problem that this version does not have."""


# ---------------------------------------------------------------- the problems


class Quadratic(nn.Module):
    """0.5 (x - b)' A (x - b)"""

    def __init__(self, size: int):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size))

    def forward(self, A, b):
        d = self.x - b
        return 0.5 * (d.unsqueeze(-2) @ A @ d.unsqueeze(-1)).reshape(-1)


def dense(sizes: list[int]) -> nn.Module:
    """tanh on the hidden layers, none on the logits."""
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))[:-1]


class Problem:
    """A problem of a file: its clients' data, its net, its start."""

    def __init__(self, given: dict, dtype: torch.dtype):
        self.n, self.l2 = given["n"], given.get("reg", 0.0)
        x = torch.tensor(given["x0"], dtype=dtype)
        if given["kind"] == "quadratic":
            pairs = zip(given["A"], given["b"], strict=True)
            self.data = [tuple(torch.tensor([t], dtype=dtype) for t in (*pair, 0.0)) for pair in pairs]
            module, loss = Quadratic(len(x)), lambda outputs, target: outputs
        elif given["kind"] in ("softmax", "mlp"):
            pairs = zip(given["Z"], given["Y"], strict=True)
            self.data = [(torch.tensor(Z, dtype=dtype), torch.tensor(Y)) for Z, Y in pairs]
            module = dense(given["sizes"] if given["kind"] == "mlp" else [given["features"], given["classes"]])
            loss = nn.CrossEntropyLoss(reduction="none")
        else:
            raise Unknown(f"problem kind {given['kind']!r}")
        self.net = Net(module.to(dtype), loss)
        if self.net.layout.size != len(x):
            raise ValueError(f"x0 has {len(x)} coordinates, the net {self.net.layout.size}")
        self.x = x
        self.sampled = given["kind"] != "quadratic"


class GivenFeed:
    """The mini-batches that a schedule lists."""

    def __init__(self, problem: Problem, clients: list[int], steps: np.ndarray, batches: dict[int, list]):
        self.problem, self.clients, self.steps, self.batches = problem, clients, steps, batches

    def batch(self, k: int) -> Batch:
        return self._take([self._rows(i, k) for i in self.clients])

    def samples(self, k: int) -> int:
        return sum(len(self._rows(i, k)) for i, steps in zip(self.clients, self.steps, strict=True) if k < steps)

    def full(self):
        rows = [list(range(len(self.problem.data[i][0]))) for i in self.clients]
        return [(self._take(rows), sum(len(r) for r, k in zip(rows, self.steps, strict=True) if k))]

    def _rows(self, client: int, k: int) -> list[int]:
        if not self.problem.sampled:
            return [0]
        return self.batches[client][min(k, len(self.batches[client]) - 1)]  # of a row that has finished, anything

    def _take(self, rows: list[list[int]]) -> Batch:
        width = max(map(len, rows))
        index = torch.tensor([r + [0] * (width - len(r)) for r in rows])
        weight = torch.tensor([[1.0] * len(r) + [0.0] * (width - len(r)) for r in rows], dtype=self.problem.x.dtype)
        data = [self.problem.data[i] for i in self.clients]
        return Batch(
            tuple(torch.stack([d[j][r] for d, r in zip(data, index, strict=True)]) for j in range(len(data[0]))), weight
        )


def check_schedule(problem: Problem, s: dict) -> None:
    """A round that names clients, samples or steps that there are not is refused, not read from the other end."""
    if not s["cohort"] or any(not 0 <= i < len(problem.n) for i in s["cohort"]):
        raise ValueError(f"a cohort must name clients from 0 to {len(problem.n) - 1}, not {s['cohort']}")
    for i, steps, batches in zip(s["cohort"], s["steps"], s.get("batches", [[]] * len(s["cohort"])), strict=True):
        if problem.sampled and len(batches) < steps:
            raise ValueError(f"client {i} makes {steps} steps and has {len(batches)} mini-batches")
        if any(not 0 <= row < len(problem.data[i][0]) for batch in batches for row in batch):
            raise ValueError(f"a mini-batch of client {i} names a sample that it does not have")


@dataclass(frozen=True)
class GivenPlanner:
    """Plans the rounds of a run as its schedule lists them."""

    problem: Problem
    run: dict
    schedule: list[dict]

    @property
    def population(self) -> int:
        return len(self.problem.n)

    def facts_of_one(self) -> dict:
        return {}

    def round(self, r: int) -> Plan:
        s, hp = self.schedule[r], self.run["hp"]
        clients, examples = np.array(s["cohort"]), np.array([self.problem.n[i] for i in s["cohort"]])
        weighted = hp.get("weighted", self.run["algorithm"] == "fednova")
        check_schedule(self.problem, s)
        batches = dict(zip(s["cohort"], s.get("batches", [None] * len(clients)), strict=True))
        ones = np.ones(len(clients))
        return Plan(
            clients=clients,
            steps=np.array(s["steps"]),
            examples=examples,
            weight=examples / examples.sum() if weighted else ones / len(clients),
            share=ones / self.population,
            lost=np.isin(clients, s.get("lost", [])),
            feed=lambda ids, steps: GivenFeed(self.problem, ids, steps, batches),
            uniform=lambda i, name: self._uniform(r, i, name),
            facts=lambda i: {},
            cover=self._covers(r),
        )

    def _uniform(self, r: int, client: int, name: str) -> torch.Tensor:
        given = self.run["uniforms_dc" if name == "dc" else "uniforms"][r]
        return torch.tensor(given[self.schedule[r]["cohort"].index(client)], dtype=self.problem.x.dtype)

    def _covers(self, r: int):
        hp = self.run["hp"]
        if "own" in hp:
            return lambda i: torch.tensor(hp["own"][i], dtype=torch.bool)
        if "groups" not in self.run:
            return None
        mine = {i: block for block, group in zip(hp["blocks"], self.run["groups"][r], strict=True) for i in group}
        return lambda i: torch.isin(torch.arange(len(self.problem.x)), torch.tensor(mine[i] + hp.get("shared", [])))


# ---------------------------------------------------------------- the methods

# Of the local steps, the means and the given draws: not of the method.
EVERYWHERE = {"eta", "decay", "wd", "clip", "rho", "weighted", "own", "blocks", "shared"}


def taken(hp: dict, *same: str, **renamed: str) -> dict:
    """Settings taken out of `hp`: `same` under their own names, `renamed` (theirs = ours) under ours."""
    names = dict(zip(same, same, strict=True)) | renamed
    return {ours: hp.pop(theirs) for theirs, ours in names.items() if theirs in hp}


def part(name: str, hp: dict, *same: str, **renamed: str) -> dict:
    return {"part": name, **taken(hp, *same, **renamed)}


def method(name: str, *same: str, **renamed: str):
    """A name of ours; the keyword arguments say what their settings are called here."""
    return lambda hp: {"name": name, **taken(hp, *same, eta_g="server_lr", **renamed), "parts": []}


def around(*makers):
    """Parts around plain averaging."""

    def make(hp):
        parts = [p for make in makers for p in make(hp)]
        return {"name": "fedavg", "parts": parts, **taken(hp, eta_g="server_lr")}

    return make


def always(name: str, *same: str, **renamed: str):
    return lambda hp: [part(name, hp, *same, **renamed)]


def optional(key: str, name: str, *same: str, **renamed: str):
    """A part that is there where `key` is, and not 0 or false."""

    def make(hp):
        if not hp.get(key):
            hp.pop(key, None)
            return []
        return [part(name, hp, *same, **renamed)]

    return make


def flag(key: str, name: str):
    """A part without settings that is there where `key` is true."""
    return lambda hp: [{"part": name}] if hp.pop(key, False) else []


def guessing(momentum: str | None = None):
    """The part of a `guess`: a number, "inf" or {"tau": target}; with the clients' momentum where a run calls it so."""

    def make(hp):
        if "guess" not in hp and momentum not in hp:
            return []
        n = hp.pop("guess", 0)
        told = {"target": n["tau"]} if isinstance(n, dict) else {"guesses": n}
        return [{"part": "gel", **told, **(taken(hp, **{momentum: "momentum"}) if momentum else {})}]

    return make


def opt(hp: dict) -> dict:
    kind = hp.pop("kind")
    if kind == "adagrad":
        hp.pop("b2", None)  # it has none
    found = method(f"fed{kind}", "b1", "b2", tau="adaptivity")(hp)
    return found | {"parts": guessing("alpha")(hp)}


def cm(hp: dict) -> dict:
    """Their eta_g is in units of gradients, gamma is what others call eta_g."""
    found = around(always("client-momentum", "alpha", eta_g="raw"), guessing(), lookahead)(hp)
    return found | taken(hp, gamma="server_lr")


def scaffold(hp: dict) -> dict:
    return method("scaffold", "option")(hp) | {"parts": [*guessing()(hp), *lookahead(hp)]}


def mimes(hp: dict) -> dict:
    lite, beta = hp.pop("lite", False), hp.pop("beta", 0)
    if not beta:
        return method("fedavg" if lite else "mime")(hp)
    return around(lambda hp: [{"part": "mime-lite" if lite else "mime-momentum", "beta": beta}])(hp)


def scaffold_m(hp: dict) -> dict:
    return around(always("client-momentum", gamma="raw", beta="alpha"), always("control-variates"))(hp)


def theory(hp: dict) -> dict:
    return around(always("ghbm-theory", "beta", "tau", "missing", eta_g="rate"))(hp)


def newton(work: Work, x: torch.Tensor) -> torch.Tensor:
    """y = argmin of a quadratic objective, corrections included: FedDyn's exact local solve."""

    def body(step, y):
        g = step.grad(y)
        H = torch.stack([step.grad(y + e) - g for e in torch.eye(y.shape[-1], dtype=y.dtype)], -1)
        return (y - torch.linalg.solve(H, g.unsqueeze(-1)).squeeze(-1),)

    return work.run(body, x)[0]


def solved_exactly(algorithm: Algorithm) -> Algorithm:
    if isinstance(algorithm, Around):
        return replace(algorithm, inner=solved_exactly(algorithm.inner))
    return replace(algorithm, solve=newton)


lookahead = optional("lam", "lookahead", "lam")
quantised = always("qsgd", "s")
bcgd = (flag("freeze", "freeze"), always("server-momentum", lam="beta"))
plus = (always("server-momentum", lam="beta"), always("controlled-svrg", "state"), always("blocks"))
ghbm = ("beta", "tau", "warmup", "nesterov")

METHODS = {  # their name -> our [algorithm] table, from their settings, which are taken out
    "fedavg": method("fedavg"),
    "fedprox": method("fedprox", "mu"),
    "fedavgm": around(always("server-momentum", "beta"), optional("mu", "prox", "mu")),
    "fedopt": opt,
    "scaffold": scaffold,
    "scaffold_topk": around(always("control-variates"), always("top-k", "k")),
    "scaffold_m": scaffold_m,
    "mime": mimes,
    "feddyn": around(always("dyn", "alpha"), lookahead),
    "adabest": around(always("adabest", "mu", "beta")),
    "feddc": around(always("dc", "alpha", "variate", server="drift")),
    "fedcm": cm,
    "fedadc": around(always("adc", "beta_g", "beta_l", "alpha", "nesterov")),
    "ghbm": around(always("ghbm", *ghbm), guessing()),
    "localghbm": around(always("local-ghbm", "beta", C="share")),
    "fedhbm": around(always("hbm", "beta", C="share")),
    "fedhbm_topk": around(always("hbm", "beta"), always("top-k", "k")),
    "ghbm_server": around(always("ghbm-server", *ghbm[:3])),
    "ghbm_theory": theory,
    "fedacg": method("fedacg", "lam", "beta"),
    "fedacg_q": lambda hp: method("fedacg", "lam", "beta")(hp) | {"parts": quantised(hp)},
    "fedavgcm": around(optional("mu", "prox", "mu"), guessing("alpha")),
    "fedavg_adam": around(guessing()),
    "fednova": around(always("nova"), guessing("alpha")),
    "fedbcgd": around(*bcgd, always("blocks")),
    "fedbcgd_q": around(*bcgd, always("blocks"), quantised),
    "fedbcgd_plus": around(*plus),
    "fedbcgd_plus_q": around(*plus, quantised),
    "fedpaq": around(quantised),
    "fedtopk": around(flag("error_feedback", "error-feedback"), always("top-k", "k")),
    "heterofl": around(guessing("alpha"), always("sub-model"), always("blocks")),
}


def table(run: dict) -> dict:
    """The `[algorithm]` table of a run."""
    theirs, hp = run["algorithm"], {k: v for k, v in run["hp"].items() if k not in EVERYWHERE}
    if theirs not in METHODS:
        raise Unknown(f"method {theirs}")
    if theirs == "fedavg_adam":
        taken(hp, "b1", "b2", "eps")  # of the local optimizer
    hp.pop("exact", None)  # of the local solve
    found = METHODS[theirs](hp)
    hp = {k: v for k, v in hp.items() if v}  # what is spelt out and off changes nothing
    if hp:
        raise Unknown(f"setting {', '.join(sorted(hp))} of {theirs}")
    return found


def algorithm(run: dict) -> Algorithm:
    made = make(table(run))
    return solved_exactly(made) if run["hp"].get("exact") else made


def local(run: dict, l2: float) -> Local:
    hp = run["hp"]
    optimizer = Adam(hp["b1"], hp["b2"], hp["eps"]) if "eps" in hp else SGD(hp.get("rho", 0.0))
    return Local(optimizer, clip=hp.get("clip"), decay=hp.get("wd", 0.0), l2=l2)


# ---------------------------------------------------------------- replaying


@dataclass(frozen=True)
class Verdict:
    """What became of a run: "passed", "failed" (with the first bad round, from 1, and the largest difference) or
    "unknown"."""

    id: str
    status: str
    why: str = ""
    gap: float = 0.0


def replay(document: dict, run: dict, engine: str = "loop", chunk: int = 64, dtype=torch.float64) -> Iterator:
    """A (model, floats down, floats up) for each round."""
    problem = Problem(document["problems"][run["problem"]], dtype)
    schedule, hp = document["schedules"][run["problem"]][run["schedule"]], run["hp"]
    planner = GivenPlanner(problem, run, schedule)
    x = parameters(problem.net.module, problem.net.layout, dtype).copy_(problem.x)
    simulation = Simulation(
        algorithm(run), problem.net, x, [planner], rate=lambda r: hp["eta"] * hp.get("decay", 1.0) ** r,
        local=local(run, problem.l2), engine=engine, chunk=chunk,
    )  # fmt: skip
    for _ in schedule:
        played = simulation.play()
        simulation.keep(played)
        record = played.records[0]["record"]
        yield simulation.model(), record["floats_down"], record["floats_up"]


def verify_run(document: dict, run: dict, tolerance: float = TOLERANCE, **how) -> Verdict:
    """Replays one run and compares every model, and the floats that travelled."""
    worst, run = 0.0, run | {"hp": {k: v for k, v in run["hp"].items() if v is not None}}
    try:
        rounds = replay(document, run, **how)
        pairs = zip(rounds, run["x"][1:], run["floats_down"], run["floats_up"], strict=True)
        for r, ((x, down, up), truth, floats_down, floats_up) in enumerate(pairs, 1):
            truth = torch.tensor(truth, dtype=torch.float64)
            if truth.shape != x.shape:
                raise ValueError(f"x of round {r} has shape {list(truth.shape)}, the model {list(x.shape)}")
            gap = float((x.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-300))
            worst = max(worst, gap) if math.isfinite(gap) else math.inf
            if worst > tolerance:
                return Verdict(run["id"], "failed", f"round {r}: the model differs by {worst:.1e}", worst)
            if (down, up) != (floats_down, floats_up):
                why = f"round {r}: {down} floats down and {up} up, expected {floats_down:g} and {floats_up:g}"
                return Verdict(run["id"], "failed", why, worst)
    except Unknown as error:
        return Verdict(run["id"], "unknown", str(error))
    return Verdict(run["id"], "passed", gap=worst)


def read(path: Path) -> dict:
    """A file of vectors, its outline checked."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict) or not all(k in document for k in ("problems", "schedules", "runs")):
        raise BadInput(f"{path} holds no conformance vectors: it must have problems, schedules and runs")
    if not isinstance(document["runs"], list) or not all(isinstance(run, dict) for run in document["runs"]):
        raise BadInput(f"{path}: runs must be a list of tables")
    for n, run in enumerate(document["runs"]):
        lacks = {"id", "algorithm", "problem", "schedule", "hp", "x", "floats_down", "floats_up"} - set(run)
        if lacks:
            raise BadInput(f"{path}: run {n + 1} lacks {', '.join(sorted(lacks))}")
    return document
