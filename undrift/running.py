"""One run: rounds, evaluations, records, checkpoints, from the first round or from where it was left."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from . import __version__, config
from .cadence import Cadence
from .checkpoint import Checkpoint
from .choose import Choices
from .data import ArraySource, HeldOut, Pooled
from .errors import BadInput, Interrupted
from .experiment import Built, build, input_shape, table
from .failures import as_ours, is_of_memory
from .files import read_lines
from .portable import evaluated, write_module
from .record import CONFIG, RunFolder
from .round import Simulation
from .schedule import rests_on_rounds
from .signals import Stop, stopping
from .userfiles import sources

TOTALS = ("bytes_down", "bytes_up", "floats_down", "floats_up", "gradients")
WRITTEN = ("choices", "versions", "machine", "partition", "sources")  # in config.toml, for a resume to compare
REFUSALS = 10  # rounds in a row in which no finite update arrived: the run has diverged


@dataclass(frozen=True)
class Result:
    """What a run leaves: its folder and a record for each round."""

    folder: Path
    records: list[dict] = field(repr=False)
    diverged: bool = False
    played: bool = True  # False: there was nothing left to do


def run(
    experiment: config.Experiment,
    out: str | Path = "runs/run",
    resume: bool = False,
    on_round: Callable[[dict], None] = lambda record: None,
    notice: Callable[[str], None] = lambda text: None,
    record_also: dict | None = None,
) -> Result:
    """Runs an experiment into the folder `out`; with `resume` from its last checkpoint."""
    if (Path(out) / "comparison.json").exists():
        raise BadInput(f"{out} holds a comparison: choose another folder with --out")
    with RunFolder.open(out, resume) as folder, stopping() as stop, plainly():
        before = folder.config
        if before is not None:
            same_experiment(before, experiment, folder.path)
        choices = Choices(**before["recorded"]["choices"]) if before else None
        try:
            with stop.droppable():
                built = build(experiment, choices, pause=stop.ask)
                facts = recorded(built, experiment) | (record_also or {})
        except Interrupted as signal:
            raise Interrupted(f"{signal} before the first round: nothing has changed") from None
        if before is None:
            begin(folder, experiment, built, facts)
        else:
            same_sources(before["recorded"], facts, folder.path, notice)
            if before["run"]["rounds"] != experiment.run.rounds:
                write_config(folder, experiment, before["recorded"])
        for text in built.notices:
            notice(text)
        notice(str(built.choices))
        going = Going(folder, experiment, built.simulation, built, stop, on_round, notice)
        checkpoint = folder.last()
        if checkpoint is not None:
            going.restore(checkpoint)
        left = checkpoint is None or not checkpoint.done or experiment.run.rounds > going.simulation.round
        if left and not (checkpoint and checkpoint.done and going.diverged):
            going.on()
        else:
            left = False
        return Result(folder.path, read_lines(folder.path / "metrics.jsonl"), going.diverged, left)


class plainly:
    """Memory that runs out and a user's code that calls `exit` end a run in one sentence."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, SystemExit) or (error is not None and is_of_memory(error)):
            raise as_ours(error) from error
        return False


# ---------------------------------------------------------------- the run that goes on


@dataclass
class Going:
    """A run at work: the simulation, and what has been counted and recorded so far."""

    folder: RunFolder
    experiment: config.Experiment
    simulation: Simulation
    built: Built
    stop: Stop
    on_round: Callable[[dict], None]
    notice: Callable[[str], None]
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    seconds: float = 0.0
    refused: int = 0  # rounds in a row without a finite update
    diverged: bool = False
    best: float | None = None

    def on(self) -> None:
        """To the last round, saving now and then; a signal saves and ends it."""
        cadence, began = Cadence(self.experiment.run.checkpoint_every), time.perf_counter() - self.seconds
        try:
            while self.simulation.round < self.experiment.run.rounds and not self.diverged:
                with self.stop.droppable():
                    played = self.simulation.play()
                    evaluated = self.evaluate(played)
                self.seconds = time.perf_counter() - began
                self.keep(played, evaluated)
                if cadence.due(self.simulation.round):
                    start = time.perf_counter()
                    self.save()
                    cadence.saved(time.perf_counter() - start)
        except Interrupted as signal:
            self.save()
            rounds = f"{self.simulation.round} of {self.experiment.run.rounds} rounds"
            raise Interrupted(f"{signal} after {rounds}: the state is saved, --resume goes on from there") from None
        self.finish()

    def evaluate(self, played) -> dict:
        """What the round's model does, in the rounds that are evaluated."""
        r, run = self.simulation.round + 1, self.experiment.run
        x = self.simulation.model(server=played.server)
        self.refused = self.refused + 1 if nothing_finite(played.records[0]["record"]) else 0
        self.diverged = not bool(torch.isfinite(x).all()) or self.refused >= REFUSALS
        if r % run.eval_every and r != run.rounds and not self.diverged:
            return {}
        return self.built.evaluate(x)

    def keep(self, played, evaluated: dict) -> None:
        """The round counts: state, totals, best model, the line of the record."""
        self.simulation.keep(played)
        record, clients = played.records[0]["record"], played.records[0]["clients"]
        for name in TOTALS:
            self.totals[name] += record[name]
        record |= self.totals | {"seconds": round(self.seconds, 3)} | {k: finite(v) for k, v in evaluated.items()}
        record |= {"diverged": True} if self.diverged else {}
        self.keep_best(evaluated)
        self.folder.append(record, clients)
        self.on_round(record)
        if self.diverged:
            self.notice(f"diverged in round {record['round']}: the run ends here")

    def keep_best(self, evaluated: dict) -> None:
        metric = self.built.evaluate.task.metrics[0] if self.built.evaluate.task.metrics else None
        name = f"validation_{metric.name}" if metric else "validation_loss"
        value = evaluated.get(name)
        if not self.experiment.run.keep_best or value is None or not math.isfinite(value):
            return
        higher = metric is not None and metric.better == "higher"
        if self.best is None or (value > self.best if higher else value < self.best):
            self.best = value
            self.folder.best(self.simulation.round, value, {"x": self.simulation.model()})

    # -- checkpoints ------------------------------------------------------------

    def save(self) -> None:
        state = self.simulation.states[0]
        self.folder.save(self.simulation.round, self.server(), state.rows(state.changed), self.counters())
        state.changed.clear()

    def finish(self) -> None:
        state = self.simulation.states[0]
        self.folder.finish(self.simulation.round, self.server(), state.rows(state.row), self.counters())

    def server(self) -> dict[str, Tensor]:
        """The server's fields, and what is evaluated where that is another model than its x."""
        return flat(self.simulation) | evaluated(self.simulation.algorithm, self.simulation.server)

    def counters(self) -> dict:
        return {"round": self.simulation.round, **self.totals, "state": {"refused": self.refused, "best": self.best}}

    def restore(self, checkpoint: Checkpoint) -> None:
        simulation, counters = self.simulation, dict(checkpoint.counters)
        held = flat(simulation)
        for name, tensor in held.items():
            if name not in checkpoint.server or checkpoint.server[name].shape != tensor.shape:
                raise BadInput(f"{self.folder.path}/checkpoint: {name} does not fit the model or the method")
        simulation.server = unflat(checkpoint.server, simulation.server)
        simulation.states[0].restore(checkpoint.rows)
        simulation.round = checkpoint.round
        self.totals = {k: counters[k] for k in TOTALS}
        self.refused, self.best = counters["state"]["refused"], counters["state"]["best"]
        records = read_lines(self.folder.path / "metrics.jsonl")
        self.seconds = records[-1]["seconds"] if records else 0.0
        self.diverged = bool(records and records[-1].get("diverged"))


def flat(simulation: Simulation) -> dict[str, Tensor]:
    """The server's fields as [P] by name, a history as name.0, name.1, ..."""
    out = {}
    for k, v in simulation.server.items():
        out |= {f"{k}.{i}": t.reshape(-1) for i, t in enumerate(v)} if isinstance(v, tuple) else {k: v.reshape(-1)}
    return out


def unflat(held: dict[str, Tensor], like: dict) -> dict:
    def back(t, like):
        return t.to(like).reshape(like.shape)

    out = {}
    for k, v in like.items():
        out[k] = tuple(back(held[f"{k}.{i}"], t) for i, t in enumerate(v)) if isinstance(v, tuple) else back(held[k], v)
    return out


def nothing_finite(record: dict) -> bool:
    """Uploads arrived and none of them counted, and what was computed is not finite."""
    return record["lost"] == record["cohort"] > 0 and record["train_loss"] is None


def finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


# ---------------------------------------------------------------- what a folder says of its run


def begin(folder: RunFolder, experiment: config.Experiment, built: Built, facts: dict) -> None:
    """Writes config.toml, what is to be known of the module, and copies of the user's own source files."""
    source = built.evaluate.source
    write_module(folder.path, built.simulation.net.module, input_shape(source.client(0)), source.classes)
    for own in facts["sources"].values():
        target = folder.path / "sources" / own["copy"]
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(own["file"], target)
    write_config(folder, experiment, facts)


def write_config(folder: RunFolder, experiment: config.Experiment, facts: dict) -> None:
    folder.begin(config.write_toml({"format": 1, **config.document(experiment), "recorded": facts}))


def recorded(built: Built, experiment: config.Experiment) -> dict:
    """What config.toml says beside the configuration."""
    files = own_sources(config.document(experiment))
    if isinstance(experiment.data.partition, dict) and "file" in experiment.data.partition:
        path = Path(experiment.folder or ".") / experiment.data.partition["file"]
        files["data.partition"] = path if path.exists() else Path(experiment.data.partition["file"])
    own = {
        text: {"file": str(path), "copy": f"{i}-{path.name}", "checksum": of_file(path)}
        for i, (text, path) in enumerate(sorted(files.items()))
    }
    return {
        "choices": asdict(built.choices),
        "command": shlex.join(["undrift", *sys.argv[1:]]),
        "versions": {"undrift": __version__, **{name: version(name) for name in ("torch", "numpy")}}
        | {"python": platform.python_version()},
        "machine": {"system": platform.platform(), "processor": processor(), "cores": os.cpu_count() or 1},
        "parameters": built.simulation.net.layout.size,
        "clients": built.simulation.planners[0].source.population,
        "partition": digest(built.simulation.planners[0].source),
        "better": {metric.name: metric.better for metric in built.evaluate.task.metrics},
        "sources": own,
    }


def own_sources(document: dict) -> dict[str, Path]:
    """The files of the `module:object` that a document names, and those that they import beside them; a process that
    has played other runs knows of more."""
    named = {text for text in words(document) if ":" in text}
    found = sources()
    if not named & found.keys():
        return {}
    mine = {text: path for text, path in found.items() if text in named or ":" not in text}
    # A file that is both named and imported by its plain name is one file.
    return {text: path for path, text in {mine[text]: text for text in sorted(mine, key=named.__contains__)}.items()}


def words(value) -> Iterator[str]:
    """All texts in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from words(inner)


def processor() -> str:
    """The processor's name, where the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def of_file(path: str | Path) -> str | None:
    """A file's digest, None where there is none."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if Path(path).is_file() else None


def digest(source) -> str:
    """Of who holds which samples; of data made on demand, their number."""
    while isinstance(source, HeldOut | Pooled):
        source = source.source
    if not isinstance(source, ArraySource):
        return f"{source.population} clients"
    found = hashlib.sha256()
    for rows in source.parts:
        found.update(len(rows).to_bytes(8, "little") + rows.tobytes())
    return found.hexdigest()


def same_experiment(before: dict, experiment: config.Experiment, path: Path) -> None:
    """A run goes on only as what it began; more rounds are welcome."""
    lacks = [key for key in WRITTEN if key not in before.get("recorded", ())]
    if lacks or "rounds" not in before.get("run", ()):
        raise BadInput(f"{path / CONFIG} is damaged: it lacks {lacks[0] if lacks else 'run.rounds'}")
    old = {k: v for k, v in before.items() if k in config.SECTIONS or k == "compare"}
    changed = config.differences(old, config.document(experiment))
    changed = [key for key in changed if key != "run.rounds" and not key.startswith(("compare", "report"))]
    if changed:
        raise BadInput(
            f"{path}: {', '.join(changed[:5])} differ{'s' * (len(changed) == 1)} from the run in this folder; "
            f"a resumed run may only change run.rounds"
        )
    rounds = experiment.run.rounds
    if rounds < before["run"]["rounds"]:
        raise BadInput(
            f"run.rounds = {rounds}: the run in {path} was made for {before['run']['rounds']}, and can only grow"
        )
    if rounds > before["run"]["rounds"] and rests_on_rounds(table(experiment.local.schedule)):
        raise BadInput(
            "run.rounds: the cosine schedule depends on it, so that a longer run would have begun otherwise; "
            "set local.schedule.rounds in a new run"
        )


def same_sources(before: dict, now: dict, path: Path, notice: Callable[[str], None]) -> None:
    """The run's own code and partition are those it began with; other versions are worth a notice."""
    for text, own in before["sources"].items():
        if of_file(now["sources"].get(text, own)["file"]) != own["checksum"]:
            raise BadInput(
                f"{text} ({own['file']}) has changed since the run in {path} began: its copy is "
                f"{path / 'sources' / own['copy']}; put it back, or start a new run with --out"
            )
    if before["partition"] != now["partition"]:
        raise BadInput(f"data.partition: the clients' data are not those of the run in {path}")
    changed = [k for k in now["versions"] if before["versions"].get(k) != now["versions"][k]]
    if changed or before["machine"] != now["machine"]:
        notice(
            f"other {', '.join(changed) or 'machine'} than when the run began: it goes on to rounding, not to the bit"
        )
