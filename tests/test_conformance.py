import copy
import json
import math

import pytest
import torch

from undrift.conformance import VECTORS, Unknown, read, replay, table, verify_run
from undrift.errors import BadInput
from undrift.verify import verify

FILES = sorted(VECTORS.glob("*.json"))
DOCUMENTS = {path.stem: read(path) for path in FILES}
RUNS = [(name, run) for name, document in DOCUMENTS.items() for run in document["runs"]]


def known(run):
    try:
        table(run)
    except Unknown:
        return False
    return True


def some(algorithm, **hp):
    """The first run of a method with these settings."""
    document = DOCUMENTS["golden"]
    return next(
        (document, run)
        for run in document["runs"]
        if run["algorithm"] == algorithm and all(run["hp"].get(k) == v for k, v in hp.items())
    )


@pytest.mark.parametrize(
    "how, every",
    [({"engine": "loop"}, 1), ({"engine": "vmap", "chunk": 2}, 1), ({"engine": "vmap"}, 3)],
    ids=["loop", "two at once", "whole cohorts"],
)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_known_vector_is_reproduced(name, how, every):
    runs = [run for run in DOCUMENTS[name]["runs"] if known(run)][::every]
    verdicts = [verify_run(DOCUMENTS[name], run, **how) for run in runs]
    assert [f"{v.id}: {v.why}" for v in verdicts if v.status != "passed"] == []
    assert len(verdicts) >= {"golden": 84, "golden2": 36}[name] // every
    assert max(v.gap for v in verdicts) < 1e-11


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "fedavgm", "fedopt", "scaffold", "fedcm", "fedacg", "mime"])
def test_the_methods_of_this_version_are_all_in_the_vectors(algorithm):
    assert sum(known(run) for _, run in RUNS if run["algorithm"] == algorithm) >= 4


def test_float32_is_near():
    for name, run in RUNS[::7]:
        if known(run):
            verdict = verify_run(DOCUMENTS[name], run, tolerance=1e-4, engine="loop", dtype=torch.float32)
            assert verdict.status == "passed", verdict


def test_a_replay_gives_the_model_after_every_round():
    document, run = some("scaffold")
    rounds = list(replay(document, run))
    assert len(rounds) == len(run["x"]) - 1
    for (x, down, up), truth in zip(rounds, run["x"][1:], strict=True):
        assert x.tolist() == pytest.approx(truth, rel=1e-9, abs=1e-12)
        assert (down, up) == (run["floats_down"][0], run["floats_up"][0]) or down > 0


def test_a_model_that_differs_fails_with_its_round():
    document, run = some("fedavgm")
    wrong = copy.deepcopy(run)
    wrong["x"][3][0] *= 1 + 1e-6
    verdict = verify_run(document, wrong)
    assert verdict.status == "failed" and verdict.why.startswith("round 3: the model differs by ")
    assert 1e-8 < verdict.gap < 1e-5


def test_a_model_that_is_not_finite_fails():
    document, run = some("fedavg")
    wrong = copy.deepcopy(run)
    wrong["hp"]["eta"] = math.inf
    assert verify_run(document, wrong).status == "failed"


def test_floats_that_differ_fail():
    document, run = some("fedcm")
    wrong = copy.deepcopy(run)
    wrong["floats_down"][1] += 1
    verdict = verify_run(document, wrong)
    sent = run["floats_down"][1]
    assert verdict.why.startswith(f"round 2: {sent:g} floats down and ")


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda run: run.update(algorithm="fedsomething"), "method fedsomething"),
        (lambda run: run["hp"].update(spin=1.0), "setting spin of fedavg"),
    ],
)
def test_what_this_version_does_not_know_is_unknown(change, says):
    document, run = some("fedavg")
    other = copy.deepcopy(run)
    change(other)
    verdict = verify_run(document, other)
    assert (verdict.status, verdict.why) == ("unknown", says)


def test_an_unknown_problem_is_unknown():
    document, run = some("fedavg")
    other = copy.deepcopy(document)
    other["problems"][run["problem"]]["kind"] = "riddle"
    assert verify_run(other, run).status == "unknown"


def small(tmp_path, *changes):
    """A file of two quick runs, changed."""
    document, run = some("fedavg")
    document = {k: v for k, v in document.items() if k != "runs"} | {"runs": [copy.deepcopy(run), copy.deepcopy(run)]}
    document["runs"][1]["id"] = "second"
    for change in changes:
        change(document)
    path = tmp_path / "vectors.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_verify_says_what_became_of_every_run(tmp_path, capsys):
    assert verify([small(tmp_path)], strict=True, quiet=False) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and said[1] == "passed  second" and said[2].startswith("2 passed, 0 failed, 0 unknown")
    worse = small(tmp_path, lambda d: d["runs"][1]["x"][2].__setitem__(0, 9.0))
    assert verify([worse], strict=False, quiet=True) == 1
    out = capsys.readouterr().out
    assert out.startswith("failed  second: round 2: the model differs by ")


def test_an_unknown_run_fails_only_under_strict(tmp_path, capsys):
    path = small(tmp_path, lambda d: d["runs"][0].update(algorithm="fedsomething"))
    assert verify([path], strict=False, quiet=False) == 0
    assert "unknown " in capsys.readouterr().out
    assert verify([path], strict=True, quiet=False) == 1


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "is no JSON"),
        ("[]", "holds no conformance vectors"),
        ("[" * 100_000, "is no JSON"),
        ('{"runs": [], "problems": {}}', "holds no conformance vectors"),
        ('{"runs": [{"id": 1}], "problems": {}, "schedules": {}}', "run 1 lacks algorithm, floats_down"),
    ],
    ids=["cut", "a list", "deep", "no schedules", "no fields"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, says):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as error:
        verify([path], strict=False, quiet=True)
    assert str(error.value).startswith(str(path)) and says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["runs"][1].update(problem="P9"),
        lambda d: d["runs"][1].update(schedule="never"),
        lambda d: d["runs"][1]["hp"].pop("eta"),
        lambda d: d["runs"][1].update(hp=None),
        lambda d: d["runs"][1].update(x=[[1.0]]),
        lambda d: d["runs"][1].update(x="no"),
        lambda d: d["runs"][1]["x"].__setitem__(1, [1.0]),
        lambda d: d.update(runs={"a": 1}),
        lambda d: d.update(runs=[3]),
        lambda d: d.update(runs=3),
        lambda d: d.update(problems=[]),
        lambda d: d["problems"][d["runs"][0]["problem"]].update(x0="here"),
        lambda d: d["schedules"][d["runs"][0]["problem"]][d["runs"][0]["schedule"]][0].pop("steps"),
    ],
    ids=range(13),
)
def test_a_damaged_run_is_bad_input(tmp_path, change):
    path = small(tmp_path, change)
    with pytest.raises(BadInput) as error:
        verify([path], strict=False, quiet=True)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadInput, match="nothing.json: No such file"):
        verify([tmp_path / "nothing.json"], strict=False, quiet=True)
