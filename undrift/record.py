"""A run's folder while the run goes on: its lock, `config.toml`, the records that grow by lines, the checkpoint."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout
from torch import Tensor

from undrift.checkpoint import CURRENT, Checkpoint, Checkpoints
from undrift.errors import BadInput, RunFailed
from undrift.files import UNFINISHED, append, check_format, cut, read, sync, write

CONFIG = "config.toml"
RECORDS = {"metrics": "metrics.jsonl", "clients": "clients.jsonl"}


class RunFolder:
    """The folder of one run, held by one process: what `save` committed survives whatever happens after."""

    def __init__(self, path: Path, lock: FileLock):
        self.path = path
        self._lock = lock
        self._checkpoints = Checkpoints(path / "checkpoint")
        self._lengths = {name: self._checkpoints.commit.lengths.get(name, 0) for name in RECORDS}

    @classmethod
    def open(cls, path: str | Path, resume: bool = False) -> Self:
        """Takes the folder for this process, made if need be; one that holds a run needs `resume`."""
        path = Path(path)
        lock = _take(path)
        try:
            _admit(path, resume)
            folder = cls(path, lock)
            folder._clean()
            return folder
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Gives the folder back to other processes."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def config(self) -> dict | None:
        """What `config.toml` says, None where the run has not begun."""
        return read_config(self.path)

    def begin(self, text: str) -> None:
        """Writes `config.toml`: from here on the folder holds a run."""
        write(self.path / CONFIG, text.encode())

    def last(self) -> Checkpoint | None:
        """The last checkpoint, None for a run that begins; cuts the records back to the lines that go with it."""
        checkpoint = self._checkpoints.load()
        for name, file in RECORDS.items():
            cut(self.path / file, self._lengths[name])
        return checkpoint

    def append(self, record: dict, clients: Sequence[dict] = ()) -> None:
        """Writes the line of a round and the lines that were logged about clients; NaN is the caller's to replace."""
        lengths = dict(self._lengths)
        for name, entries in (("metrics", [record]), ("clients", clients)):
            if entries:
                lines = "".join(json.dumps(entry, allow_nan=False) + "\n" for entry in entries)
                lengths[name] = append(self.path / RECORDS[name], lengths[name], lines.encode())
        self._lengths = lengths  # both or none: a line that was interrupted is cut off by the next

    def save(self, round: int, server: dict[str, Tensor], rows: dict[str, Tensor], counters: dict) -> None:
        """Commits the state after `round` rounds; `rows`: the client states changed since the last save returned."""
        self._sync()
        self._checkpoints.save(round, server, rows, counters, self._lengths)

    def finish(self, round: int, server: dict[str, Tensor], rows: dict[str, Tensor], counters: dict) -> None:
        """Writes `checkpoint/final.safetensors` and commits the run as done; `rows` are all client states."""
        self._sync()
        self._checkpoints.finish(round, server, rows, counters, self._lengths)

    def best(self, round: int, value: float, model: dict[str, Tensor]) -> None:
        """Keeps `model` as `checkpoint/best.safetensors`."""
        self._checkpoints.best(round, value, model)

    def _sync(self) -> None:
        # A commit names lengths: after a power cut the lines must be there too.
        for name, length in self._lengths.items():
            if length:
                sync(self.path / RECORDS[name])

    def _clean(self) -> None:
        self._checkpoints.clean()
        for path in self.path.glob(f"{CONFIG}.*"):
            if re.fullmatch(re.escape(CONFIG) + UNFINISHED, path.name):
                path.unlink()


def read_config(run: Path) -> dict | None:
    """What `config.toml` in a run's folder says, None where there is none."""
    path = run / CONFIG
    if not path.exists():
        return None
    try:
        config = tomllib.loads(read(path).decode())
    except ValueError as error:  # not TOML, or not even text
        raise BadInput(f"{path} is damaged: {error}") from error
    check_format(path, config.get("format"))
    return config


def _take(path: Path) -> FileLock:
    """The folder at `path`, made if need be, locked until released or until this process ends."""
    lock = FileLock(path / ".lock", thread_local=False)
    try:
        (path / "checkpoint").mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise BadInput(f"{path}: another process is running here") from None
    except OSError as error:
        reason = error.strerror or error
        if isinstance(error, FileExistsError | NotADirectoryError | PermissionError):
            raise BadInput(f"{path} cannot be a run's folder: {reason}; choose another with --out") from error
        raise RunFailed(f"{path} could not be made ({reason})") from error
    return lock


def _admit(path: Path, resume: bool) -> None:
    """Refuses a folder that holds a run unless it is to go on."""
    if not any((path / name).exists() for name in (CONFIG, f"checkpoint/{CURRENT}", *RECORDS.values())):
        return
    if not resume:
        raise BadInput(f"{path} holds a run: go on with it by --resume, or choose another folder with --out")
    if not (path / CONFIG).exists():
        raise BadInput(f"{path / CONFIG} is missing")
