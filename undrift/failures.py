"""Any exception as one of ours: one sentence, with the line of the user's own code where there is one."""

from __future__ import annotations

from pathlib import Path

from .errors import RunFailed, UndriftError
from .userfiles import users_failure

NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "Storage size calculation overflowed")


def is_of_memory(error: BaseException) -> bool:
    """Whether the memory did not suffice, in whatever words torch says so."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY))


def bound_memory() -> None:
    """Lets memory that this machine does not have be refused, where the system would rather kill for it."""
    import torch

    if torch.cuda.is_available():  # CUDA sets aside addresses beyond any memory
        return
    try:
        import resource

        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or free < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (free, hard))
    except (ImportError, OSError, StopIteration, ValueError):  # a system without one or the other
        return


def as_ours(error: BaseException) -> UndriftError:
    """What the command line says of an exception."""
    if isinstance(error, UndriftError):
        return error
    if is_of_memory(error):
        return RunFailed(
            "the memory did not suffice; what was saved is whole: lower run.chunk, local.batch or participation.clients"
        )
    if isinstance(error, OSError):
        return RunFailed(f"{error.filename or 'a file'}: {error.strerror or error}; what was saved is whole")
    return users_failure(error, "run", "it")
