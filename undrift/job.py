"""What a comparison consists of: one label at one seed."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One label at one seed."""

    label: str
    seed: int
    folder: str  # below the comparison's
    document: dict


def safe(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^\w.+-]", "-", label)
