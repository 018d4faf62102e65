"""Documents become experiments, or are refused in one sentence that names the key."""

import random
import tomllib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undrift.config import (
    SECTIONS,
    Experiment,
    Local,
    assign,
    derive,
    differences,
    document,
    load,
    parse,
    read,
    write_toml,
)
from undrift.errors import BadInput

GOOD = """
[data]
name = "mnist"
partition = {name = "dirichlet", alpha = 0.3, clients = 100}
validation = 0.1
[task]
metrics = ["accuracy", {name = "topk", k = 5}]
[model]
name = "mlp"
hidden = [64]
[local]
lr = 0.1
steps = 12
batch = 50
optimizer = {name = "adam", b1 = 0.8}
schedule = {name = "exponential", decay = 0.998}
[algorithm]
name = "fedacg"
lam = 0.85
parts = [{part = "prox", mu = 0.1}]
[participation]
clients = 10
weights = "uniform"
[run]
rounds = 1000
seed = 3
[compare.mine]
algorithm = {name = "fedcm", alpha = 0.1}
local.lr = 0.3
tune = {"algorithm.alpha" = [0.05, 0.1]}
"""
DOCUMENT = tomllib.loads(GOOD)


def refused(call):
    with pytest.raises(BadInput) as caught:
        call()
    said = str(caught.value)
    assert 0 < len(said) <= 400
    assert len(said.splitlines()) == 1
    assert "pydantic" not in said
    return said


def changed(*sets, base=DOCUMENT):
    for text in sets:
        base = assign(base, text)
    return base


def test_an_empty_document_is_the_default_experiment():
    assert parse({}) == Experiment()
    assert Experiment().local.epochs == 5
    assert document(parse({}))["run"]["rounds"] == 100


def test_a_whole_document():
    e = parse(DOCUMENT, "/somewhere")
    assert e.data.partition == {"name": "dirichlet", "alpha": 0.3, "clients": 100}
    assert e.model.options == {"hidden": [64]}
    assert (e.local.steps, e.local.epochs) == (12, None)
    assert e.local.optimizer == {"name": "adam", "b1": 0.8, "b2": 0.999, "eps": 1e-8}
    assert e.algorithm.options == {"lam": 0.85}
    assert e.compare["mine"]["tune"] == {"algorithm.alpha": [0.05, 0.1]}
    assert e.folder == "/somewhere"
    assert e == parse(DOCUMENT)


def test_whole_numbers_become_floats_where_a_number_is_wanted():
    lr = parse({"local": {"lr": 1}}).local.lr
    assert (lr, type(lr)) == (1.0, float)


def test_short_forms_are_filled_in():
    local = parse({"local": {"optimizer": "adam", "schedule": "cosine"}}).local
    assert local.optimizer == {"name": "adam", "b1": 0.9, "b2": 0.999, "eps": 1e-8}
    assert local.schedule == {"name": "cosine", "rounds": None, "final": 0.0}
    assert parse({"local": {"optimizer": {"name": "sgd"}}}) == Experiment()
    assert parse({"data": {"partition": "iid"}}).data.partition == {"name": "iid"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local.lrr=1", "local.lrr: [local] has no such setting; did you mean lr (it takes: lr, epochs, "),
        ("runn.rounds=1", "runn is no table of an experiment; did you mean run (there are: data, task, "),
        ("lr=1", "lr must stand in a table; did you mean local.lr"),
        ("run=3", "run must be a table, [run], not 3"),
        ("run=[{rounds=3}]", "[[run]] is a list of tables, run must be one table, [run]"),
        ("run.rounds={}", "[run.rounds] is a table, run.rounds must be a whole number of at least 1"),
        ("run.rounds=true", "run.rounds must be a whole number of at least 1, not true"),
        ("run.rounds=1.0", "run.rounds must be a whole number of at least 1, not 1.0"),
        ("run.rounds=0", "run.rounds must be a whole number of at least 1, not 0"),
        ("run.seed=-1", "run.seed must be a whole number of at least 0, not -1"),
        ("run.seed=9007199254740993", "run.seed must lie within 2^53 = 9007199254740992, not 9007199254740993"),
        ("model.width=-9007199254740993", "model.width must lie within 2^53"),
        ("local.lr=-0.1", "local.lr must be a number above 0, not -0.1"),
        ("local.lr=0", "local.lr must be a number above 0, not 0"),
        ("local.lr=0.0.5", 'local.lr must be a number above 0, not "0.0.5"'),
        ("local.lr=nan", "local.lr must be a finite number, not nan"),
        ("local.lr=1e400", "local.lr must be a finite number, not inf"),
        ("algorithm.lam=-inf", "algorithm.lam must be a finite number, not -inf"),
        ("local.momentum=1", "local.momentum must be a number of at least 0 and below 1, not 1"),
        ("local.clip=0", "local.clip must be a number above 0, not 0"),
        ("local.drop_last=1", "local.drop_last must be true or false, not 1"),
        ("data.validation=1.0", "data.validation must be a number of at least 0 and below 1, not 1.0"),
        ("data.name=1979-05-27", "data.name is a date or a time; it must be a text"),
        ("data.name=''", 'data.name must be text that is not empty, not ""'),
        ('data.folder="a\\u0000b"', "data.folder must be text without NUL characters"),
        ("task.loss={x=1}", "task.loss must have a name"),
        ("task.metrics=[{name=1}]", "task.metrics[0].name must be text that is not empty, not 1"),
        ("algorithm.parts=[{x=1}]", "algorithm.parts[0] must have a part"),
        ("algorithm.parts={}", "[algorithm.parts] is a table, algorithm.parts must be a list of tables"),
        (
            "local.optimizer=adma",
            'local.optimizer: there is no optimizer "adma"; did you mean adam (there are: sgd, adam)',
        ),
        (
            "local.optimizer.b3=1",
            "local.optimizer.b3: adam has no such setting (it takes: b1, b2, eps)",
        ),
        ("local.schedule={name='steps'}", "local.schedule.at is missing: steps needs it"),
        ("local.schedule={name='step'}", 'local.schedule.name: there is no schedule "step"; did you mean steps'),
        ("local.schedule={name='steps', at=[]}", "local.schedule.at must be a list of rounds"),
        ("run.device=tpu", 'run.device must be "auto", "cpu", "cuda" or "cuda:N", not "tpu"'),
        ("run.chunk=0", 'run.chunk must be "auto" or a whole number of at least 1, not 0'),
        ("run.memory=-1", 'run.memory must be "auto" or a number above 0, not -1'),
        ("run.precision=fp8", 'run.precision must be "auto", "float64", "float32", "tf32" or "bf16", not "fp8"'),
        ("format=2", "format must be 1"),
        ("compare.mine.local.lr=-1", "compare.mine.local.lr must be a number above 0, not -1"),
        ("compare.mine.run.rounds={}", "[compare.mine.run.rounds] is a table, run.rounds must be"),
        ("compare.mine.local={steps=1, epochs=1}", "compare.mine.local.epochs and local.steps are two ways"),
        ("compare.mine.what.x=1", "compare.mine.what is no table of an experiment"),
        ("compare.mine.compare.x.run.rounds=1", "compare.mine.compare cannot stand in another comparison"),
        ("compare.mine.tune.local.lr=0.1", "compare.mine.tune.local.lr must be a list of values to try, not 0.1"),
        ("compare.mine.tune.local.lr=[0.1, -1]", "compare.mine.tune: local.lr must be a number above 0, not -1"),
        ("compare.mine.tune=3", "compare.mine.tune must be a table"),
        ("compare.'../x'.run.rounds=1", 'compare."../x" must have a label that can name a folder'),
        ("compare.x=3", "compare.x must be a table"),
        ('"".x=1', '"" must have a name that can be read'),
        ("model." + "a." * 40 + "b=1", "model.a.a.a"),
    ],
)
def test_one_sentence_that_names_the_key(text, said):
    assert refused(lambda: parse(changed(text))).startswith(said)


def test_two_ways_to_say_the_length_of_a_round():
    said = refused(lambda: parse({"local": {"epochs": 1, "steps": 2}}))
    assert said.startswith("local.epochs and local.steps")
    assert refused(lambda: Local(epochs=1, steps=2)) == said


def test_several_problems_are_counted():
    said = refused(lambda: parse({"local": {"lr": -1, "batch": 0}, "run": {"what": 1}}))
    assert said == "local.lr must be a number above 0, not -1 (and 2 more)"


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        None,
        [],
        {1: {}},
        {"model": {"x": [None]}},
        {"model": {"x": {1, 2}}},
        {"model": {"x": b""}},
        {"data": {"partition": {"alpha": 1}}},
    ],
)
def test_what_is_no_document_at_all(wrong):
    refused(lambda: parse(wrong))


# --set, labels, differences


def test_set_is_a_line_of_toml_and_else_a_text():
    assert parse(changed("local.lr=0.05")).local.lr == 0.05
    assert parse(changed("local.lr = 0.05 # a comment")).local.lr == 0.05
    assert parse(changed("algorithm.name=fedcm")).algorithm.name == "fedcm"
    assert parse(changed("algorithm.name=my_file.py:Mine")).algorithm.name == "my_file.py:Mine"
    assert parse(changed('model.hidden=[1, "=2"]')).model.options == {"hidden": [1, "=2"]}
    assert parse(changed('compare."a b".run.rounds=3')).compare["a b"] == {"run": {"rounds": 3}}
    for wrong in ("x", "", "=", "=3", "x=", "[run]=3", "run.rounds=3\nrun.seed=4", "# a = 1", "a b=1", "a..b=1"):
        assert refused(lambda wrong=wrong: changed(wrong)).startswith("--set ")


def test_a_new_name_takes_the_place_of_the_whole_table():
    assert changed("algorithm.name=fedcm")["algorithm"] == {"name": "fedcm"}
    assert changed("algorithm.name=fedacg") == DOCUMENT
    assert changed("algorithm={name='fedacg', beta=1}")["algorithm"] == {"name": "fedacg", "beta": 1}
    assert changed("algorithm.beta=1")["algorithm"] == DOCUMENT["algorithm"] | {"beta": 1}
    assert changed("participation.name=uniform")["participation"] == DOCUMENT["participation"] | {"name": "uniform"}
    assert changed("participation.name=cyclic")["participation"] == {"name": "cyclic"}
    assert changed("data.partition.name=iid")["data"]["partition"] == {"name": "iid"}
    assert changed("data.partition.alpha=1")["data"]["partition"]["clients"] == 100
    assert changed("local.optimizer=sgd")["local"]["optimizer"] == "sgd"


def test_the_later_of_epochs_and_steps_holds():
    local = parse(changed("local.epochs=2")).local
    assert (local.epochs, local.steps) == (2, None)
    resolved = document(parse({}))
    local = parse(derive(resolved, {"local": {"steps": 7}})).local
    assert (local.epochs, local.steps) == (None, 7)


def test_a_label_derives_its_own_document_and_leaves_the_first_alone():
    before = write_toml(DOCUMENT)
    mine = derive(DOCUMENT, {"algorithm": {"name": "fedcm", "alpha": 0.1}, "local": {"lr": 0.3}})
    assert mine["algorithm"] == {"name": "fedcm", "alpha": 0.1}
    assert mine["local"] == DOCUMENT["local"] | {"lr": 0.3}
    dotted = derive(DOCUMENT, {"algorithm.alpha": 0.1, "local.lr": 0.3, "algorithm.name": "fedcm"})
    assert dotted == mine
    assert write_toml(DOCUMENT) == before
    assert refused(lambda: derive(DOCUMENT, {"a..b": 1})).startswith('"a..b" must be a path')


def test_tune_is_read_however_it_is_written():
    e = parse(changed("compare.mine.tune={local.lr=[0.1], 'algorithm.alpha'=[1]}"))
    assert e.compare["mine"]["tune"] == {"local.lr": [0.1], "algorithm.alpha": [1]}


def test_differences_are_dotted_keys():
    a = document(parse(DOCUMENT))
    assert differences(a, a) == []
    b = document(parse(changed("run.rounds=2000", "algorithm.lam=0.5", "local.clip=1", "model.hidden=[65]")))
    assert differences(a, b) == ["model.hidden", "local.clip", "algorithm.lam", "run.rounds"]
    assert differences({"a": {"b": 1}}, {}) == ["a.b"]
    assert differences({"a": {"b": None}}, {}) == []
    assert differences({"a": 1}, {"a": True}) == ["a"]
    assert differences({"a": [1, {"b": 0}]}, {"a": [1, {"b": False}]}) == ["a"]
    assert differences({"a": 1}, {"a": 1.0}) == []


# Files


def test_reading_a_file(tmp_path):
    path = tmp_path / "e.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    e = read(path, ["run.rounds=7"])
    assert e == replace(parse(DOCUMENT), run=replace(parse(DOCUMENT).run, rounds=7))
    assert e.folder == str(tmp_path.resolve())


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"[run]\nrounds = 1\nrounds = 2\n[local]", "is not TOML at line 3, column 11: this key is set twice"),
        (b"[run]\n[run]", "is not TOML at line 2, column 5: cannot declare run twice"),
        (b"[run]\nrounds =", "is not TOML at line 2, its end: invalid value"),
        (b"[run]\n# \xff", "is not text in UTF-8 (line 2, byte 9 of the file)"),
        (b"x = " + b"[" * 100_000, "is nested too deeply"),
        (b"x = " + b"9" * 10_000, "holds a number of too many digits"),
        (b"\0", "is not TOML at line 1, column 1"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, raw, said):
    path = tmp_path / "e.toml"
    path.write_bytes(raw)
    assert refused(lambda: read(path)).startswith(f"{path} {said}")


def test_paths_that_are_no_files(tmp_path):
    assert refused(lambda: read(tmp_path / "no.toml")) == f"{tmp_path / 'no.toml'} does not exist"
    assert "is a folder" in refused(lambda: read(tmp_path))
    assert "cannot be read" in refused(lambda: read("a\0b"))
    assert "aaa" in refused(lambda: read("a" * 5000))


def test_a_resolved_document_with_what_a_run_records_can_be_read_again():
    resolved = document(parse(DOCUMENT)) | {"format": 1, "recorded": {"versions": {"torch": "2"}}}
    assert parse(tomllib.loads(write_toml(resolved))) == parse(DOCUMENT)


# Any document: an experiment or one sentence

numbers = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 10**30]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0.001, 0.999),
)
words = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["auto", "adam", "cosine", "steps", "cuda:0", "uniform", "iid", "", "\0", "x\ny", "\ud800", "a" * 3000]
    ),
)
known_keys = sorted(
    {name for make in SECTIONS.values() for name in make.__dataclass_fields__}
    | {"part", "decay", "at", "b1", "tune", "file"}
)
keys = st.one_of(
    st.sampled_from(known_keys), st.text(max_size=8), st.sampled_from(["lr ", "__class__", "Rounds", "a b"])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words, st.dates(), st.times(), st.datetimes()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)
tables = st.dictionaries(st.one_of(st.sampled_from([*SECTIONS, "compare", "format"]), keys), values, max_size=4)
quick = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_any(make):
    """Either an experiment, that survives being written down, or one short sentence."""
    try:
        experiment = make()
    except BadInput as problem:
        said = str(problem)
        assert 0 < len(said) <= 400
        assert len(said.splitlines()) == 1
        return None
    assert parse(document(experiment)) == experiment
    assert document(parse(document(experiment))) == document(experiment)
    return experiment


@quick
@given(tables)
def test_any_document(random_document):
    check_any(lambda: parse(random_document))


@quick
@given(st.sampled_from([*SECTIONS]), keys, values)
def test_any_value_anywhere(section, key, value):
    check_any(lambda: parse(derive(DOCUMENT, {section: {key: value}})))
    check_any(lambda: parse({**DOCUMENT, section: {**DOCUMENT.get(section, {}), key: value}}))


@quick
@given(st.sampled_from([*SECTIONS]), keys, values)
def test_any_value_under_a_label(section, key, value):
    check_any(lambda: parse({**DOCUMENT, "compare": {"mine": {section: {key: value}, "tune": {key: value}}}}))


@quick
@given(st.dictionaries(keys, st.dictionaries(keys, values, max_size=3), max_size=3))
def test_any_options_survive_being_written(options):
    experiment = check_any(lambda: parse({**DOCUMENT, "algorithm": options}))
    if experiment is not None:
        text = write_toml(document(experiment))
        again = tomllib.loads(text)
        assert write_toml(again) == text
        assert differences(document(parse(again)), document(experiment)) == []


@quick
@given(
    st.one_of(st.text(max_size=30), st.builds("{}={}".format, st.sampled_from(["run.rounds", "local.lr", "x"]), words))
)
def test_any_set(text):
    check_any(lambda: parse(assign(DOCUMENT, text)))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("bytes") / "e.toml"
    path.write_bytes(raw)
    check_any(lambda: read(path))


GARBAGE = [
    *("-1", "0", "1e400", "nan", "inf", "-inf", '""', '"\\u0000"', "true", "[]", "{}", '"fast"', "1.5", "9" * 20),
    *('"../../etc"', "[1, 2]", "{a = 1}", '"ü"', "1979-05-27", "'''x\ny'''", "[" * 5000, "9" * 5000, "07:32:00"),
]


@pytest.mark.parametrize("seed", range(150))
def test_a_good_file_with_one_random_change(tmp_path, seed):
    pick, lines = random.Random(seed), GOOD.splitlines()
    line, how = (
        pick.randrange(len(lines)),
        pick.choice(["value", "value", "key", "drop", "double", "cut", "section", "bytes"]),
    )
    if how == "value":
        lines[line] = lines[line].split("=")[0] + "= " + pick.choice(GARBAGE)
    elif how == "key":
        lines[line] = pick.choice(["x", "lr ", "__class__", "Rounds", '"a b"']) + " =" + lines[line].partition("=")[2]
    elif how == "drop":
        del lines[line]
    elif how == "double":
        lines.insert(line, lines[line])
    elif how == "cut":
        lines[line] = lines[line][: pick.randrange(len(lines[line]) + 1)]
    elif how == "section":
        lines.insert(line, pick.choice(["[", "[what]", "[[run]]", "[run.rounds]"]))
    raw = "\n".join(lines).encode()
    if how == "bytes":
        raw = raw[: pick.randrange(len(raw) + 1)] + pick.randbytes(3)
    path = tmp_path / "e.toml"
    path.write_bytes(raw)
    check_any(lambda: read(path))


def test_the_document_of_a_file_is_what_stands_there(tmp_path):
    path = tmp_path / "e.toml"
    path.write_text(GOOD, encoding="utf-8")
    assert load(path) == DOCUMENT
