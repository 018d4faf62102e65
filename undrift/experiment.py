"""From a configuration to something that runs: data, model, method, driver."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from . import config, models, optim
from .algorithm import Algorithm, chain, said
from .algorithms import make as make_algorithm
from .choose import DTYPES, Choices, engine, place, settle
from .data import HeldOut, Pooled, Samples, Source
from .data import make as make_source
from .data.source import each, length
from .errors import BadInput
from .evaluate import Evaluator
from .files import read_tensors
from .gradients import Net
from .modules import CounterDropout, check_output
from .participation import participations
from .planning import Effort, Planner
from .portable import state_dict
from .round import Simulation
from .schedule import rates
from .tasks import Task, parts
from .vector import parameters
from .work import Batch, Local


@dataclass
class Built:
    """An experiment that can be played."""

    simulation: Simulation
    evaluate: Evaluator
    choices: Choices
    notices: list[str]


def build(
    experiment: config.Experiment, choices: Choices | None = None, pause: Callable[[], None] = lambda: None
) -> Built:
    """Everything that a run needs; `choices` of a run that is resumed are kept. `pause` may end an evaluation early."""
    e = experiment
    if e.run.keep_best and not e.data.validation:
        raise BadInput("run.keep_best needs a validation share to judge by, as in data.validation = 0.1")
    if choices is None:
        device, precision, threads = place(e.run)
    else:
        device, precision, threads = choices.device, choices.precision, choices.threads
        settle(device, precision, threads, e.run.deterministic)
    dtype = DTYPES[precision]
    algorithm = method(e)
    source = data(e).to(device)
    task = Task.make({"loss": e.task.loss, "metrics": e.task.metrics}, source.classes, e.folder)
    module = model(e, source, task, dtype).to(device)
    net = Net(module, task.loss)
    x = parameters(module, net.layout, dtype, device)
    planner = plan(e, algorithm, source, net, dtype, device)
    notices: list[str] = []
    if choices is None:
        cohort = 1 if not algorithm.sends else len(planner.participation.cohort(0))
        how, chunk, notices = engine(e.run, net, x, sample_batch(source, e, dtype, device), cohort, threads, precision)
        choices = Choices(device, precision, threads, how, chunk)
    simulation = Simulation(
        algorithm, net, x, [planner], rates(e.local.lr, table(e.local.schedule), e.run.rounds), local(e),
        engine=choices.engine, chunk=choices.chunk,
    )  # fmt: skip
    evaluate = Evaluator(net, task, source, bool(e.data.validation), e.run.seed, pause)
    return Built(simulation, evaluate, choices, notices)


def table(value: str | dict | None) -> dict | None:
    return {"name": value} if isinstance(value, str) else value


def data(e: config.Experiment) -> Source:
    """The clients' data, less the validation share."""
    options = {"name": e.data.name, **e.data.options}
    if e.data.folder is not None:
        options["folder"] = e.data.folder
    if e.data.partition is not None:
        options["partition"] = e.data.partition
    if e.data.normalise:
        options["normalise"] = True
    seed = e.run.seed if e.data.seed is None else e.data.seed
    source = make_source(options, seed=seed, folder=e.folder)
    return HeldOut(source, e.data.validation, seed) if e.data.validation else source


def model(e: config.Experiment, source: Source, task: Task, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The initial model, checked against the data."""
    some = source.client(0)
    if length(some) < 2:  # a layer may treat a batch of one in a way of its own
        some = each(lambda t: torch.cat([t, t]), some)
    seed = e.run.seed if e.model.seed is None else e.model.seed
    module = models.build(
        {"name": e.model.name, **e.model.options}, shape=input_shape(some),
        classes=source.classes, seed=seed, batchnorm=e.model.batchnorm, folder=e.folder,
    )  # fmt: skip
    check_output(module, each(lambda t: t.cpu(), some), task)
    module = module.to(dtype)  # before the weights come in: a float64 run's stay what they are
    if e.model.weights is not None:
        begin_from(module, Path(e.model.weights), e.folder)
    return module.train()


def input_shape(samples: Samples) -> tuple | list[tuple]:
    """The shape of one input sample, of each where a module takes several."""
    inputs, named, _ = parts(samples)
    shapes = [tuple(t.shape[1:]) for t in (*inputs, *named.values())]
    return shapes[0] if len(shapes) == 1 else shapes


def begin_from(module: nn.Module, given: Path, folder: str | None) -> None:
    """Loads `model.weights`: a state_dict in safetensors, or the last model of a run's folder."""
    path = next((p for p in (Path(folder or ".") / given, given) if p.exists()), None)
    if path is None:
        raise BadInput(f"model.weights: there is no {given} beside the TOML or in the current folder")
    try:
        state = state_dict(path) if path.is_dir() else read_tensors(path)
    except BadInput as error:
        raise BadInput(f"model.weights: {error}") from error
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise BadInput(f"model.weights: {path} does not fit the model: {' '.join(str(error).split())[:300]}") from error


def method(e: config.Experiment) -> Algorithm:
    named = {"name": e.algorithm.name, **e.algorithm.options}
    if e.algorithm.parts:
        named["parts"] = e.algorithm.parts
    try:
        made = make_algorithm(named, folder=e.folder)
    except BadInput as error:  # the stack knows its parts, not where they were typed
        raise error if str(error).startswith("algorithm") else BadInput(f"algorithm: {error}") from error
    if covered := [type(part).__name__ for part in chain(made) if part.covered]:
        raise BadInput(
            f"algorithm.parts: {', '.join(covered)} work on the block of the model that a client is given in a round, "
            f"and this version gives none: leave them out"
        )
    return made


def plan(e: config.Experiment, algorithm: Algorithm, source: Source, net: Net, dtype, device) -> Planner:
    """Who trains when and on what; for centralised training, the same number of steps on everything at once."""
    p = e.participation
    options = {"name": p.name, **p.options}
    if "rate" not in options:  # Bernoulli's own way to say how many
        options["clients"] = p.clients
    participation = participations.build(
        options, key="participation", folder=e.folder, given={"population": source.population, "seed": e.run.seed},
        also=("weights", "variates"),
    )  # fmt: skip
    # Shares take the number of all examples, which a method without means over all clients need not wait for.
    variates = p.variates if said(algorithm, "over_all") else "uniform"
    if p.weights == "examples" and variates == "shares" and source.examples is None:
        raise BadInput(
            f'participation.weights = "examples": {e.data.name} cannot say how many examples its {source.population} '
            f'clients have together, which {e.algorithm.name} needs; weights = "uniform" works'
        )
    planner = Planner(
        source=source,
        participation=participation,
        effort=Effort(e.local.batch, e.local.epochs, e.local.steps, e.local.drop_last),
        seed=e.run.seed,
        size=net.layout.size,
        weights=p.weights,
        variates=variates,
        dropout=any(isinstance(m, CounterDropout) for m in net.module.modules()),
        dtype=dtype,
        device=device,
    )
    if algorithm.sends:
        return planner
    alone = participations.build(
        {"name": "uniform", "clients": 1}, key="participation", given={"population": 1, "seed": 0}
    )
    return replace(planner, source=Pooled(source), participation=alone, as_many_as=planner)


def local(e: config.Experiment) -> Local:
    """The base loop's options."""
    chosen = table(e.local.optimizer)
    settings = {k: v for k, v in chosen.items() if k != "name"}
    if e.local.momentum:
        if "momentum" not in inspect.signature(optim.OPTIMIZERS[chosen["name"]]).parameters:
            raise BadInput(f"local.momentum goes with the optimizer sgd, and local.optimizer is {chosen['name']}")
        settings["momentum"] = e.local.momentum
    return Local(
        optim.OPTIMIZERS[chosen["name"]](**settings), clip=e.local.clip, decay=e.local.weight_decay, l2=e.local.l2
    )


def sample_batch(source: Source, e: config.Experiment, dtype, device) -> Batch:
    """One client's mini-batch, for trying and timing."""
    rows, fetch = source.open([0])
    at = torch.from_numpy(rows[0][: e.local.batch])

    def cast(t: Tensor) -> Tensor:
        return t.to(device, dtype if t.is_floating_point() else t.dtype)

    return Batch(each(cast, fetch(at)), torch.ones(len(at), dtype=dtype, device=device))
