"""The trained model as a state_dict: the vector of a checkpoint, and what a run's folder notes of its module.

A checkpoint holds the trained vector. What training leaves as it is (frozen parameters, buffers) and where each
parameter lies in the vector stand in `checkpoint/module.safetensors`, so that a state_dict needs neither the data nor
the user's code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .checkpoint import BEST, read_server
from .errors import BadInput
from .files import pack, read, read_facts, unpack, write
from .vector import Layout

MODULE = "module.safetensors"
EVALUATED = "evaluated.x"  # in a checkpoint, where a method evaluates another model than its server's x


def state_dict(folder: Path, best: bool = False) -> dict[str, Tensor]:
    """What `load_state_dict(strict=True)` of the plain module takes: trained, frozen and tied weights, buffers."""
    state, facts = module_facts(folder)
    layout = Layout(tuple(facts["names"]), nested(facts["shapes"]))
    x = trained(folder, best).reshape(-1)
    if x.numel() != layout.size:
        raise BadInput(f"{folder}: the checkpoint has {x.numel()} parameters, and the model {layout.size}")
    state |= {name: value.clone() for name, value in layout.split(x).items()}
    state |= {alias: state[name].clone() for alias, name in facts["tied"].items()}
    return {name: state[name] for name in facts["order"]}


def trained(folder: Path, best: bool = False) -> Tensor:
    """The vector of the last checkpoint's model, or of the best one."""
    path = folder / "checkpoint" / BEST
    if best:
        if not path.exists():
            raise BadInput(
                f"{folder} has no best model: that takes run.keep_best = true and a share to judge by, as in "
                f"data.validation = 0.1"
            )
        return unpack(path, read(path))["x"]
    server = read_server(folder)
    if server is None:
        raise BadInput(f"{folder} has no checkpoint yet: the run in it has not come that far")
    return server.get(EVALUATED, server.get("x"))


def write_module(folder: Path, module: nn.Module, shape: Any, classes: int | None) -> None:
    """Notes what a vector does not say of the module that is trained: names, frozen values, and its inputs."""
    layout, state = Layout.of(module), module.state_dict()
    name_of = {id(p): name for name, p in module.named_parameters()}
    called = {alias: name_of[id(p)] for alias, p in module.named_parameters(remove_duplicate=False)}
    tied = {alias: name for alias, name in called.items() if alias != name and alias in state}
    facts = {
        "names": layout.names, "shapes": layout.shapes, "tied": tied, "order": list(state), "shape": shape,
        "classes": classes,
    }  # fmt: skip
    kept = {name: value for name, value in state.items() if name not in layout.names and name not in tied}
    write(folder / "checkpoint" / MODULE, pack(kept, facts=json.dumps(facts)))


def module_facts(folder: Path) -> tuple[dict[str, Tensor], dict]:
    """(what training left as it was, what else was noted of the module)."""
    path = folder / "checkpoint" / MODULE
    data = read(path)
    tensors = unpack(path, data)
    try:
        return tensors, json.loads(read_facts(data)["facts"])
    except (KeyError, ValueError) as error:
        raise BadInput(f"{path} is damaged: it does not say where the parameters lie") from error


def nested(shapes: list) -> tuple:
    """Lists as JSON gives them -> tuples, as they were."""
    return tuple(nested(s) if isinstance(s, list) else s for s in shapes)


def evaluated(algorithm, server: dict) -> dict[str, Tensor]:
    """The model that is evaluated, for the checkpoint of a method whose model is not its server's x."""
    model = algorithm.model(**server)
    x = server.get("x")
    return {} if model is x else {EVALUATED: model.reshape(-1)}
