"""`undrift check my_file:Mine`: the shared suite on a method or part of one's own, a line for each check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .algorithm import Algorithm
from .algorithms import make
from .errors import BadInput
from .suite import checks
from .userfiles import users_failure

# Alone, and where other parts send their own fields beside it.
COMPANY = {
    "alone": [],
    "inside lookahead": [{"part": "lookahead"}],
    "inside control variates": [{"part": "control-variates"}],
}


@dataclass(frozen=True)
class Checked:
    """What one check found; `why` is None where it holds, `applies` False where the parts cannot be joined."""

    company: str
    check: str
    why: str | None = None
    applies: bool = True

    @property
    def failed(self) -> bool:
        return self.applies and self.why is not None

    def __str__(self) -> str:
        mark = "not joined" if not self.applies else "ok" if self.why is None else "FAILS"
        return f"{mark:<6} {self.company}: {self.check}" + (f": {self.why}" if self.why else "")


def check(name: str, folder: Path | None = None) -> Iterator[Checked]:
    """Every check on the method or part `name`, as it ends."""
    make({"name": name}, key="check", folder=folder)  # one that is not there at all is bad input
    for company, parts in COMPANY.items():
        of = partial(make, {"name": name, "parts": parts}, key="check", folder=folder)
        try:
            of()
        except BadInput as error:
            yield Checked(company, "this stack", str(error), applies=False)
            continue
        for one in checks(of):
            yield Checked(company, one.__name__.replace("_", " "), failure(one, of))


def failure(check: Callable, of: Callable[[], Algorithm]) -> str | None:
    """What is wrong in one sentence; None where the check holds."""
    try:
        check(of)
    except (AssertionError, BadInput) as error:
        return " ".join(str(error).split()) or str(users_failure(error, "check", "the method"))
    except Exception as error:  # a user's method may raise anything
        return str(users_failure(error, "check", "the method"))
    return None
