"""Files that are whole or not there: the atomic writer, records that grow by lines, tensors as safetensors."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from undrift.errors import BadInput, RunFailed

FORMAT = 1  # of every file of a run's folder; a newer one is refused, older ones stay readable
UNFINISHED = r"\.[0-9a-f]{16}\.part"  # what `write` adds to the name of a file that is not whole yet


def write(path: Path, data: bytes) -> None:
    """Puts `data` at `path` in one step: killed at any point, the old file or the new one is there, whole."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with _writing(path):
        try:
            with open(unfinished, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # before the rename: after a power cut the name must not lead to an empty file
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def append(path: Path, length: int, data: bytes) -> int:
    """Appends `data` to a file of which the first `length` bytes count, and says how many count then."""
    with _writing(path), open(path, "ab") as file:  # closed each time: a failed write leaves nothing in a buffer
        size = file.tell()
        if size < length:
            raise RunFailed(f"{path} became shorter while the run was going on: something else writes there")
        if size > length:  # the rest of an append that failed
            file.truncate(length)
        file.write(data)
    return length + len(data)


def sync(path: Path) -> None:
    """Returns when what was appended to `path` is on the disk."""
    with _writing(path), open(path, "r+b") as file:
        os.fsync(file.fileno())


def cut(path: Path, length: int) -> None:
    """Cuts a file of lines back to its first `length` bytes; a length of 0 removes it."""
    if length == 0:
        with _writing(path):
            path.unlink(missing_ok=True)
        return
    try:
        with open(path, "rb") as file:
            file.seek(length - 1)
            whole = file.read(1) == b"\n"
    except OSError as error:
        raise _unreadable(path, error) from error
    if not whole:
        raise BadInput(f"{path} is damaged: it has not the lines that the checkpoint goes with")
    with _writing(path):
        os.truncate(path, length)


def read(path: Path) -> bytes:
    """The content of a file; one that is missing or cannot be read is bad input."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def read_lines(path: Path) -> list[dict]:
    """The whole lines of a record, [] where there is none; a last line that is still being written is left out."""
    if not path.exists():
        return []
    *lines, _ = read(path).split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise BadInput(f"{path} is damaged: line {number} is not JSON") from error
    return records


def pack(tensors: dict[str, Tensor], **facts: str) -> bytes:
    """Tensors, from any device, as the bytes of a safetensors file that carries `facts`."""
    packed, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        packed[name] = tensor.clone() if storage in storages else tensor  # safetensors refuses shared memory
        storages.add(storage)
    return safetensors.torch.save(packed, {"format": str(FORMAT), **facts})


def unpack(path: Path, data: bytes) -> dict[str, Tensor]:
    """The tensors in the bytes of a safetensors file; `path` is where they are from."""
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, AssertionError, KeyError, RuntimeError, ValueError) as error:
        raise BadInput(f"{path} is damaged: {error}") from error
    said = read_facts(data).get("format", "")
    check_format(path, int(said) if said.isdecimal() else FORMAT)  # other programs write words there
    return tensors


def read_facts(data: bytes) -> dict[str, str]:
    """The facts that the bytes of a safetensors file carry beside its tensors."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__") or {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, such as `checkpoint/final.safetensors`."""
    return unpack(path, read(path))


def check_format(path: Path, said: object) -> None:
    """Refuses a file whose format is newer than this version reads, or is none."""
    if type(said) is not int or said < 1:
        raise BadInput(f"{path} is damaged: it does not say its format")
    if said > FORMAT:
        raise BadInput(f"{path} has format {said} and this undrift reads up to {FORMAT}: install a newer undrift")


def checksum(data: bytes) -> str:
    """A checksum against damage, quick enough for every checkpoint."""
    return f"{zlib.crc32(data):08x}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RunFailed(f"{path} could not be written ({reason}); what was saved before is whole") from error


def _unreadable(path: Path, error: OSError) -> BadInput:
    missing = isinstance(error, FileNotFoundError)
    return BadInput(f"{path} is missing" if missing else f"{path} cannot be read: {error.strerror or error}")
