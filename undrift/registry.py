"""Names that people type: what each stands for, `package.module:object`, and options checked against a signature.

A registry maps names to callables. A table `{name = "mlp", hidden = [64]}` is built by calling what `mlp` stands for
with the other keys as keyword arguments, after they were checked against its signature and its annotations.
"""

import functools
import inspect
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
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

from undrift.errors import BadInput, UndriftError
from undrift.userfiles import load_object, users_failure
from undrift.words import described, dotted, shown, suggestion


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
