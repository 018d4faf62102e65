"""Objects of the user's own, `package.module:object`: found, loaded, remembered, and blamed for what they raise."""

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undrift.errors import BadInput, RunFailed, UndriftError
from undrift.words import shown, suggestion

_SOURCES: dict[str, Path] = {}
_SIBLINGS: dict[str, Path] = {}  # plain name in sys.modules -> the folder that it came from


def sources() -> dict[str, Path]:
    """The source file of everything loaded as `package.module:object`, and of the files beside it that it imported."""
    return dict(_SOURCES)


def load_object(text: str, key: str, folder: str | Path | None = None) -> tuple[Any, Path | None]:
    """The object of `package.module:object` and its source file.

    It is looked for beside the TOML, then in the current folder, then among installed modules.
    """
    typed, _, wanted = text.rpartition(":")
    module_name = typed.removesuffix(".py").replace("\\", "/").replace("/", ".") if typed.endswith(".py") else typed
    if not all(part.isidentifier() for part in [*module_name.split("."), *wanted.split(".")]):
        raise BadInput(f"{key} must look like package.module:object, not {shown(text)}")
    module = _load_module(module_name, key, folder)
    file: str | None = getattr(module, "__file__", None)
    found: Any = module
    for part in wanted.split("."):
        if not hasattr(found, part):
            has = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise BadInput(f"{key}: {file or module_name} has no {wanted}{suggestion(part, has)}")
        found = getattr(found, part)
    path = Path(file).resolve() if file and file.endswith(".py") else None  # what is compiled has no source here
    if path is not None:
        _SOURCES[text] = path
    return found, path


def locate(text: str, key: str, folder: str | Path | None = None) -> Path:
    """The file or folder that `text`, typed at `key`, names: beside the TOML, else in the current folder."""
    for root in _roots(folder):
        if os.path.exists(root / text):
            return root / text
    raise BadInput(f"{key}: there is no {shown(text, 200)} {_places(folder, ' or ')}")


def users_failure(error: BaseException, key: str, what: str) -> RunFailed:
    """One sentence about an exception in the user's own code, with the user's own file and line."""
    where = ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" at {error.filename}, line {error.lineno}"
    elif frames := users_frames(error):
        where = f" at {frames[-1].filename}, line {frames[-1].lineno}, `{shown(frames[-1].line or '', 100)[1:-1]}`"
    said = " ".join(str(error).split())[:200]
    return RunFailed(f"{key}: {what} failed{where}: {type(error).__name__}" + (f": {said}" if said else ""))


def _load_module(name: str, key: str, folder: str | Path | None) -> types.ModuleType:
    path = name.replace(".", os.sep)
    for root in _roots(folder):
        if os.path.isfile(root / f"{path}.py") or os.path.isfile(root / path / "__init__.py"):
            with _blamed_on_the_user(key, f"{name.replace('.', '/')}.py"), _importing_from(root) as private:
                return importlib.import_module(name if _is_imported_from(root, name) else f"{private}.{name}")
    with _blamed_on_the_user(key, name):
        if _is_installed(name):
            return importlib.import_module(name)
    raise BadInput(
        f"{key}: {name.replace('.', '/')}.py is neither {_places(folder, ', nor ')}, nor an installed module"
    )


def _is_imported_from(root: Path, name: str) -> bool:
    """Whether this very file is a module already, under its plain name: a second copy would have other classes."""
    top = name.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and Path(file).resolve() in (root / f"{top}.py", root / top / "__init__.py")


def _is_installed(name: str) -> bool:
    for depth in range(1, name.count(".") + 2):  # a parent first: find_spec fails where it is missing or no package
        part = ".".join(name.split(".")[:depth])
        try:
            found = importlib.util.find_spec(part)
        except ModuleNotFoundError as error:
            if error.name and not part.startswith(error.name):
                raise
            return False
        except ValueError:  # __main__ and the like have no spec
            return part in sys.modules
        if found is None:
            return False
    return True


def _roots(folder: str | Path | None) -> list[Path]:
    return list(dict.fromkeys(Path(place).resolve() for place in (folder, Path.cwd()) if place is not None))


def _places(folder: str | Path | None, joint: str) -> str:
    return (
        f"beside the TOML ({Path(folder).resolve()}){joint}" if folder is not None else ""
    ) + "in the current folder"


@contextmanager
def _blamed_on_the_user(key: str, what: str) -> Iterator[None]:
    try:
        yield
    except UndriftError:
        raise
    except (Exception, SystemExit) as error:
        raise users_failure(error, key, what) from error


@contextmanager
def _importing_from(root: Path) -> Iterator[str]:
    """A private package whose modules are the files in `root`, which can import each other by their plain names."""
    private = "_undrift_" + hashlib.sha256(str(root).encode(errors="surrogateescape")).hexdigest()[:16]
    if private not in sys.modules:
        package = types.ModuleType(private, f"The files in {root}.")
        package.__path__ = [str(root)]
        sys.modules[private] = package
    for name, home in list(_SIBLINGS.items()):  # a helper of the same name in another folder is another helper
        if home != root and (os.path.exists(root / f"{name}.py") or os.path.exists(root / name)):
            del _SIBLINGS[name]
            sys.modules.pop(name, None)
    before, wrote = set(sys.modules), sys.dont_write_bytecode
    importlib.invalidate_caches()
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True  # a file edited within the second must not be answered by its old bytecode
    try:
        yield private
    finally:
        if str(root) in sys.path:
            sys.path.remove(str(root))
        sys.dont_write_bytecode = wrote
        for name in set(sys.modules) - before:
            _note_sibling(name, private, root)


def _note_sibling(name: str, private: str, root: Path) -> None:
    file = getattr(sys.modules[name], "__file__", None)
    if not file or name.partition(".")[0] == "undrift":
        return
    plain, path = name.removeprefix(f"{private}."), Path(file).resolve()
    if path.with_suffix("") in (root.joinpath(*plain.split(".")), root.joinpath(*plain.split("."), "__init__")):
        _SOURCES[plain] = path
        if plain == name:
            _SIBLINGS[name] = root


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames in files that are neither ours nor a library's; else those in an installed file named by the user."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    others = [Path(__file__).parent.resolve(), *(Path(library).resolve() for library in libraries)]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    paths = [Path(frame.filename).resolve() for frame in frames]
    theirs = [not any(path.is_relative_to(other) for other in others) for path in paths]
    if not any(theirs):
        theirs = [path in _SOURCES.values() for path in paths]
    return [frame for frame, is_theirs in zip(frames, theirs, strict=True) if is_theirs]
