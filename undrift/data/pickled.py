"""Pickles from outside, read without trust: dicts, lists, texts, bytes, numbers and arrays, and nothing is called.

`pickle` calls whatever a file names. Here a file can name only what an array of numbers consists of, and gets stand-ins
for that: even NumPy's own functions are not called with what the file says.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from undrift.errors import BadInput
from undrift.words import shown


def read_pickle(path: Path) -> Any:
    """What a pickle holds, with the texts of Python 2 as bytes; BadInput if it asks for anything else than data."""
    try:
        return _plain(_Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load())
    except _Refused as refused:
        raise BadInput(
            f"{path} is refused: it asks for {refused}, and of a pickle only arrays, lists, dicts, texts and numbers "
            f"are read, nothing in it is run"
        ) from refused
    except Exception as error:  # damaged bytes can mean anything
        raise BadInput(f"{path} is damaged: it cannot be read as a pickle of arrays and lists") from error


class _Refused(Exception):
    """The name that a pickle asked for."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        stand_ins = {
            ("numpy.core.multiarray", "_reconstruct"): _Array,
            ("numpy._core.multiarray", "_reconstruct"): _Array,
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Numbers,
            ("_codecs", "encode"): _latin1,  # how Python 3 writes bytes for Python 2
        }
        if (module, name) not in stand_ins:
            raise _Refused(shown(f"{module}.{name}"))
        return stand_ins[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("an object kept elsewhere")


class _Numbers:
    """A dtype of numbers."""

    def __init__(self, code: bytes | str, *_: Any):
        self.code, self.order = _text(code), "="

    def __setstate__(self, state: tuple) -> None:
        self.order = _text(state[1])

    def dtype(self) -> np.dtype:
        if not re.fullmatch(r"[iu][1248]|f[248]|b1", self.code) or self.order not in ("<", ">", "=", "|"):
            raise ValueError("an array of something else than numbers")
        return np.dtype(self.order + self.code)


class _Array:
    """An array of numbers: its type, which stands for what reconstructs it too, and one while it is read."""

    def __init__(self, *_: Any):
        self.array: np.ndarray | None = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, numbers, by_columns, raw = state
        self.array = np.frombuffer(raw, numbers.dtype()).reshape(shape, order="F" if by_columns else "C")


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


def _text(value: bytes | str) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


def _plain(value: Any) -> Any:
    """The outermost dict with texts for keys and arrays for what stood in for them."""
    if not isinstance(value, dict):
        raise ValueError("no dict")
    return {_text(key): inner.array if isinstance(inner, _Array) else inner for key, inner in value.items()}
