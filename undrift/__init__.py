"""undrift: federated learning that stays on course.

run(experiment, out=...)         one run: rounds, records, checkpoints; again with resume=True
compare(experiment, methods)     several methods on the same draws, a table and a report
load(DIR)                        a run opened again: .config, .records, .model(), the plain nn.Module
export(DIR)                      its model as a state_dict in safetensors
frame(DIR, ...)                  rounds or logged clients as a pandas table
Experiment                       what both take; undrift.config.read("exp.toml") gives one
Algorithm, Around, Upload, Codec, stack      a method of one's own
    algorithms                       the methods and parts that there are
to_group_norm(module)            a module whose BatchNorm layers are GroupNorm
"""

from importlib import import_module

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "Around",
    "Codec",
    "Experiment",
    "Upload",
    "algorithms",
    "compare",
    "export",
    "frame",
    "load",
    "run",
    "stack",
    "to_group_norm",
]

# Where each name lives. They are looked up when they are used: the command line answers a slip before torch is loaded.
_HOMES = {
    "Algorithm": "algorithm",
    "Around": "algorithm",
    "Codec": "algorithm",
    "Experiment": "config",
    "Upload": "algorithm",
    "compare": "comparison",
    "export": "results",
    "frame": "frames",
    "load": "results",
    "run": "running",
    "stack": "algorithm",
    "to_group_norm": "modules",
}


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(f"undrift.{_HOMES[name]}"), name)
    if name in ("algorithms", "config"):
        return import_module(f"undrift.{name}")
    raise AttributeError(f"module 'undrift' has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, "config"])
