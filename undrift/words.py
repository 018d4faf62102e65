"""Values, keys and types in the words of a sentence for people."""

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.fields import FieldInfo

_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table", list: "a list"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts", bool: "true or false", dict: "tables"}


def described(annotation: Any) -> str:
    """What a value of this type is, in words; empty where a TOML cannot hold one."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _described_with_bounds(inside[0], inside[1:])
    if origin is typing.Literal:
        return _either([shown(value) for value in inside])
    if origin in (typing.Union, types.UnionType):
        return _either([words for words in map(described, inside) if words])
    if origin in (list, tuple, set, frozenset) or getattr(origin, "__module__", "") == "collections.abc":
        return f"a list of {_MANY[inside[0]]}" if inside and inside[0] in _MANY else "a list"
    return _WORDS.get(origin or annotation, "a list" if annotation in (tuple, set) else "")


def _described_with_bounds(annotation: Any, notes: tuple) -> str:
    rules = []
    for note in notes:
        if isinstance(note, FieldInfo) and note.description:
            return note.description
        rules += note.metadata if isinstance(note, FieldInfo) else [note]
    words = described(annotation)
    if annotation is str and any(getattr(rule, "min_length", 0) for rule in rules):
        return "text that is not empty"
    bounds = [
        f"{said} {getattr(rule, name)}" for rule in rules for name, said in _BOUNDS.items() if hasattr(rule, name)
    ]
    return " ".join([words, " and ".join(bounds)]).strip()


def _either(words: list[str]) -> str:
    words = list(dict.fromkeys(words))
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else "".join(words)


def shown(value: Any, width: int = 60) -> str:
    """A value as one would type it in a TOML, on one line and not too long."""
    if isinstance(value, str):
        value = value[: 2 * width]
        text = json.dumps(value, ensure_ascii=not value.isprintable())
        return text if len(text) <= width + 2 else text[: width - 2] + '..."'
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, int) and abs(value) >= 10**width:
        return "a number of very many digits"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple) and len(value) > 20:
        return f"a list of {len(value)}"
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(item, width) for item in value) + "]"
        return text if len(text) <= width else f"a list of {len(value)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= width else text[: width - 3] + "..."


def dotted(key: str, name: Any) -> str:
    """The key of `name` in the table `key`, quoted where a TOML needs it."""
    name = name if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) else shown(name)
    whole = f"{key}.{name}" if key else name
    return whole if len(whole) <= 160 else whole[:75] + "..." + whole[-75:]


def suggestion(name: Any, known: Iterable[str]) -> str:
    """`; did you mean X`, where something known is near."""
    spelt = {word.lower(): word for word in known}
    near = difflib.get_close_matches(str(name)[:100].strip().lower(), spelt, n=1, cutoff=0.6)
    return f"; did you mean {spelt[near[0]]}" if near else ""
