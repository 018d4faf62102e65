"""Names, options against signatures, and objects of the user's own."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch
from pydantic import Field

from undrift.errors import BadInput, RunFailed
from undrift.registry import Registry, checked
from undrift.userfiles import load_object, locate, sources
from undrift.words import described

GIVEN = {"shape": (1, 28, 28), "classes": 10, "seed": 3}
models = Registry("model")


@models.register("mlp")
def mlp(
    shape,
    classes,
    hidden: tuple[int, ...] = (64,),
    slope: Annotated[float, Field(ge=0)] = 0.0,
    rate: float | torch.Tensor = 1.0,
    layers: Annotated[int, Field(gt=0)] | None = None,
    kind: Literal["relu", "tanh"] = "relu",
):
    """A perceptron.

    With a second paragraph."""
    return shape, classes, hidden, slope, rate, layers, kind


@models.register("logistic", about="One layer.")
@dataclass(frozen=True)
class Logistic:
    shape: tuple
    scale: float
    bias: bool = True
    notes: list[str] = field(default_factory=list)


def build(**options):
    return models.build({"name": "mlp", **options}, key="model", given=GIVEN)


def refused(kind, call):
    with pytest.raises(kind) as caught:
        call()
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


def test_names_and_what_they_are_about():
    assert models.names() == ["mlp", "logistic"]
    assert models.about("mlp") == "A perceptron."
    assert models.about("logistic") == "One layer."
    with pytest.raises(ValueError, match="mlp is registered twice"):
        models.add("mlp", mlp)


def test_options_reach_the_callable_as_its_annotations_want_them():
    assert build(hidden=[32, 16], slope=1, layers=2) == ((1, 28, 28), 10, (32, 16), 1.0, 1.0, 2, "relu")
    assert isinstance(build(slope=1)[3], float)
    assert models.build("mlp", key="model", given=GIVEN) == build()
    tensor = torch.ones(2, 1, 1)
    assert build(rate=tensor)[4] is tensor
    made = models.build({"name": "logistic", "scale": 2, "notes": ["a"]}, key="model", given=GIVEN)
    assert made == Logistic((1, 28, 28), 2.0, True, ["a"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"hiden": [1]},
            "model.hiden: mlp has no such setting; did you mean hidden (it takes: hidden, slope, rate, layers, kind)",
        ),
        ({"hidden": ["a"]}, 'model.hidden must be a list of whole numbers, not ["a"]'),
        ({"hidden": [True]}, "model.hidden must be a list of whole numbers, not [true]"),
        ({"slope": -1}, "model.slope must be a number of at least 0, not -1"),
        ({"slope": True}, "model.slope must be a number of at least 0, not true"),
        ({"slope": "1"}, 'model.slope must be a number of at least 0, not "1"'),
        ({"rate": "fast"}, 'model.rate must be a number, not "fast"'),
        ({"layers": True}, "model.layers must be a whole number above 0, not true"),
        ({"layers": 2.0}, "model.layers must be a whole number above 0, not 2.0"),
        ({"layers": {"a": 1}}, "[model.layers] is a table, model.layers must be a whole number above 0"),
        ({"kind": "rely"}, 'model.kind must be "relu" or "tanh", not "rely"'),
    ],
)
def test_a_wrong_option_is_refused_by_its_key(options, said):
    assert refused(BadInput, lambda: build(**options)) == said


def test_several_problems_are_counted():
    assert refused(BadInput, lambda: build(slope=-1, kind=3, x=1)).endswith("not -1 (and 2 more)")


def test_what_the_program_gives_cannot_be_set():
    said = refused(BadInput, lambda: build(classes=3))
    assert said.startswith("model.classes: mlp has no such setting")


def test_a_setting_that_is_missing():
    said = refused(BadInput, lambda: models.build("logistic", key="model", given=GIVEN))
    assert said == "model.scale is missing: logistic needs it, a number"


def test_a_slip_in_a_key_that_is_read_elsewhere_is_answered_with_it():
    table = {"name": "mlp", "wieghts": "x"}
    said = refused(BadInput, lambda: models.build(table, key="model", given=GIVEN, also=["weights"]))
    assert "did you mean weights" in said


def test_an_unknown_name_is_answered_with_the_nearest():
    said = refused(BadInput, lambda: models.build({"name": "lgistic"}, key="model"))
    assert said.startswith('model.name: there is no model "lgistic"; did you mean logistic (there are: mlp, logistic')
    assert refused(BadInput, lambda: models.build("LOGISTIC", key="model")).startswith("model: there is no")
    for wrong in (3, "", None, True, ["mlp"], {}):
        assert refused(BadInput, lambda wrong=wrong: models.build({"name": wrong}, key="model")).startswith(
            "model.name"
        )
    assert refused(BadInput, lambda: models.build({"hidden": [1]}, key="model")).startswith("model must have a name")


def test_a_table_may_be_named_by_its_kind():
    parts = Registry("part")
    parts.add("prox", lambda mu=0.1: mu)
    assert parts.build({"part": "prox", "mu": 0.5}, key="algorithm.parts[0]") == 0.5
    assert refused(BadInput, lambda: parts.build({"part": "prx"}, key="p")).startswith("p.part: there is no part")


def test_live_objects_are_taken_as_they_are():
    net = torch.nn.Linear(2, 3)
    assert models.build(net, key="model", given=GIVEN) is net
    assert models.build({"name": net}, key="model", given=GIVEN) is net
    assert models.build({"name": Logistic, "scale": 3.0}, key="model", given=GIVEN).scale == 3.0
    assert "takes no settings" in refused(BadInput, lambda: models.build({"name": net, "a": 1}, key="model"))


def test_a_callable_with_keywords_takes_any_option_but_is_given_only_what_it_names():
    loose = Registry("loss")
    loose.add("any", lambda shape, **rest: (shape, rest))
    assert loose.build({"name": "any", "a": 1}, key="task.loss", given=GIVEN) == ((1, 28, 28), {"a": 1})


@pytest.mark.parametrize("annotation", ["no such type", 3, "list[Nothing]", object()])
def test_an_annotation_that_is_no_type_checks_nothing(annotation):
    def make(x):
        return x

    make.__annotations__ = {"x": annotation}
    odd = Registry("model")
    odd.add("odd", make)
    assert odd.build({"name": "odd", "x": [1]}, key="model") == [1]


def test_paths_and_nested_lists_are_read_as_in_json():
    assert checked(Path, "a/b", "x") == Path("a/b")
    assert checked(tuple[tuple[int, ...], ...], [[1], [2, 3]], "x") == ((1,), (2, 3))
    assert described(list[Annotated[int, Field(ge=1)]]) == "a list"


# Objects of the user's own


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_an_object_beside_the_toml_comes_before_one_in_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path, "here/mine.py", "def make(classes, width: int = 3): return 'here', classes, width")
    write(tmp_path, "cwd/mine.py", "def make(): return 'cwd'")
    monkeypatch.chdir(tmp_path / "cwd")
    table = {"name": "mine:make", "width": 4}
    assert models.build(table, key="model", folder=tmp_path / "here", given=GIVEN) == ("here", 10, 4)
    assert models.build("mine:make", key="model") == "cwd"
    assert models.build("mine.py:make", key="model") == "cwd"
    said = refused(BadInput, lambda: models.build({"name": "mine:make", "widht": 4}, key="model"))
    assert said == "model.widht: mine:make has no such setting (it takes none)"


def test_one_file_is_one_module_and_is_listed(tmp_path):
    path = write(tmp_path, "unique_one.py", "class Mine: ...\nother = Mine()")
    one, where = load_object("unique_one:Mine", "algorithm.name", tmp_path)
    other, _ = load_object("unique_one:other", "algorithm.name", tmp_path)
    assert isinstance(other, one)
    assert where == path.resolve()
    assert sources()["unique_one:Mine"] == path.resolve()
    assert "unique_one" not in sys.modules
    assert not list(tmp_path.rglob("*.pyc"))


def test_packages_relative_imports_and_nested_names(tmp_path):
    write(tmp_path, "pack/__init__.py", "")
    write(tmp_path, "pack/inner.py", "VALUE = 7")
    write(tmp_path, "pack/outer.py", "from .inner import VALUE\nclass A:\n    def f(): return VALUE")
    assert load_object("pack.outer:A.f", "k", tmp_path)[0]() == 7
    assert load_object("json.decoder:JSONDecoder", "k", tmp_path)[0].__name__ == "JSONDecoder"


def test_a_dataclass_with_annotations_as_strings(tmp_path):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass(frozen=True)\nclass Mine:\n    mu: float = 0.1\n"
    )
    write(tmp_path, "future.py", text)
    assert models.build({"name": "future:Mine", "mu": 1}, key="algorithm", folder=tmp_path).mu == 1.0
    said = refused(BadInput, lambda: models.build({"name": "future:Mine", "mu": "x"}, key="a", folder=tmp_path))
    assert said == 'a.mu must be a number, not "x"'


def test_sibling_files_are_importable_and_each_folder_has_its_own(tmp_path):
    for name in ("a", "b"):
        write(tmp_path, f"{name}/undrift_helper.py", f"VALUE = '{name}'")
        write(tmp_path, f"{name}/uses.py", "import undrift_helper\ndef make(): return undrift_helper.VALUE")
    path = list(sys.path)
    assert models.build("uses:make", key="model", folder=tmp_path / "a") == "a"
    assert models.build("uses:make", key="model", folder=tmp_path / "b") == "b"
    assert models.build("uses:make", key="model", folder=tmp_path / "a") == "a"
    assert sys.path == path
    assert sources()["undrift_helper"] == (tmp_path / "b" / "undrift_helper.py").resolve()


def test_our_own_package_is_never_loaded_twice(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    assert load_object("undrift.registry:Registry", "k")[0] is Registry


def test_an_object_without_a_source_file():
    assert load_object("sys:path", "k") == (sys.path, None)
    assert load_object("math:pi", "k")[1] is None
    assert "sys:path" not in sources()


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "there.py", "def make(): ...\n_hidden = 1")
    said = refused(BadInput, lambda: load_object("my_file:Mine", "algorithm.name", tmp_path / "exp"))
    assert said == (
        f"algorithm.name: my_file.py is neither beside the TOML ({(tmp_path / 'exp').resolve()}), "
        "nor in the current folder, nor an installed module"
    )
    said = refused(BadInput, lambda: load_object("there:mkae", "model.name"))
    assert said == f"model.name: {path.resolve()} has no mkae; did you mean make"
    for wrong in ("a:", ":b", "..:x", "a b:c", "a:b:c", "../x:y", "\0:a", "x" * 5000 + ":" + "-"):
        assert "must look like package.module:object" in refused(BadInput, lambda wrong=wrong: load_object(wrong, "k"))
    for wrong in ("x" * 5000 + ":y", "json.nothing:y", "nothing.json:y"):
        assert "nor an installed module" in refused(BadInput, lambda wrong=wrong: load_object(wrong, "k"))


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        ("x = 1\ny = 1 / 0\n", 2, "`y = 1 / 0`: ZeroDivisionError: division by zero"),
        ("def f(:\n", 1, "SyntaxError"),
        ("import sys\n\nsys.exit(3)", 3, "SystemExit: 3"),
        ("import no_such_module_at_all", 1, "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("import json\njson.loads('{')", 2, "JSONDecodeError"),
    ],
)
def test_a_file_that_fails_is_blamed_at_its_own_line(tmp_path, text, line, error):
    path = write(tmp_path, "fails.py", text)
    said = refused(RunFailed, lambda: load_object("fails:x", "model.name", tmp_path))
    assert said.startswith(f"model.name: fails.py failed at {path.resolve()}, line {line}")
    assert error in said
    path.write_text("x = 5")
    assert load_object("fails:x", "model.name", tmp_path)[0] == 5


def test_a_factory_that_fails_is_blamed_and_one_of_ours_is_not(tmp_path):
    path = write(tmp_path, "factory.py", "import torch\n\ndef make():\n    return torch.zeros(2) @ torch.zeros(3)\n")
    said = refused(RunFailed, lambda: models.build({"name": "factory:make"}, key="model", folder=tmp_path))
    assert said.startswith(f"model.name: factory:make failed at {path.resolve()}, line 4, `return torch.zeros(2)")
    ours = Registry("model")
    ours.add("broken", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours.build("broken", key="model")


def test_installed_packages_can_add_names(monkeypatch):
    class Point:
        name, value = "theirs", "their.package:make"

        def load(self):
            return lambda: "made"

    monkeypatch.setattr("undrift.registry.entry_points", lambda group: [Point()] if group == "undrift.models" else [])
    registry = Registry("model", group="undrift.models")
    registry.add("ours", lambda: 1)
    assert registry.names() == ["ours", "theirs"]
    assert registry.build("theirs", key="model") == "made"
    assert "their.package" in registry.about("theirs")


def test_files_are_found_beside_the_toml_then_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = write(tmp_path, "exp/parts.json", "{}")
    assert locate("parts.json", "data.partition.file", tmp_path / "exp") == here.resolve()
    assert locate("exp/parts.json", "data.partition.file", tmp_path / "exp") == here.resolve()
    said = refused(BadInput, lambda: locate("no.json", "data.partition.file", tmp_path))
    assert said.startswith('data.partition.file: there is no "no.json" beside the TOML')
    assert said.endswith("or in the current folder")
