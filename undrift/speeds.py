"""How fast this machine is: a table of measured speeds in the user's cache folder.

What it lacks is measured once and kept before it is used; of two processes that measure at once, the first to write
wins. So a choice that rests on it is the same for every run on this machine, and never a matter of the moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from .data.embedded import cache_folder

SECONDS = 2.0  # that one missing entry may take to measure


def machine() -> str:
    """What a speed depends on beside the work itself."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{platform.node()} {platform.machine()} {os.cpu_count()} cores, {versions}"


def speeds(work: str, ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds that each way of doing `work` takes here, from the table or measured now."""
    kept = known(work, ways)
    if kept is None:
        measured = {name: _measure(way, SECONDS / len(ways)) for name, way in ways.items()}
        kept = _keep(entry(work), measured)
    return kept


def known(work: str, ways: Iterable[str]) -> dict[str, float] | None:
    """Seconds that each way of doing `work` takes here, None where the table lacks them."""
    return _read(entry(work), ways)


def entry(work: str) -> Path:
    """Where the table's entry for some work on this machine is."""
    key = hashlib.sha256(f"{machine()}\n{work}".encode()).hexdigest()[:24]
    return cache_folder() / "speeds" / f"{key}.json"


def _measure(way: Callable[[], object], seconds: float) -> float:
    """The quickest of a few tries after a first one, within about `seconds`."""

    def once() -> float:
        start = time.perf_counter()
        way()
        return time.perf_counter() - start

    first = once()
    tries = int(min(20, seconds / 2 / first))
    return min((once() for _ in range(tries)), default=first)


def _read(path: Path, ways: Iterable[str]) -> dict[str, float] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {name: float(kept[name]) for name in ways}
    except (OSError, ValueError, KeyError, TypeError):  # not there yet, or damaged
        return None


def _keep(path: Path, measured: dict[str, float]) -> dict[str, float]:
    """The table's entry after writing ours beside it, unless somebody else's was first.
    No cache folder: ours, this once."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(measured), encoding="utf-8")
        try:
            os.link(beside, path)  # unlike a rename it never replaces
        except FileExistsError:
            if _read(path, measured) is None:  # a damaged entry
                os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError:
        return measured
    return _read(path, measured) or measured
