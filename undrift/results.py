"""What a run leaves, opened again: configuration, records, and the trained model as a plain nn.Module."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import nn

from . import config, models
from .errors import BadInput
from .files import pack, read_lines, write
from .modules import converted
from .portable import module_facts, nested, state_dict
from .record import CONFIG, read_config
from .running import of_file

MODEL = "model.safetensors"


@dataclass(frozen=True)
class Results:
    """A run's folder, opened by `load`."""

    folder: Path
    config: dict = field(repr=False)
    live: nn.Module | None = field(default=None, repr=False)

    @cached_property
    def records(self) -> list[dict]:
        """The lines of metrics.jsonl, a round each."""
        return read_lines(self.folder / "metrics.jsonl")

    def model(self, best: bool = False) -> nn.Module:
        """The plain module, in evaluation mode, with what was trained: at the last round, or at the best one."""
        state = state_dict(self.folder, best)
        module = copy.deepcopy(self.live) if self.live is not None else self._made()
        module = converted(module, self.config["model"].get("batchnorm"))
        module = module.to(next(v.dtype for v in state.values() if v.is_floating_point()))
        try:
            module.load_state_dict(state, strict=True)
        except RuntimeError as error:
            why = " ".join(str(error).split())[:300]
            raise BadInput(f"{self.folder}: the trained model does not fit {type(module).__name__}: {why}") from error
        return module.eval()

    def _made(self) -> nn.Module:
        """The module as its factory makes it."""
        asked = config.parse({k: v for k, v in self.config.items() if k not in config.RECORDED}).model
        if asked.name.startswith("live:"):
            raise BadInput(f"{self.folder}: the model was a live object: give one to undrift.load(DIR, model = net)")
        _, facts = module_facts(self.folder)
        seed = self.config["run"]["seed"] if asked.seed is None else asked.seed
        return models.plain(
            {"name": asked.name, **asked.options}, shape=nested(facts["shape"]), classes=facts["classes"],
            seed=seed, folder=self._home(asked.name),
        )  # fmt: skip

    def _home(self, name: str) -> Path | None:
        """The folder in which the user's own model was found, its file as it was then."""
        own = self.config.get("recorded", {}).get("sources", {}).get(name)
        if own is None:
            return None
        if of_file(own["file"]) != own["checksum"]:
            raise BadInput(
                f"{name} ({own['file']}) is not what the run in {self.folder} began with: its copy is "
                f"{self.folder / 'sources' / own['copy']}; put it back, or give the module: load(DIR, model = net)"
            )
        depth = name.rpartition(":")[0].removesuffix(".py").replace("\\", "/").replace("/", ".").count(".")
        return Path(own["file"]).parents[depth + (Path(own["file"]).name == "__init__.py")]


def load(folder: str | Path, model: nn.Module | None = None) -> Results:
    """Opens a run's folder; `model` is the module that a run of a live object was given."""
    folder = Path(folder)
    found = read_config(folder)
    if found is None:
        what = "a comparison: name one of the runs in it" if (folder / "comparison.json").exists() else "no run"
        raise BadInput(f"{folder} holds {what}" + (f" ({CONFIG} is missing)" if what == "no run" else ""))
    return Results(folder, found, model)


def export(folder: str | Path, best: bool = False, to: str | Path | None = None) -> Path:
    """Writes the trained model's state_dict as safetensors; -> where."""
    folder = load(folder).folder
    path = folder / MODEL if to is None else Path(to)
    write(path, pack(state_dict(folder, best)))
    return path
