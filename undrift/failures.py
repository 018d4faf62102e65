"""Any exception as one of ours: one sentence, with the line of the user's own code where there is one."""

from __future__ import annotations

from .errors import RunFailed, UndriftError
from .registry import users_failure


def as_ours(error: BaseException) -> UndriftError:
    if isinstance(error, UndriftError):
        return error
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    ):
        return RunFailed(
            "the memory did not suffice; what was saved is whole: lower run.chunk, local.batch or participation.clients"
        )
    if isinstance(error, OSError):
        return RunFailed(f"{error.filename or 'a file'}: {error.strerror or error}; what was saved is whole")
    return users_failure(error, "run", "it")
