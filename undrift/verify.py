"""`undrift verify`: what became of every run of some files of conformance vectors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from .conformance import VECTORS, read, verify_run
from .errors import BadInput


def verify(files: list[Path], strict: bool, quiet: bool) -> int:
    """Prints a line per run and a sum; -> 0, or 1 where a run differs (under `strict` also where one is unknown). A run
    that cannot be read is refused after the others were replayed."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    unreadable: list[str] = []
    worst, fails = 0.0, {"failed", "unknown"} if strict else {"failed"}
    for path in files or sorted(VECTORS.glob("*.json")):
        document = read(path)
        for run in document["runs"]:
            try:
                verdict = verify_run(document, run)
            except (BadInput, KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                unreadable.append(f"{path}: run {run['id']} cannot be read: {why}")
                continue
            counts[verdict.status] += 1
            worst = max(worst, verdict.gap if verdict.status == "passed" else 0.0)
            if not quiet or verdict.status in fails:
                print(f"{verdict.status:8}{verdict.id}" + (f": {verdict.why}" if verdict.why else ""))
    said = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "unknown"))
    if not quiet:
        print(f"{said}; the largest difference of a passed run is {worst:.1e}")
    if unreadable:
        more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
        raise BadInput(unreadable[0] + more)
    return int(any(counts[status] for status in fails))
