"""`undrift list`: what there is by name, a line each; of one name everything that its source says about it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial

from .algorithm import Algorithm, chain
from .algorithms import algorithms, parts
from .data import datasets
from .data.partition import partitions
from .errors import BadInput
from .metrics import metrics
from .models import models
from .participation import participations
from .registry import Registry, signature_of
from .tasks import losses
from .words import described, shown, suggestion

KINDS: dict[str, Registry] = {
    "algorithms": algorithms,
    "parts": parts,
    "datasets": datasets,
    "models": models,
    "partitions": partitions,
    "losses": losses,
    "metrics": metrics,
    "participations": participations,
}
# Arguments that the program supplies, not the TOML.
GIVEN = {
    "algorithms": ("inner",),
    "parts": ("inner",),
    "datasets": ("seed", "folder", "partition"),
    "models": ("shape", "classes"),
    "partitions": ("labels", "n", "seed", "folder", "key"),
    "losses": ("outputs", "target"),
    "participations": ("population", "seed"),
}

WIDEST = 110


def listing(kind: str | None = None, name: str | None = None) -> list[str]:
    """The lines of `undrift list`, `list KIND`, `list KIND NAME` and `list NAME`."""
    if kind is None:
        return [line for each in KINDS for line in (f"{each}:", *_all(each, "  "), "")][:-1]
    if name is not None:
        if kind not in KINDS:
            raise BadInput(f"there is no kind {shown(kind)}{suggestion(kind, KINDS)} (there are: {', '.join(KINDS)})")
        known = KINDS[kind].names()
        if name not in known:
            raise BadInput(f"there is no {KINDS[kind].kind} {shown(name)}{suggestion(name, known)}")
        return about(kind, name)
    if kind in KINDS:
        return _all(kind)
    found = [each for each in KINDS if kind in KINDS[each].names()]
    if not found:
        known = [*KINDS, *(known for registry in KINDS.values() for known in registry.names())]
        raise BadInput(f"there is nothing named {shown(kind)}{suggestion(kind, known)}")
    return [line for each in found for line in (*about(each, kind), "")][:-1]


def _all(kind: str, indent: str = "") -> list[str]:
    registry = KINDS[kind]
    width = max(map(len, registry.names()))
    return [f"{indent}{name:<{width}}  {_one_line(registry, name)}".rstrip() for name in registry.names()]


def _one_line(registry: Registry, name: str) -> str:
    """What was said at the registration; where that was nothing, the first sentence of the docstring."""
    said, text = registry.about(name), _text(registry.find(name, "name"))
    if said and said not in (text.partition("\n")[0], inspect.getdoc(partial).partition("\n")[0]):
        return said
    sentence = re.split(r"\.\s+(?=[A-Z])", " ".join(text.partition("\n\n")[0].split()))[0].removesuffix(".")
    return sentence if len(sentence) <= WIDEST else sentence[: WIDEST - 3] + "..."


def _text(make: Callable) -> str:
    return inspect.getdoc(make.func if isinstance(make, partial) else make) or ""


def about(kind: str, name: str) -> list[str]:
    """Everything about one name: its line, its settings, its text; of an algorithm the parts that it is made of."""
    registry = KINDS[kind]
    make = registry.find(name, "name")
    lines = [f"{name} ({registry.kind})"]
    what = _one_line(registry, name)
    text = _text(make)
    lines += [f"  {what}"] if what.removesuffix("...") not in " ".join(text.split()) else []
    lines += [f"  {line}".rstrip() for line in text.splitlines()]
    lines += _settings(make, GIVEN.get(kind, ()))
    if kind == "algorithms":
        lines += _stack(make())
    return lines


def _settings(make: Callable, given: tuple[str, ...]) -> list[str]:
    """A line for each setting: its name, its default, what it may be."""
    known = signature_of(make)
    plain = [
        p
        for p in (known.parameters.values() if known else ())
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in given
    ]
    rows = []
    for p in plain:
        what = described(p.annotation)
        if p.default is p.empty:
            rows.append((p.name, f"{what} (must be set)".strip()))
        elif what or _is_plain(p.default):
            said = "not set" if p.default is None else shown(p.default)
            rows.append(
                (f"{p.name} = {said}", what) if p.default is not None else (p.name, f"{what} (not set)".strip())
            )
    if not rows:
        return ["  no settings"]
    width = max(len(left) for left, _ in rows)
    return ["  settings:", *(f"    {left:<{width}}  {right}".rstrip() for left, right in rows)]


def _stack(algorithm: Algorithm) -> list[str]:
    """The parts, innermost first, each with its values and its update as its docstring gives it."""
    lines = ["  made of, innermost first:"]
    for part in reversed(list(chain(algorithm))):
        held = {f.name: getattr(part, f.name) for f in fields(part)}
        values = [f"{name} = {shown(value)}" for name, value in held.items() if value is not None and _is_plain(value)]
        lines.append(f"    {type(part).__name__}" + (f" ({', '.join(values)})" if values else ""))
        text = inspect.getdoc(type(part)) if "__doc__" in vars(type(part)) else None
        lines += [f"      {line}".rstrip() for line in (text or "").splitlines()]
    return lines


def _is_plain(value) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)
