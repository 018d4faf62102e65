"""The folder `checkpoint/` of a run: server, client states and counters, committed by one rename of `current.json`.

server-ROUND.safetensors    the server's tensors
rows-ROUND.safetensors      a generation: the client states that changed since the save before
current.json                names the files that are one checkpoint, with checksums; what it does not name never was
best.safetensors            the best model so far, where one is kept
final.safetensors           everything in one file, once the run is done
module.safetensors          what the vectors do not say of the trained module (see portable.py)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from undrift.errors import BadInput
from undrift.files import FORMAT, UNFINISHED, check_format, checksum, pack, read, unpack, write

CURRENT, BEST, FINAL = "current.json", "best.safetensors", "final.safetensors"
OURS = re.compile(rf"((server|rows)-\d+(-\d+)?|best|final)\.safetensors({UNFINISHED})?|current\.json{UNFINISHED}")
T = TypeVar("T")
GENERATIONS = 64  # at most; so a resume opens few files however long the run is


@dataclass(frozen=True)
class Checkpoint:
    """A run after `round` complete rounds."""

    round: int
    server: dict[str, Tensor]
    rows: dict[str, Tensor]  # "clients" and "last" int64 [n], every field [n, ...], sorted by client; {} without states
    counters: dict  # JSON values
    done: bool = False  # the final file is written


@dataclass(frozen=True)
class Part:
    """A file of a checkpoint as `current.json` names it."""

    file: str
    checksum: str
    rows: int = 0


@dataclass(frozen=True)
class Commit:
    """The content of `current.json`; the default is a run that has saved nothing yet."""

    round: int = 0
    server: Part | None = None
    rows: tuple[Part, ...] = ()  # oldest first, the later wins
    lengths: dict[str, int] = field(default_factory=dict)  # bytes of each record that belong to the checkpoint
    counters: dict = field(default_factory=dict)
    done: bool = False


class Checkpoints:
    """Loads and saves the checkpoint of one run; `commit` is what stands on the disk."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.commit = self._committed()
        self._clients = torch.empty(0, dtype=torch.int64)  # that have a row, known since `load`
        self._like: dict[str, Tensor] = {}  # a table of client states without rows, which new ones have to fit

    def load(self) -> Checkpoint | None:
        """The committed checkpoint, None where there is none yet."""
        commit = self.commit
        if commit.server is None:
            return None
        rows = merge(self._generations()) if commit.rows else {}
        self._know(rows)
        return Checkpoint(commit.round, self._read(commit.server), rows, commit.counters, commit.done)

    def server(self) -> dict[str, Tensor] | None:
        """The server's tensors of the committed checkpoint."""
        return None if self.commit.server is None else self._read(self.commit.server)

    def save(
        self,
        round: int,
        server: dict[str, Tensor],
        rows: dict[str, Tensor],
        counters: dict,
        lengths: dict[str, int],
        done: bool = False,
    ) -> None:
        """Commits a checkpoint; `rows` are the client states that changed since the last one."""
        self._mark()
        generations = self._add(round, rows)
        server_part = self._write(f"server-{round}", server)
        commit = Commit(round, server_part, generations, lengths, counters, done)
        self._know(rows)  # before the commit: to know of too many rows is harmless, of too few is not
        write(self.folder / CURRENT, encode(commit))
        self.commit = commit
        self.clean()

    def finish(
        self, round: int, server: dict[str, Tensor], rows: dict[str, Tensor], counters: dict, lengths: dict[str, int]
    ) -> None:
        """Writes the final file, then commits the run as done; `rows` are the states of all clients that have one."""
        self._mark()
        rows = merge([rows]) if rows else {}
        final = {f"server.{name}": tensor for name, tensor in server.items()}
        final |= {name if name in ("clients", "last") else f"client.{name}": tensor for name, tensor in rows.items()}
        final |= {f"counter.{name}": tensor for name, tensor in scalars(counters).items()}
        write(self.folder / FINAL, pack(final))
        self.save(round, server, rows, counters, lengths, done=True)

    def best(self, round: int, value: float, model: dict[str, Tensor]) -> None:
        """Keeps `model` as the best one so far, with its round and its value."""
        write(self.folder / BEST, pack(model, round=str(round), value=repr(float(value))))

    def clean(self) -> None:
        """Removes what earlier commits and killed processes left; only for the process that holds the run's lock."""
        named = {part.file for part in self.commit.rows}
        if self.commit.server is not None:
            named |= {self.commit.server.file, BEST}
        if self.commit.done:
            named.add(FINAL)
        for path in self.folder.iterdir():
            if OURS.fullmatch(path.name) and path.name not in named:
                with suppress(OSError):  # somebody reads it where open files cannot be removed: the next save will do
                    path.unlink()

    def _committed(self) -> Commit:
        path = self.folder / CURRENT
        if path.exists():
            return decode(path, read(path))
        if any(self.folder.glob("server-*.safetensors")) or (self.folder / FINAL).exists():
            raise BadInput(f"{path} is missing")
        return Commit()

    def _mark(self) -> None:
        """From the first save on, files without a `current.json` are damage, not a run that was killed early."""
        if not (self.folder / CURRENT).exists():
            write(self.folder / CURRENT, encode(Commit()))

    def _add(self, round: int, rows: dict[str, Tensor]) -> tuple[Part, ...]:
        """The generations with `rows` as the newest."""
        kept = self.commit.rows
        if rows and (complaint := misfit(rows, self._like or rows)):
            raise ValueError(f"client states: {complaint}")  # never a checkpoint that cannot be loaded
        if not rows or not len(rows["clients"]):
            return kept
        if kept and not len(self._clients):
            self.load()
        if torch.isin(self._clients, rows["clients"].cpu()).all():
            kept = ()
        elif sum(part.rows for part in kept) > 2 * len(self._clients) or len(kept) >= GENERATIONS:
            rows, kept = merge([*self._generations(), rows]), ()
        return (*kept, self._write(f"rows-{round}", rows, len(rows["clients"])))

    def _know(self, rows: dict[str, Tensor]) -> None:
        """Keeps in mind which clients have rows and how these look."""
        if rows:
            self._clients = torch.cat([self._clients, rows["clients"].cpu()]).unique()
            self._like = {name: values[:0].clone() for name, values in rows.items()}

    def _generations(self) -> list[dict[str, Tensor]]:
        generations = []
        for part in self.commit.rows:
            rows = self._read(part)
            if complaint := misfit(rows, generations[0] if generations else rows):
                raise BadInput(f"{self.folder / part.file} is damaged: {complaint}")
            generations.append(rows)
        return generations

    def _read(self, part: Part) -> dict[str, Tensor]:
        path = self.folder / part.file
        data = read(path)
        if checksum(data) != part.checksum:
            raise BadInput(f"{path} is damaged: its checksum is not the one in {CURRENT}")
        return unpack(path, data)

    def _write(self, stem: str, tensors: dict[str, Tensor], rows: int = 0) -> Part:
        """A new file: one that is there may be committed, as after an interrupt between commit and return."""
        name, copies = f"{stem}.safetensors", 1
        while (self.folder / name).exists():
            copies += 1
            name = f"{stem}-{copies}.safetensors"
        data = pack(tensors)
        write(self.folder / name, data)
        return Part(name, checksum(data), rows)


def read_checkpoint(run: Path) -> Checkpoint | None:
    """The last checkpoint in a run's folder, also while the run is going on."""
    return _read_while_it_goes_on(run, Checkpoints.load)


def read_server(run: Path) -> dict[str, Tensor] | None:
    """The server's tensors of the last checkpoint, without the clients' states; None where there is none yet."""
    return _read_while_it_goes_on(run, Checkpoints.server)


def _read_while_it_goes_on(run: Path, what: Callable[[Checkpoints], T]) -> T:
    while True:
        checkpoints = Checkpoints(run / "checkpoint")
        try:
            return what(checkpoints)
        except BadInput:
            if Checkpoints(run / "checkpoint").commit == checkpoints.commit:
                raise  # else the run has replaced it meanwhile


def encode(commit: Commit) -> bytes:
    """A commit as the bytes of `current.json`."""
    content = {"format": FORMAT, **asdict(commit)}
    return json.dumps({**content, "checksum": _self_check(content)}, indent=1, allow_nan=False).encode()


def decode(path: Path, data: bytes) -> Commit:
    """The commit in the bytes of `current.json`, which is at `path`."""
    try:
        content = json.loads(data)
        check_format(path, content["format"])
        said = content.pop("checksum")
        if said != _self_check(content):
            raise ValueError("its checksum is wrong")
        del content["format"]
        server, rows = content.pop("server"), content.pop("rows")
        return Commit(
            **content, server=None if server is None else Part(**server), rows=tuple(Part(**part) for part in rows)
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is damaged: {error}") from error


def merge(generations: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One table of client states, sorted by client, of several, oldest first: the later row wins."""
    clients = torch.cat([rows["clients"].cpu() for rows in generations])
    order = clients.argsort(stable=True)
    ordered = clients[order]
    newest = torch.ones(len(ordered), dtype=torch.bool)
    newest[:-1] = ordered[1:] != ordered[:-1]
    chosen = order[newest]
    return {name: torch.cat([rows[name].cpu() for rows in generations])[chosen] for name in generations[0]}


def misfit(rows: dict[str, Tensor], like: dict[str, Tensor]) -> str | None:
    """What is wrong with a table of client states, by itself and beside another one; None where nothing is."""
    for name in ("clients", "last"):
        if name not in rows:
            return f"{name!r} is not in it"
        if rows[name].dtype != torch.int64 or rows[name].dim() != 1:
            return f"{name!r} is not a list of whole numbers"
    if len(rows["clients"].unique()) != len(rows["clients"]):
        return "a client is in it twice"
    for name, values in rows.items():
        if values.dim() == 0 or len(values) != len(rows["clients"]):
            return f"{name!r} has not one row a client"
    if differing := sorted(rows.keys() ^ like.keys()):
        return f"{differing[0]!r} is in one generation of client states and not in another"
    for name, values in rows.items():
        if values.dtype != like[name].dtype or values.shape[1:] != like[name].shape[1:]:
            return f"{name!r} has not the type and shape that it has in the generation before"
    return None


def scalars(counters: dict, prefix: str = "") -> dict[str, Tensor]:
    """The numbers among the counters as int64 and float64 scalars; "a.b" is b in the counter a."""
    found = {}
    for name, value in counters.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            found[prefix + name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    return found


def _self_check(content: dict) -> str:
    return checksum(json.dumps(content, allow_nan=False).encode())
