"""The data files that come with the package, and decoded copies of data in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import platformdirs


def embedded(name: str) -> bytes:
    """The bytes of a file that comes with the package."""
    return files("undrift.data").joinpath("files", name).read_bytes()


def cache_folder() -> Path:
    """Where decoded data are kept: UNDRIFT_CACHE, else the user's cache folder."""
    return Path(os.environ.get("UNDRIFT_CACHE") or platformdirs.user_cache_dir("undrift"))


def decoded(name: str, decode: Callable[[bytes], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays in an embedded file."""
    packed = embedded(name)
    return kept(f"{name}-{hashlib.sha256(packed).hexdigest()[:16]}", lambda: decode(packed))


def kept(name: str, decode: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays that `name` stands for once and for all: from the cache, as memory maps, else decoded now and kept
    there if that works."""
    folder = cache_folder() / name
    try:
        return _load(folder)
    except (OSError, ValueError):  # not there yet, or damaged
        arrays = decode()
    with contextlib.suppress(OSError):  # a full or read-only disk costs the next start a second, nothing else
        _keep(folder, arrays)
    return arrays


def _load(folder: Path) -> dict[str, np.ndarray]:
    names = (folder / "names.txt").read_text(encoding="utf-8").split()
    # Copy on write: torch wants writable memory, the file must stay as it is.
    return {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in names}


def _keep(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Written beside and renamed, so that a folder of this name is always whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        for name, array in arrays.items():
            np.save(beside / f"{name}.npy", array)
        (beside / "names.txt").write_text("\n".join(arrays), encoding="utf-8")
        if folder.exists():  # damaged, or a moment ago another process was faster
            shutil.rmtree(folder)
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
