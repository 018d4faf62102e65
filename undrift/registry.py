"""Names that people type: what each stands for, `package.module:object`, and options checked against a signature.

A registry maps names to callables. A table `{name = "mlp", hidden = [64]}` is built by calling what `mlp` stands for
with the other keys as keyword arguments, after they were checked against its signature and its annotations.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    PydanticUserError,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo

from undrift.errors import BadInput, RunFailed, UndriftError


class Registry:
    """The names of one kind of thing, each standing for a callable that makes it; `group` names its entry points."""

    def __init__(self, kind: str, group: str | None = None):
        self.kind, self.group = kind, group
        self._made_by: dict[str, Callable] = {}
        self._about: dict[str, str] = {}

    def add(self, name: str, make: Callable, about: str = "") -> Callable:
        """Let `name` stand for `make`; `about` is its one line in `undrift list`, by default its docstring's first."""
        if name in self._made_by:
            raise ValueError(f"the {self.kind} {name} is registered twice")
        self._made_by[name] = make
        self._about[name] = about or (inspect.getdoc(make) or "").partition("\n")[0]
        return make

    def register(self, name: str, about: str = "") -> Callable[[Callable], Callable]:
        """`add` as a decorator."""
        return lambda make: self.add(name, make, about)

    def names(self) -> list[str]:
        """All names: our own in the order of their registration, then those of installed packages."""
        return list(self._made_by) + sorted(self._installed().keys() - self._made_by.keys())

    def about(self, name: str) -> str:
        """The one line that `undrift list` shows for a name."""
        if name in self._made_by:
            return self._about[name]
        return f"from the installed {self._installed()[name].value}"

    def find(self, name: str, key: str, folder: str | Path | None = None) -> Any:
        """What `name`, typed at `key`, stands for: a registered callable or the object of `package.module:object`."""
        if name in self._made_by:
            return self._made_by[name]
        if name in self._installed():
            try:
                return self._installed()[name].load()
            except Exception as error:
                raise users_failure(error, key, name) from error
        if ":" in name:
            return load_object(name, key, folder)[0]
        known = self.names()
        raise BadInput(
            f"{key}: there is no {self.kind} {shown(name)}{suggestion(name, known)} "
            f"(there are: {', '.join(known)}; or package.module:object)"
        )

    def build(
        self,
        table: Any,
        *,
        key: str,
        folder: str | Path | None = None,
        given: Mapping[str, Any] = types.MappingProxyType({}),
        also: Iterable[str] = (),
    ) -> Any:
        """Make what a name, a table or a live object says.

        `given` is supplied by the program where the signature has a parameter of that name; `also` names keys of the
        same table that are read elsewhere, so that a slip in one of them is answered with it. A function or a class is
        called; any other live object (a module, a data source) is taken as it is.
        """
        options = dict(table) if isinstance(table, Mapping) else {"name": table}
        naming = "name" if "name" in options or self.kind not in options else self.kind
        if naming not in options:
            raise BadInput(f"{key} must have a {naming}, the name of a {self.kind}")
        name = options.pop(naming)
        named_at = dotted(key, naming) if isinstance(table, Mapping) else key
        if isinstance(name, bool | int | float | list | Mapping) or name is None or name == "":
            raise BadInput(f"{named_at} must be the name of a {self.kind}, not {shown(name)}")
        make = self.find(name, named_at, folder) if isinstance(name, str) else name
        who = name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)
        if not _is_maker(make):
            if options:
                raise BadInput(f"{dotted(key, next(iter(options)))}: {who} is made already and takes no settings")
            return make
        arguments, problems = check(make, options, key=key, who=who, given=given, also=also)
        refuse(problems)
        if isinstance(name, str) and ":" not in name:
            return make(**arguments)
        try:
            return make(**arguments)
        except UndriftError:
            raise
        except Exception as error:
            raise users_failure(error, named_at, who) from error

    def _installed(self) -> dict[str, Any]:
        return {point.name: point for point in entry_points(group=self.group)} if self.group else {}


def _is_maker(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, functools.partial)


# Options against a signature


def check(
    make: Callable,
    options: Mapping[str, Any],
    *,
    key: str,
    who: str,
    given: Mapping[str, Any] = types.MappingProxyType({}),
    also: Iterable[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """The keyword arguments for `make` from what was typed at `key` and what is given; and a sentence per problem."""
    signature = signature_of(make)
    if signature is None:  # some builtins do not say what they take
        return dict(options), []
    named = {p.name: p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    free = [name for name in named if name not in given]
    arguments, problems = {name: value for name, value in given.items() if name in named}, []
    for name, value in options.items():
        at = dotted(key, name)
        if name in free:
            try:
                arguments[name] = checked(named[name].annotation, value, at)
            except BadInput as problem:
                problems.append(str(problem))
        elif open_ended and name not in given:
            arguments[name] = value
        else:
            takes = f"it takes: {', '.join(free)}" if free else "it takes none"
            problems.append(f"{at}: {who} has no such setting{suggestion(name, [*free, *also])} ({takes})")
    for name in free:
        if named[name].default is inspect.Parameter.empty and name not in options:
            words = described(named[name].annotation)
            problems.append(f"{dotted(key, name)} is missing: {who} needs it" + (f", {words}" if words else ""))
    return arguments, problems


def refuse(problems: list[str]) -> None:
    """Raise the first problem, with the number of the others."""
    if problems:
        raise BadInput(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))


class _Setting(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    value: Any


def checked(annotation: Any, value: Any, at: str) -> Any:
    """`value` as `annotation` wants it, in pydantic's strict mode; `at` is its key."""
    model = _model_of(annotation)
    if model is None:
        return value
    try:
        return model.model_validate({"value": value}).value
    except PydanticUserError:  # an annotation that names what is not there
        return value
    except ValidationError as error:
        read = _read_as_json(model, value)
        if read is not None:
            return read.value
        words = described(annotation) or "of another type"
        if isinstance(value, Mapping):
            raise BadInput(f"[{at}] is a table, {at} must be {words}") from error
        raise BadInput(f"{at} must be {words}, not {shown(value)}") from error


def _read_as_json(model: type[_Setting], value: Any) -> _Setting | None:
    """From JSON, pydantic's strict mode takes a list for a tuple and a string for a path; from Python it does not."""
    try:
        return model.model_validate_json(json.dumps({"value": value}))
    except (ValidationError, PydanticUserError, NotImplementedError, TypeError, ValueError, RecursionError):
        return None


def signature_of(make: Callable) -> inspect.Signature | None:
    """What a callable takes; None for some builtins, which do not say."""
    try:
        return inspect.signature(make, eval_str=True)
    except (NameError, AttributeError, SyntaxError, TypeError):  # an annotation that cannot be evaluated: go without
        signature = inspect.signature(make)
        return signature.replace(parameters=[_evaluated(p, make) for p in signature.parameters.values()])
    except ValueError:
        return None


def _evaluated(parameter: inspect.Parameter, make: Callable) -> inspect.Parameter:
    """The parameter with its annotation as a type, where its module knows the names in it."""
    module = sys.modules.get(getattr(make.func if isinstance(make, functools.partial) else make, "__module__", ""))
    if not isinstance(parameter.annotation, str) or module is None:
        return parameter
    try:
        return parameter.replace(annotation=eval(parameter.annotation, vars(module)))
    except (NameError, AttributeError, SyntaxError, TypeError):
        return parameter


def _model_of(annotation: Any) -> type[_Setting] | None:
    try:
        return _cached_model_of(annotation)
    except TypeError:  # not hashable
        return _cached_model_of.__wrapped__(annotation)


@functools.lru_cache(maxsize=512, typed=True)
def _cached_model_of(annotation: Any) -> type[_Setting] | None:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return create_model("Setting", __base__=_Setting, value=(annotation, ...))
    except (PydanticUserError, TypeError, Warning):  # a note that is no type checks nothing
        return None


# Words for people

_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a table", list: "a list"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts", bool: "true or false", dict: "tables"}


def described(annotation: Any) -> str:
    """What a value of this type is, in words; empty where a TOML cannot hold one."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _described_with_bounds(inside[0], inside[1:])
    if origin is typing.Literal:
        return _either([shown(value) for value in inside])
    if origin in (typing.Union, types.UnionType):
        return _either([words for words in map(described, inside) if words])
    if origin in (list, tuple, set, frozenset) or getattr(origin, "__module__", "") == "collections.abc":
        return f"a list of {_MANY[inside[0]]}" if inside and inside[0] in _MANY else "a list"
    return _WORDS.get(origin or annotation, "a list" if annotation in (tuple, set) else "")


def _described_with_bounds(annotation: Any, notes: tuple) -> str:
    rules = []
    for note in notes:
        if isinstance(note, FieldInfo) and note.description:
            return note.description
        rules += note.metadata if isinstance(note, FieldInfo) else [note]
    words = described(annotation)
    if annotation is str and any(getattr(rule, "min_length", 0) for rule in rules):
        return "text that is not empty"
    bounds = [
        f"{said} {getattr(rule, name)}" for rule in rules for name, said in _BOUNDS.items() if hasattr(rule, name)
    ]
    return " ".join([words, " and ".join(bounds)]).strip()


def _either(words: list[str]) -> str:
    words = list(dict.fromkeys(words))
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else "".join(words)


def shown(value: Any, width: int = 60) -> str:
    """A value as one would type it in a TOML, on one line and not too long."""
    if isinstance(value, str):
        value = value[: 2 * width]
        text = json.dumps(value, ensure_ascii=not value.isprintable())
        return text if len(text) <= width + 2 else text[: width - 2] + '..."'
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, int) and abs(value) >= 10**width:
        return "a number of very many digits"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple) and len(value) > 20:
        return f"a list of {len(value)}"
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(shown(item, width) for item in value) + "]"
        return text if len(text) <= width else f"a list of {len(value)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= width else text[: width - 3] + "..."


def dotted(key: str, name: Any) -> str:
    """The key of `name` in the table `key`, quoted where a TOML needs it."""
    name = name if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) else shown(name)
    whole = f"{key}.{name}" if key else name
    return whole if len(whole) <= 160 else whole[:75] + "..." + whole[-75:]


def suggestion(name: Any, known: Iterable[str]) -> str:
    """`; did you mean X`, where something known is near."""
    spelt = {word.lower(): word for word in known}
    near = difflib.get_close_matches(str(name)[:100].strip().lower(), spelt, n=1, cutoff=0.6)
    return f"; did you mean {spelt[near[0]]}" if near else ""


# Objects of the user's own

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
    elif frames := _users_frames(error):
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


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames in files that are neither ours nor a library's; else those in an installed file named by the user."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    others = [Path(__file__).parent.resolve(), *(Path(library).resolve() for library in libraries)]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    paths = [Path(frame.filename).resolve() for frame in frames]
    theirs = [not any(path.is_relative_to(other) for other in others) for path in paths]
    if not any(theirs):
        theirs = [path in _SOURCES.values() for path in paths]
    return [frame for frame, is_theirs in zip(frames, theirs, strict=True) if is_theirs]
