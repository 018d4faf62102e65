"""Replays conformance vectors: trajectories on small problems with given cohorts, steps and mini-batches, to 1e-9.

The product's own round plays them, and the methods come from the registry that `[algorithm]` uses; `METHODS` is the one
table of what the vectors call by other names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from .algorithms import make
from .cohort import Plan
from .errors import BadInput
from .gradients import Net
from .optim import SGD, Adam
from .round import Simulation
from .vector import parameters
from .work import Batch, Local

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
            raise Unknown(f"x0 has {len(x)} coordinates, the net {self.net.layout.size}")
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
        return self.batches[client][min(k, len(self.batches[client]) - 1)]

    def _take(self, rows: list[list[int]]) -> Batch:
        width = max(map(len, rows))
        index = torch.tensor([r + [0] * (width - len(r)) for r in rows])
        weight = torch.tensor([[1.0] * len(r) + [0.0] * (width - len(r)) for r in rows], dtype=self.problem.x.dtype)
        data = [self.problem.data[i] for i in self.clients]
        return Batch(
            tuple(torch.stack([d[j][r] for d, r in zip(data, index, strict=True)]) for j in range(len(data[0]))), weight
        )


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

EVERYWHERE = {"eta", "decay", "wd", "clip", "rho", "weighted"}  # of the local steps and the means, not of the method
SERVER = {"eta_g": "server_lr"}
METHODS: dict[str, tuple[str, dict[str, str]]] = {  # their name -> ours, their keys -> ours
    "fedavg": ("fedavg", SERVER),
    "fedprox": ("fedprox", SERVER | {"mu": "mu"}),
    "fedavgm": ("fedavgm", SERVER | {"beta": "beta"}),
    "fedopt": ("fed{kind}", SERVER | {"b1": "b1", "b2": "b2", "tau": "adaptivity"}),
    "scaffold": ("scaffold", SERVER | {"option": "option"}),
    "fedcm": ("fedcm", {"alpha": "alpha", "gamma": "server_lr"}),
    "fedacg": ("fedacg", {"lam": "lam", "beta": "beta"}),
    "mime": ("mime", SERVER),
    "fedavg_adam": ("fedavg", SERVER),
    "fedavgcm": ("fedavg", SERVER),
}
RAW_SERVER_RATE = {"fedcm"}  # their eta_g is in units of gradients: a part's setting, no method of ours by that name
LOOKAHEAD = {"fedcm", "scaffold"}  # methods whose `lam` is a lookahead around them


def table(run: dict) -> dict:
    """The `[algorithm]` table of a run."""
    hp, theirs = dict(run["hp"]), run["algorithm"]
    if theirs not in METHODS:
        raise Unknown(f"method {theirs}")
    if theirs == "mime" and (hp.get("lite") or hp.get("beta")):
        raise Unknown("mime with lite or beta")
    for off in ("lite", "beta") if theirs == "mime" else ():
        hp.pop(off, None)
    name, renamed = METHODS[theirs]
    out = {"name": name.format(**hp), "parts": []}
    if hp.pop("kind", None) == "adagrad":
        hp.pop("b2", None)  # it has none
    if theirs in RAW_SERVER_RATE and "eta_g" in hp:
        out = {
            "name": "fedavg",
            "parts": [{"part": "client-momentum", "alpha": hp.pop("alpha"), "raw": hp.pop("eta_g")}],
        }
    if theirs != "fedprox" and "mu" in hp:
        out["parts"].append({"part": "prox", "mu": hp.pop("mu")})
    if (theirs in ("fedavgcm", "fedopt") and "alpha" in hp) or "guess" in hp:
        out["parts"].append(guess(hp, "alpha" if theirs in ("fedavgcm", "fedopt") else None))
    if theirs == "fedavg_adam":
        for key in ("b1", "b2", "eps"):
            hp.pop(key)
    if theirs in LOOKAHEAD and hp.pop("lam", 0):
        out["parts"].append({"part": "lookahead", "lam": run["hp"]["lam"]})
    for key, value in hp.items():
        if key in renamed:
            out[renamed[key]] = value
        elif key not in EVERYWHERE:
            raise Unknown(f"setting {key} of {theirs}")
    return out


def guess(hp: dict, momentum: str | None) -> dict:
    """The part of a run's `guess`: a number, "inf" or {"tau": target}."""
    n = hp.pop("guess", 0)
    part = {"part": "gel"} | ({"target": n["tau"]} if isinstance(n, dict) else {"guesses": n})
    alpha = hp.pop(momentum, None) if momentum else None
    return part if alpha is None else part | {"momentum": alpha}


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
        make(table(run)), problem.net, x, [planner], rate=lambda r: hp["eta"] * hp.get("decay", 1.0) ** r,
        local=local(run, problem.l2), engine=engine, chunk=chunk,
    )  # fmt: skip
    for _ in schedule:
        played = simulation.play()
        simulation.keep(played)
        record = played.records[0]["record"]
        yield simulation.model(), record["floats_down"], record["floats_up"]


def verify_run(document: dict, run: dict, tolerance: float = TOLERANCE, **how) -> Verdict:
    """Replays one run and compares every model, and the floats that travelled."""
    worst = 0.0
    try:
        rounds = replay(document, run, **how)
        pairs = zip(rounds, run["x"][1:], run["floats_down"], run["floats_up"], strict=True)
        for r, ((x, down, up), truth, floats_down, floats_up) in enumerate(pairs, 1):
            truth = torch.tensor(truth, dtype=torch.float64)
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
    for n, run in enumerate(document["runs"]):
        lacks = {"id", "algorithm", "problem", "schedule", "hp", "x", "floats_down", "floats_up"} - set(run)
        if lacks:
            raise BadInput(f"{path}: run {n + 1} lacks {', '.join(sorted(lacks))}")
    return document
