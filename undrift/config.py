"""An experiment as plain data: read from a TOML, changed by `--set` and `[compare.LABEL]`, written into a run's folder.

    document    what a TOML holds: nested dictionaries of plain values
    Experiment  the same, checked, with every default filled in

`document` and `parse` lead from one to the other and back. Keys of [data], [model], [algorithm] and [participation]
that are not settings of the table itself are options of what its name stands for: the registry checks them against its
signature.
"""

import inspect
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field

from undrift.errors import BadInput
from undrift.registry import check, refuse
from undrift.words import dotted, shown, suggestion

FORMAT = 1
LARGEST = 2**53  # beyond it, a float no longer holds every whole number
DEEPEST = 32

Name = Annotated[str, Field(min_length=1)]
Named = Annotated[dict | Name, Field(description="a name or a table with a name")]
NamedList = Annotated[list[Named], Field(description="a list of names and of tables with a name")]
Parts = Annotated[list[dict], Field(description='a list of tables, as [{part = "prox"}]')]
Seed = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]
Device = Annotated[
    str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?)$", description='"auto", "cpu", "cuda" or "cuda:N"')
]
Rounds = Annotated[list[Count], Field(min_length=1, description="a list of rounds, whole numbers of at least 1")]


@dataclass(frozen=True)
class Data:
    """Which data, and how they are spread over the clients."""

    name: Name = "mnist-writers"
    partition: Named | None = None
    validation: Share | None = None
    normalise: bool = False
    folder: Name | None = None
    seed: Seed | None = None
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What a client minimises and what is reported; what is not said follows from the data."""

    loss: Named | None = None
    metrics: NamedList | None = None


@dataclass(frozen=True)
class Model:
    """Which model, and where it starts."""

    name: Name = "mlp"
    weights: Name | None = None
    seed: Seed | None = None
    batchnorm: Literal["frozen", "group"] | None = None
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Local:
    """What a client does with its data in one round; 5 epochs where neither epochs nor steps are said."""

    lr: Positive = 0.1
    epochs: Count | None = None
    steps: Count | None = None
    batch: Count = 50
    optimizer: Named = "sgd"
    weight_decay: NotNegative = 0.0
    l2: NotNegative = 0.0
    clip: Positive | None = None
    momentum: Share = 0.0
    drop_last: bool = False
    schedule: Named | None = None

    def __post_init__(self):
        if self.epochs is not None and self.steps is not None:
            raise BadInput("local.epochs and local.steps are two ways to say the same, so only one of them can be set")
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 5)


@dataclass(frozen=True)
class Algorithm:
    """Which method, and what is stacked on it."""

    name: Name = "fedavg"
    parts: Parts | None = None
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, and what a client weighs in a mean."""

    name: Name = "uniform"
    clients: Count = 10
    weights: Literal["examples", "uniform"] = "examples"
    variates: Literal["shares", "uniform"] = "shares"
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """How long, with which draws, on what."""

    rounds: Count = 100
    seed: Seed = 0
    eval_every: Count = 10
    checkpoint_every: Auto | Count = "auto"
    keep_best: bool = False
    precision: Literal["auto", "float64", "float32", "tf32", "bf16"] = "auto"
    device: Device = "auto"
    engine: Literal["auto", "loop", "vmap"] = "auto"
    chunk: Auto | Count = "auto"
    threads: Auto | Count = "auto"
    compile: Literal["auto", "yes", "no"] = "auto"
    deterministic: bool = False
    memory: Auto | Positive = "auto"  # GiB


@dataclass(frozen=True)
class Report:
    """What a comparison is decided by; the final test metric where nothing is said."""

    primary: Name | None = None


@dataclass(frozen=True)
class Experiment:
    """A whole experiment, as plain values."""

    data: Data = field(default_factory=Data)
    task: Task = field(default_factory=Task)
    model: Model = field(default_factory=Model)
    local: Local = field(default_factory=Local)
    algorithm: Algorithm = field(default_factory=Algorithm)
    participation: Participation = field(default_factory=Participation)
    run: Run = field(default_factory=Run)
    report: Report = field(default_factory=Report)
    compare: dict[str, dict] = field(default_factory=dict)
    folder: str | None = field(default=None, compare=False)  # where the TOML lies: its own files are looked for there


SECTIONS = {
    "data": Data,
    "task": Task,
    "model": Model,
    "local": Local,
    "algorithm": Algorithm,
    "participation": Participation,
    "run": Run,
    "report": Report,
}
# What a run writes into its config.toml beside the experiment. It is passed over, so that the file can be run again.
RECORDED = ("format", "recorded")


# The tables that are chosen by name and known here: their settings are these functions' arguments


def _sgd() -> None: ...


def _adam(b1: Share = 0.9, b2: Share = 0.999, eps: Positive = 1e-8) -> None: ...


def _exponential(decay: Annotated[float, Field(gt=0, le=1)] = 0.998) -> None: ...


def _cosine(rounds: Count | None = None, final: NotNegative = 0.0) -> None: ...


def _steps(at: Rounds, factor: Positive = 0.1) -> None: ...


OPTIMIZERS = {"sgd": _sgd, "adam": _adam}
SCHEDULES = {"exponential": _exponential, "cosine": _cosine, "steps": _steps}


# From a TOML to an experiment


def read(path: str | Path, sets: Iterable[str] = ()) -> Experiment:
    """The experiment of a TOML, after each `path=value` of `--set`."""
    document = load(path)
    for text in sets:
        document = assign(document, text)
    return parse(document, Path(path).resolve().parent)


def load(path: str | Path) -> dict[str, Any]:
    """The document of a TOML, as it stands there."""
    said = str(path) if str(path).isprintable() else shown(str(path), 200)
    said = said if len(said) <= 200 else "..." + said[-197:]
    try:
        if Path(path).is_dir():
            raise BadInput(f"{said} is a folder, not the TOML of an experiment")
        raw = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise BadInput(f"{said} does not exist") from error
    except (OSError, ValueError) as error:
        raise BadInput(f"{said} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{said} is not text in UTF-8 (line {line}, byte {error.start + 1} of the file)") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{said} is not TOML{_what_is_wrong(str(error), text)}") from error
    except RecursionError as error:
        raise BadInput(f"{said} is nested too deeply") from error
    except ValueError as error:  # Python refuses to read numbers of thousands of digits
        raise BadInput(f"{said} holds a number of too many digits") from error


def parse(document: Mapping[str, Any], folder: str | Path | None = None) -> Experiment:
    """The experiment that a document describes, every default filled in; `folder` is where its TOML lies."""
    problems: list[str] = []
    if not isinstance(document, Mapping):
        raise BadInput(f"an experiment must be a table of tables, not {shown(document)}")
    whole = _plain(document, "", problems)
    refuse(problems)
    tables = _tables(whole, problems)
    sections = {name: _section(name, make, tables.get(name, {}), problems) for name, make in SECTIONS.items()}
    refuse(problems)
    compare = _compared(whole, tables.get("compare", {}), problems)
    refuse(problems)
    return Experiment(**sections, compare=compare, folder=None if folder is None else str(folder))


def document(experiment: Experiment) -> dict[str, Any]:
    """The resolved document of an experiment: what `parse` reads back to the same."""
    whole = {}
    for name in SECTIONS:
        section = getattr(experiment, name)
        whole[name] = {key: getattr(section, key) for key in _own(type(section))} | getattr(section, "options", {})
    return whole | ({"compare": experiment.compare} if experiment.compare else {})


def write_toml(document: Mapping[str, Any]) -> str:
    """The text of a document; what is not set is left out, as a TOML has no word for it."""
    return tomli_w.dumps(_without_unset(document))


# Changes


def assign(document: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The document after one `--set path=value`, itself a line of TOML; a value that is not TOML is a text."""
    wrong = BadInput(f"--set {shown(text)} must look like path=value, as in local.lr=0.05")
    path, equals, value = text.partition("=")
    if not equals or not value.strip() or len(text.splitlines()) > 1:
        raise wrong
    try:
        overrides = tomllib.loads(text)
    except (ValueError, RecursionError):
        overrides = _nested(_path(path, wrong), value.strip())
    if not overrides:
        raise wrong
    return derive(document, overrides)


def grid(texts: Iterable[str]) -> dict[str, list]:
    """The values of each `--tune path=value,value`, by path; a value that is not TOML is a text."""
    found: dict[str, list] = {}
    for text in texts:
        wrong = BadInput(f"--tune {shown(text)} must look like path=value,value, as in local.lr=0.01,0.1")
        path, equals, values = (piece.strip() for piece in text.partition("="))
        if not equals or not values or len(text.splitlines()) > 1:
            raise wrong
        _path(path, wrong)
        if path in found:
            raise BadInput(f"--tune {path} is given twice: write all its values behind one")
        found[path] = _values(values, wrong)
    return found


def _values(text: str, wrong: BadInput) -> list:
    try:
        values = tomllib.loads(f"v = [{text}]")["v"]
    except (ValueError, RecursionError):
        pieces = [piece.strip() for piece in text.split(",")]
        if not all(pieces):
            raise wrong from None
        return [piece if len(pieces) == 1 else _values(piece, wrong)[0] for piece in pieces]
    # [0.01, 0.1] in brackets of its own is the list that is meant.
    values = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if not values:
        raise wrong
    return values


def derive(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The document with other settings, given as tables or by dotted keys.

    A table that is given with a name takes the place of the old one, so that no option of an old method lingers; one
    without is merged into it, and the name that it has already changes nothing.
    """
    problems: list[str] = []
    whole: dict[str, Any] = {}
    for key, value in overrides.items():
        wrong = BadInput(f"{shown(key)} must be a path, as local.lr")
        whole = _joined(whole, _nested(_path(key, wrong) if "." in str(key) else [key], value))
    whole = _plain(whole, "", problems)
    refuse(problems)
    return _replaced(document, whole)


def differences(a: Mapping[str, Any], b: Mapping[str, Any], key: str = "") -> list[str]:
    """The dotted keys at which two documents differ; a key that is not there is one that is not set."""
    found = []
    for name in dict.fromkeys([*a, *b]):
        one, other = a.get(name), b.get(name)
        if isinstance(one, Mapping | None) and isinstance(other, Mapping | None):
            found += differences(one or {}, other or {}, dotted(key, name))
        elif not _same(one, other):
            found.append(dotted(key, name))
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return not differences(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _path(text: str, wrong: BadInput) -> list[str]:
    try:
        rest: Any = tomllib.loads(f"{text} = 0")
    except (ValueError, RecursionError):
        raise wrong from None
    path = []
    while isinstance(rest, dict) and len(rest) == 1:
        [(name, rest)] = rest.items()
        path.append(name)
    if rest != 0:
        raise wrong
    return path


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


def _joined(one: Any, other: Any) -> Any:
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return other
    return {**one, **{name: _joined(one.get(name), value) for name, value in other.items()}}


def _replaced(old: Any, new: Any, path: tuple[str, ...] = ()) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    default = getattr(SECTIONS[path[0]], "name", None) if len(path) == 1 and path[0] in SECTIONS else None
    if "name" in new and new != {"name": old.get("name", default)}:
        return new
    if path == ("data", "partition") and "file" in new:
        return new
    result = {**old, **{name: _replaced(old.get(name), value, (*path, name)) for name, value in new.items()}}
    for one, other in (("epochs", "steps"), ("steps", "epochs")):  # two ways to say the same: the later one holds
        if path == ("local",) and new.get(one) is not None and other not in new:
            result.pop(other, None)
    return result


def _without_unset(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_unset(inner) for name, inner in value.items() if inner is not None}
    return [_without_unset(inner) for inner in value] if isinstance(value, list | tuple) else value


# What can be wrong with a document


def _what_is_wrong(said: str, text: str) -> str:
    """tomllib's message as the end of a sentence."""
    said, _, place = said.removesuffix(")").partition(" (at ")
    said = re.sub(r"\(((?:'[^']*'(?:, )?)+),?\)", lambda m: m[1].replace("', '", ".").strip("', "), said)
    said = {"Cannot overwrite a value": "this key is set twice"}.get(said, said[:1].lower() + said[1:])
    said = " ".join(said.split())[:120]
    place = f"line {text.count(chr(10)) + 1}, its end" if place == "end of document" else place
    return (f" at {place}" if place else "") + f": {said}"


def _plain(value: Any, key: str, problems: list[str], depth: int = 0) -> Any:
    """A copy in dictionaries, lists, texts, numbers and truth values; what is none of them is a problem."""
    if depth > DEEPEST:
        problems.append(f"{key} is nested too deeply")
    elif isinstance(value, Mapping):
        for name in value:
            _check_key(name, key, problems)
        return {name: _plain(inner, dotted(key, name), problems, depth + 1) for name, inner in value.items()}
    elif isinstance(value, list | tuple):
        if any(inner is None for inner in value):
            problems.append(f"{key} must be a list without gaps")
        return [_plain(inner, f"{key}[{place}]", problems, depth + 1) for place, inner in enumerate(value)]
    elif isinstance(value, str):
        if "\0" in value:
            problems.append(f"{key} must be text without NUL characters, not {shown(value)}")
        elif not _is_text(value):
            problems.append(f"{key} must be text in UTF-8, not {shown(value)}")
        return str(value)
    elif isinstance(value, bool) or value is None:
        return value
    elif isinstance(value, int):
        if abs(value) > LARGEST:
            problems.append(f"{key} must lie within 2^53 = {LARGEST}, not {shown(value)}")
        return int(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            problems.append(f"{key} must be a finite number, not {value}")
        return float(value)
    else:
        kind = "a date or a time" if type(value).__module__ == "datetime" else f"a {type(value).__name__}"
        problems.append(f"{key} is {kind}; it must be a text, a number, true or false, a list or a table")
    return None


def _check_key(name: Any, key: str, problems: list[str]) -> None:
    if not isinstance(name, str):
        problems.append(f"{dotted(key, name)} must have a text for a name")
    elif not name.strip() or "\0" in name or not _is_text(name):
        problems.append(f"{dotted(key, name)} must have a name that can be read, not {shown(name)}")


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _tables(document: Mapping[str, Any], problems: list[str]) -> dict[str, dict]:
    """The tables of a document, by name."""
    tables = {}
    for name, value in document.items():
        at = dotted("", name)
        if name == "format":
            if not _same(value, FORMAT):
                problems.append(f"format must be {FORMAT}, the one that this version reads, not {shown(value)}")
        elif name not in (*SECTIONS, *RECORDED, "compare"):
            problems.append(_unknown_table(name, at, value))
        elif isinstance(value, Mapping):
            tables[name] = dict(value)
        elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
            problems.append(f"[[{at}]] is a list of tables, {at} must be one table, [{at}]")
        else:
            problems.append(f"{at} must be a table, [{at}], not {shown(value)}")
    return tables


def _unknown_table(name: str, at: str, value: Any) -> str:
    homes = [f"{table}.{name}" for table, make in SECTIONS.items() if name in _own(make)]
    if homes and not isinstance(value, Mapping):
        return f"{at} must stand in a table; did you mean {' or '.join(homes)}"
    near = suggestion(name, [*SECTIONS, "compare"])
    return f"{at} is no table of an experiment{near} (there are: {', '.join([*SECTIONS, 'compare'])})"


def _own(make: type) -> list[str]:
    return [setting.name for setting in fields(make) if setting.name != "options"]


def _section(key: str, make: type, table: Mapping[str, Any], problems: list[str]) -> Any:
    """One table of the experiment, or None with at least one problem more."""
    given = {}
    if "options" in make.__dataclass_fields__:
        given = {"options": {name: value for name, value in table.items() if name not in _own(make)}}
        table = {name: value for name, value in table.items() if name in _own(make)}
    arguments, found = check(make, table, key=key, who=f"[{key}]", given=given)
    if not found:
        arguments = _NAMES_INSIDE.get(key, lambda arguments, found: arguments)(arguments, found)
    problems += found
    if found:
        return None
    try:
        return make(**arguments)
    except BadInput as problem:
        problems.append(str(problem))
        return None


def _data_names(arguments: dict, found: list[str]) -> dict:
    partition = arguments.get("partition")
    if isinstance(partition, str):
        return arguments | {"partition": {"name": partition}}
    if isinstance(partition, dict) and "file" not in partition:
        _need_name(partition, "data.partition", "name", found)
    return arguments


def _task_names(arguments: dict, found: list[str]) -> dict:
    _need_name(arguments.get("loss"), "task.loss", "name", found)
    for place, metric in enumerate(arguments.get("metrics") or []):
        _need_name(metric, f"task.metrics[{place}]", "name", found)
    return arguments


def _local_names(arguments: dict, found: list[str]) -> dict:
    chosen = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}
    return arguments | {
        name: _chosen(name, arguments[name], known, found)
        for name, known in chosen.items()
        if arguments.get(name) is not None
    }


def _algorithm_names(arguments: dict, found: list[str]) -> dict:
    for place, part in enumerate(arguments.get("parts") or []):
        _need_name(part, f"algorithm.parts[{place}]", "part", found)
    return arguments


_NAMES_INSIDE = {"data": _data_names, "task": _task_names, "local": _local_names, "algorithm": _algorithm_names}


def _need_name(value: Any, key: str, naming: str, found: list[str]) -> None:
    if isinstance(value, dict) and naming not in value:
        found.append(f'{key} must have a {naming}, as in {{{naming} = "..."}}')
    elif isinstance(value, dict) and not (isinstance(value[naming], str) and value[naming]):
        found.append(f"{key}.{naming} must be text that is not empty, not {shown(value[naming])}")


def _chosen(kind: str, value: str | dict, known: dict[str, Any], found: list[str]) -> str | dict:
    """A table chosen by name among `known`, every default filled in; the name alone where there is nothing to set."""
    key, table = f"local.{kind}", {"name": value} if isinstance(value, str) else dict(value)
    before = len(found)
    _need_name(table, key, "name", found)
    if len(found) > before:
        return value
    name = table.pop("name")
    if name not in known:
        at = key if isinstance(value, str) else f"{key}.name"
        found.append(f"{at}: there is no {kind} {shown(name)}{suggestion(name, known)} (there are: {', '.join(known)})")
        return value
    arguments, problems = check(known[name], table, key=key, who=name)
    found += problems
    settings = {setting.name: setting.default for setting in inspect.signature(known[name]).parameters.values()}
    return {"name": name} | settings | arguments if settings else name


# Labels of a comparison


def _compared(document: dict, compare: dict, problems: list[str]) -> dict[str, dict]:
    """The settings of every label, tried on the document; `tune` as lists of values by dotted keys."""
    base = {name: value for name, value in document.items() if name != "compare"}
    labels = {}
    for label, overrides in compare.items():
        at = dotted("compare", label)
        if not re.fullmatch(r'[^\s./\\:,<>"|?*]([^/\\:,<>"|?*]*[^\s./\\:,<>"|?*])?', label) or not label.isprintable():
            problems.append(f"{at} must have a label that can name a folder, not {shown(label)}")
        elif not isinstance(overrides, Mapping):
            problems.append(
                f'{at} must be a table, as in [{at}] algorithm = {{name = "fedcm"}}, not {shown(overrides)}'
            )
        else:
            labels[label] = _tried(base, dict(overrides), at, problems)
    return labels


def _tried(base: dict, overrides: dict, at: str, problems: list[str]) -> dict:
    tune = overrides.pop("tune", {})
    if not isinstance(tune, Mapping):
        problems.append(f'{at}.tune must be a table, as {{"local.lr" = [0.01, 0.1]}}, not {shown(tune)}')
        return {}
    if "compare" in overrides:
        problems.append(f"{at}.compare cannot stand in another comparison")
        return {}
    try:
        mine = derive(base, overrides)
        parse(mine)
    except BadInput as problem:
        problems.append(_within(at, str(problem)))
        return {}
    grid = _grid(tune)
    for path, values in grid.items():
        if not isinstance(values, list) or not values:
            said = path if re.fullmatch(r"[A-Za-z0-9_.-]{1,120}", path) else shown(path)
            problems.append(f"{at}.tune.{said} must be a list of values to try, not {shown(values)}")
            continue
        for value in values:
            try:
                parse(derive(mine, {path: value}))
            except BadInput as problem:
                problems.append(f"{at}.tune: {problem}")
    return overrides | ({"tune": grid} if grid else {})


def _within(at: str, problem: str) -> str:
    return f"[{at}.{problem[1:]}" if problem.startswith("[") else f"{at}.{problem}"


def _grid(tune: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Lists of values by dotted keys, however the keys were written."""
    grid = {}
    for name, value in tune.items():
        path = f"{key}.{name}" if key else name
        grid |= _grid(value, path) if isinstance(value, Mapping) else {path: value}
    return grid
