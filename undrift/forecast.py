"""`undrift plan`: what a run will take, before it runs, from shapes alone.

Rounds are played dry: the method's own messages on the model's real layout, counted by `wire` as in a run, while no
gradient is computed. A client takes one local step there; how many it would take, and on how many samples, follows
from the sizes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import config
from .algorithm import Algorithm
from .choose import DTYPES, VECTORS, allowed, largest_chunk, work_of
from .cohort import Plan
from .data import ArraySource, HeldOut, Source
from .errors import BadInput
from .experiment import data, local, method, model, plan, sample_batch
from .files import write
from .gradients import Net
from .planning import Effort, Planner
from .report import show_bytes, show_count, show_seconds
from .round import Simulation
from .running import flat
from .speeds import known
from .tasks import Task
from .vector import parameters
from .work import Batch

DRY_ROUNDS = 3  # the first differs (states begin), the second may, the third stands for the rest
DRY_CLIENTS = (2, 8)  # of a cohort, fewer of a large model's
DRY_VALUES = 10_000_000  # coordinates of a model that are worked on at least before there are fewer
EXACT_ROUNDS = 1000  # whose cohorts are looked at; of a longer run the rest is as they are on average
COUNTABLE = 100_000  # clients whose sizes are all looked at
SAMPLE = 1000


@dataclass(frozen=True)
class Forecast:
    """What `undrift plan` says; sums over a run are exact up to EXACT_ROUNDS rounds, unless uploads differ in size."""

    parameters: int
    population: int
    mean_size: float
    largest_size: int
    sampled: bool  # the sizes are those of a sample of the clients
    rounds: int
    cohort: float
    steps: tuple[int, float, int]  # of a client in a round: fewest, mean, most
    bytes_down: float  # of a client in a round
    bytes_up: float
    total_down: float
    total_up: float
    gradients: float  # in a round
    total_gradients: float
    exact: bool
    client_state: int  # bytes
    server_state: int
    memory: float  # bytes, roughly
    seen: float  # times that a client is
    seconds: float | None  # None: this machine's speed is not known

    def lines(self) -> list[str]:
        """As `undrift plan` prints it."""
        about = "" if self.exact else "about "
        down, up = (f"{about}{show_bytes(total)}" for total in (self.total_down, self.total_up))
        few, mean, most = self.steps
        sizes = f"{self.mean_size:,.1f} samples on average, {self.largest_size:,} at most"
        time = "unknown: this machine has not measured this model yet, the first run does"
        if self.seconds is not None:
            time = f"about {show_seconds(self.seconds)}, gradients alone, at this machine's measured speed"
        rows = {
            "model": f"{self.parameters:,} parameters",
            "clients": f"{self.population:,}; {sizes}" + (f" (of a sample of {SAMPLE:,})" if self.sampled else ""),
            "a round": f"{self.cohort:,.4g} clients, {few:,} to {most:,} local steps each ({mean:,.1f} on average)",
            "rounds": f"{self.rounds:,}; a client takes part {self.seen:,.3g} times on average",
            "bytes down": f"{show_bytes(self.bytes_down)} a client and round, {down} in all",
            "bytes up": f"{show_bytes(self.bytes_up)} a client and round, {up} in all",
            "gradients": f"{show_count(self.gradients)} a round, {about}{show_count(self.total_gradients)} in all "
            "(samples whose gradient is taken)",
            "state": f"{show_bytes(self.client_state)} a client, {show_bytes(self.server_state)} on the server",
            "memory": f"about {show_bytes(self.memory)} beside the data and a batch's activations",
            "time": time,
        }
        return [f"{name:<11} {text}" for name, text in rows.items()]


def forecast(e: config.Experiment) -> Forecast:
    """What a run of the experiment will take."""
    dtype = DTYPES.get(e.run.precision, torch.float32)
    algorithm, source = method(e), data(e)
    task = Task.make({"loss": e.task.loss, "metrics": e.task.metrics}, source.classes, e.folder)
    net = Net(model(e, source, task, dtype), task.loss)
    x = parameters(net.module, net.layout, dtype)
    planner = plan(e, algorithm, source, net, dtype, "cpu")
    played = dry_rounds(algorithm, net, x, planner, e)
    cohorts, last = Cohorts.of(planner, e.run.rounds), played[-1]
    sizes, sampled = some_sizes(source)
    cohort = float(cohorts.clients.mean())
    seen = e.run.rounds * cohort / planner.population
    batch = sample_batch(source, e, dtype, "cpu")
    chunk = largest_chunk(replace(e.run, memory="auto"), net, x, batch, max(1, round(cohort)))
    steps = cohorts.summed([p.calls for p in played], cohorts.steps)
    steps += cohorts.summed([p.fulls for p in played], cohorts.examples / e.local.batch)
    vectors = VECTORS * x.element_size() * net.layout.size * (1 if e.run.engine == "loop" else chunk)
    return Forecast(
        parameters=net.layout.size,
        population=source.population,
        mean_size=float(sizes.mean()),
        largest_size=int(sizes.max()),
        sampled=sampled,
        rounds=e.run.rounds,
        cohort=cohort,
        steps=(cohorts.fewest, float(cohorts.steps.sum() / cohorts.clients.sum()), cohorts.most),
        bytes_down=last.down,
        bytes_up=last.up,
        total_down=cohorts.summed([p.down for p in played], cohorts.clients),
        total_up=cohorts.summed([p.up for p in played], cohorts.clients),
        gradients=last.calls * float(cohorts.samples.mean()) + last.fulls * float(cohorts.examples.mean()),
        total_gradients=cohorts.summed([p.calls for p in played], cohorts.samples)
        + cohorts.summed([p.fulls for p in played], cohorts.examples),
        exact=e.run.rounds <= EXACT_ROUNDS and all(p.even for p in played) and played[-2:][0] == last,
        client_state=last.client_state,
        server_state=last.server_state,
        memory=last.server_state + last.client_state * planner.population * min(1.0, seen) + vectors,
        seen=seen,
        seconds=seconds(e, net, batch, chunk, steps),
    )


def some_sizes(source: Source) -> tuple[np.ndarray, bool]:
    """The clients' sizes, of a large population those of clients evenly spread over it, and whether it is these."""
    population = source.population
    if population <= COUNTABLE:
        return source.sizes(np.arange(population)), False
    return source.sizes(np.linspace(0, population - 1, SAMPLE).astype(np.int64)), True


def seconds(e: config.Experiment, net: Net, batch: Batch, chunk: int, steps: float) -> float | None:
    """The time for `steps` gradients of a mini-batch, where the table of speeds knows this model on this machine."""
    if e.run.device.startswith("cuda") or (e.run.device == "auto" and torch.cuda.is_available()):
        return None
    precision = "float32" if e.run.precision == "auto" else e.run.precision
    threads = allowed() if e.run.threads == "auto" else e.run.threads
    ways = ("loop", "vmap") if e.run.engine == "auto" else (e.run.engine,)
    found = known(work_of(net, batch, chunk, precision, threads), ways)
    return None if found is None else steps * min(found.values()) / chunk


# ---------------------------------------------------------------- who will take part


@dataclass(frozen=True)
class Cohorts:
    """Sums over the cohort of each of the first rounds."""

    rounds: int  # of the whole run
    clients: np.ndarray
    steps: np.ndarray
    samples: np.ndarray  # in the mini-batches of all local steps
    examples: np.ndarray
    fewest: int
    most: int

    @classmethod
    def of(cls, planner: Planner, rounds: int) -> Cohorts:
        sums, fewest, most = [], [], []
        for r in range(min(rounds, EXACT_ROUNDS)):
            clients = planner.participation.cohort(r)
            examples = planner.source.sizes(clients)
            steps = planner.steps(r, examples)
            sums.append((len(clients), steps.sum(), in_steps(planner.effort, examples, steps).sum(), examples.sum()))
            fewest.append(steps.min())
            most.append(steps.max())
        return cls(rounds, *np.array(sums, dtype=np.float64).T, int(min(fewest)), int(max(most)))

    def summed(self, each: list[float], counts: np.ndarray) -> float:
        """The sum over all rounds of what each costs, times how many it has; the last cost stands for all later."""
        costs = np.array([each[min(r, len(each) - 1)] for r in range(len(counts))])
        return float(costs @ counts + (self.rounds - len(counts)) * each[-1] * counts.mean())


def in_steps(effort: Effort, examples: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """How many samples are in the mini-batches of so many steps, the short last one of an epoch among them."""
    per_epoch = effort.per_epoch(examples)
    whole = np.minimum(examples, per_epoch * effort.batch)
    return steps // per_epoch * whole + np.minimum(steps % per_epoch * effort.batch, whole)


# ---------------------------------------------------------------- rounds without gradients


@dataclass(frozen=True)
class Played:
    """A dry round, of a client."""

    down: float
    up: float
    calls: float  # gradients of each sample in a local step
    fulls: float  # gradients over all of its data
    client_state: int
    server_state: int

    @property
    def even(self) -> bool:
        """Whether all clients may have cost the same."""
        return all(float(v).is_integer() for v in (self.down, self.up, self.calls, self.fulls))


class Dry:
    """A planner of the same rounds for a few of each cohort, a step each, whose batches hold nothing."""

    def __init__(self, planner: Planner):
        self.planner, self.population, self.facts_of_one = planner, planner.population, planner.facts_of_one
        self.fulls = 0

    def round(self, r: int) -> Plan:
        whole = self.planner.round(r)
        least, most = DRY_CLIENTS
        n = min(most, max(least, DRY_VALUES // self.planner.size))
        some = {name: getattr(whole, name)[:n] for name in ("clients", "steps", "examples", "weight", "share", "lost")}
        some["steps"], some["lost"] = np.ones_like(some["steps"]), np.zeros_like(some["lost"])
        return replace(whole, **some, feed=lambda ids, steps: self)

    def batch(self, k: int) -> Batch:
        return Batch((), torch.ones(1, 1, dtype=self.planner.dtype))

    def samples(self, k: int) -> int:
        return 1

    def full(self) -> list[tuple[Batch, int]]:
        self.fulls += 1
        return [(self.batch(0), 0)]


def dry_rounds(algorithm: Algorithm, net: Net, x: Tensor, planner: Planner, e: config.Experiment) -> list[Played]:
    """The first rounds of a run, a client each; what they do after the last of them is as in it."""
    dry = Dry(planner)
    simulation = Simulation(algorithm, net, x, [dry], lambda r: 1.0, local(e))
    simulation.gradient = lambda losses, vectors, y, batch: (torch.ones_like(y), y.new_ones(1))
    played = []
    for _ in range(min(DRY_ROUNDS, e.run.rounds)):
        dry.fulls = 0
        done = simulation.play()
        simulation.keep(done)
        record = done.records[0]["record"]
        n = record["cohort"]
        played.append(Played(
            record["bytes_down"] / n, record["bytes_up"] / n, record["gradients"] / n, dry.fulls / n,
            sum(v.nbytes for v in simulation.states[0].fresh.values()),
            sum(v.nbytes for v in flat(simulation).values()),
        ))  # fmt: skip
    return played


# ---------------------------------------------------------------- the partition


def write_partition(e: config.Experiment, path: Path) -> None:
    """Writes the index lists that `partition = {file = ...}` reads back to the same split."""
    source = data(e)
    while isinstance(source, HeldOut):
        source = source.source
    if not isinstance(source, ArraySource):
        raise BadInput(f"--partition: {e.data.name} is no array that is split over clients, so it has no index lists")
    write(path, json.dumps([rows.tolist() for rows in source.parts]).encode())
