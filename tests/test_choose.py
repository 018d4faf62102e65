"""What `auto` stands for, the table of speeds behind it, and what a resume takes over."""

import json
import subprocess
import sys

import pytest
import torch
from running import lines, write

from undrift import choose, config, speeds
from undrift.choose import Choices, allowed, cores, place
from undrift.errors import BadInput, RunFailed
from undrift.experiment import build
from undrift.record import read_config
from undrift.running import run


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds, "SECONDS", 0.01)
    return tmp_path / "cache" / "speeds"


@pytest.fixture
def toml(tmp_path):
    return write(tmp_path)


AUTO = ["run.engine='auto'", "run.threads='auto'"]


# ---------------------------------------------------------------- the table


def test_what_was_measured_once_is_kept(cache):
    calls = []
    ways = {name: lambda name=name: calls.append(name) for name in ("loop", "vmap")}
    first = speeds.speeds("work", ways)
    assert first.keys() == ways.keys() and set(calls) == set(ways)
    calls.clear()
    assert speeds.speeds("work", ways) == first and not calls
    speeds.speeds("other work", ways)
    assert calls and len(list(cache.glob("*.json"))) == 2 and not list(cache.glob("*.part"))


def test_another_machine_measures_for_itself(cache, monkeypatch):
    speeds.speeds("work", {"loop": lambda: None})
    monkeypatch.setattr(speeds, "machine", lambda: "another")
    speeds.speeds("work", {"loop": lambda: None})
    assert len(list(cache.glob("*.json"))) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"loop": "fast"}', '{"loop": 1.0}', '{"loop": 1.0, "vmap": null}'])
def test_a_damaged_entry_is_measured_again(cache, text):
    ways = {"loop": lambda: None, "vmap": lambda: None}
    first = speeds.speeds("work", ways)
    [path] = cache.glob("*.json")
    path.write_text(text)
    again = speeds.speeds("work", ways)
    assert again.keys() == ways.keys() == first.keys()
    assert json.loads(path.read_text()) == again


def test_of_two_the_first_to_write_wins():
    """The other measures too, and then takes what is there."""
    others = {}

    def slower():
        if not others:
            others.update(loop=0.25, vmap=0.5)
            speeds.entry("work").parent.mkdir(parents=True)
            speeds.entry("work").write_text(json.dumps(others))

    assert speeds.speeds("work", {"loop": slower, "vmap": slower}) == {"loop": 0.25, "vmap": 0.5}


RACE = """
import sys, time
from undrift import speeds
speeds.SECONDS = 0.1
print(sorted(speeds.speeds("work", {"loop": lambda: time.sleep(0.01), "vmap": lambda: time.sleep(0.01)}).items()))
"""


def test_processes_that_measure_at_once_agree():
    racers = [subprocess.Popen([sys.executable, "-c", RACE], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {racer.communicate(timeout=100)[0] for racer in racers}
    assert len(said) == 1 and "loop" in said.pop()


def test_without_a_cache_folder_it_goes_on(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "file"))
    assert speeds.speeds("work", {"loop": lambda: None}).keys() == {"loop"}


# ---------------------------------------------------------------- choices


def quick(name):
    return lambda work, ways: {way: 0.1 if way == name else 1.0 for way in ways}


@pytest.mark.parametrize("name", ["loop", "vmap"])
def test_the_quicker_way_is_taken_and_written_down(toml, tmp_path, monkeypatch, name):
    monkeypatch.setattr(choose, "speeds", quick(name))
    said = []
    run(config.read(toml, AUTO), tmp_path / "a", notice=said.append)
    recorded = read_config(tmp_path / "a")["recorded"]["choices"]
    assert recorded["engine"] == name and recorded["chunk"] == (3 if name == "vmap" else 1)
    assert str(Choices(**recorded)) in said


def test_a_resume_takes_what_was_chosen(toml, tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "speeds", quick("vmap"))
    run(config.read(toml, AUTO), tmp_path / "a")
    monkeypatch.setattr(choose, "speeds", quick("loop"))
    monkeypatch.setattr(choose, "cores", lambda: 64)
    said = []
    run(config.read(toml, [*AUTO, "run.rounds=8"]), tmp_path / "a", resume=True, notice=said.append)
    assert read_config(tmp_path / "a")["recorded"]["choices"]["engine"] == "vmap"
    assert any("vmap" in text for text in said) and len(lines(tmp_path / "a")) == 8


def test_what_is_forced_is_not_measured(toml, monkeypatch):
    def never(*_):
        raise AssertionError("it was measured")

    monkeypatch.setattr(choose, "speeds", never)
    for text, how in (("run.engine='vmap'", ("vmap", 3)), ("run.engine='loop'", ("loop", 1))):
        choices = build(config.read(toml, [text])).choices
        assert (choices.engine, choices.chunk) == how
    choices = build(config.read(toml, ["run={engine='vmap', chunk=2}"])).choices
    assert (choices.engine, choices.chunk) == ("vmap", 2)


def test_threads_are_those_that_are_asked_for(toml, monkeypatch):
    assert build(config.read(toml, ["run={engine='loop', threads=2}"])).choices.threads == 2
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(choose, "cores", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert build(config.read(toml, ["run={engine='loop', threads='auto'}"])).choices.threads == 1
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("said", "threads"), [(None, 8), ("3", 3), ("16", 8), ("4,2", 4), ("0", 8), ("many", 8), ("", 8), ("-1", 8)]
)
def test_the_environment_may_ask_for_fewer_threads(monkeypatch, said, threads):
    monkeypatch.setattr(choose, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert allowed() == threads


def test_there_is_at_least_one_core():
    assert cores() >= 1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("run.precision='bf16'", "run.precision"),
        ("run.compile='yes'", "run.compile"),
        ("run.threads=4000000", "run.threads"),
        ("run.device='cuda:99'", "run.device"),
    ],
)
def test_what_there_is_not(toml, text, word):
    with pytest.raises(BadInput, match=word):
        place(config.read(toml, [text]).run)


def test_a_module_that_cannot_be_batched(toml, tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 10)\n"
        "    def forward(self, x):\n        return self.layer(x) * (2.0 if float(x.sum()) > 0 else 1.0)\n"
    )
    built = build(config.read(toml, ["run.engine='auto'", "model={name='net:Net'}"]))
    assert built.choices.engine == "loop" and "Net" in built.notices[0]
    with pytest.raises(BadInput, match="run.engine"):
        build(config.read(toml, ["run.engine='vmap'", "model={name='net:Net'}"]))


def test_memory_bounds_the_chunk(toml):
    for memory in ("1e300", "1.0"):
        assert build(config.read(toml, ["run.engine='vmap'", f"run.memory={memory}"])).choices.chunk == 3
    with pytest.raises(RunFailed, match="memory"):
        build(config.read(toml, ["run.engine='vmap'", "run.memory=1e-9"]))


def test_the_choice_does_not_rest_on_the_number_of_rounds(toml, monkeypatch):
    asked = []
    monkeypatch.setattr(choose, "speeds", lambda work, ways: asked.append(work) or dict.fromkeys(ways, 1.0))
    for rounds in (1, 1000):
        build(config.read(toml, ["run.engine='auto'", f"run.rounds={rounds}"]))
    assert len(asked) == 2 and asked[0] == asked[1]
