"""Comparisons: every label at every seed, in workers that end with their parent."""

import csv
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from running import TOML, bits, end, lines, rounds_of, same, start, wait_for, wait_for_round, write

from undrift import config
from undrift.comparison import begin, clear, done, held, jobs, side_by_side
from undrift.errors import BadInput

LABELS = """
[compare.a]
algorithm = {name = "fedavg"}

[compare.b]
algorithm = {name = "mine:Slow"}
local.lr = 0.05
"""
MORE = ["--seeds", "1", "-q"]
POSIX = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals of POSIX")


@pytest.fixture
def toml(tmp_path):
    return write(tmp_path, TOML + LABELS)


def compare(toml, out, *arguments, code=0):
    got, said, err = end(start("compare", toml, "--out", toml.parent / out, *MORE, *arguments))
    assert got == code, (got, said, err)
    assert said == ""
    return err


def folders(out):
    return [out / run["folder"] for run in json.loads((out / "comparison.json").read_text())["runs"]]


def table(out):
    with open(out / "summary.csv", newline="") as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The comparison that was left alone."""
    folder = tmp_path_factory.mktemp("alone")
    assert compare(write(folder, TOML + LABELS), "a", "--set", "run.rounds=40") == ""
    return folder / "a"


def test_what_a_comparison_leaves(alone):
    assert {p.name for p in alone.iterdir()} >= {"comparison.json", "summary.csv", "report.html", "a", "b"}
    assert [row["label"] for row in table(alone)] == ["a", "b"]
    comparison = json.loads((alone / "comparison.json").read_text())
    assert comparison["baseline"] == "a" and comparison["format"] == 1
    a, b = folders(alone)
    assert rounds_of(a) == rounds_of(b) == 40
    assert [r["cohort"] for r in lines(a)] == [r["cohort"] for r in lines(b)]
    assert "mine:Slow" in (b / "config.toml").read_text() and (b / "sources").is_dir()


def test_a_run_of_a_comparison_is_the_run_alone(alone, tmp_path):
    from undrift.running import run

    toml = write(tmp_path)
    sets = ["algorithm.name='fedavg'", "run.rounds=40"]
    run(config.read(toml, sets), tmp_path / "a")
    same(tmp_path / "a", folders(alone)[0])


def workers(folder):
    return [int(p.name.removeprefix("worker-")) for p in folder.glob("worker-*")]


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # killed and not yet waited for: only Linux tells
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


@POSIX
def test_killed_its_workers_end_and_it_goes_on(toml, tmp_path, alone):
    more = ["--set", "run.rounds=40"]
    process = start("compare", toml, "--out", tmp_path / "c", *MORE, *more)
    wait_for(tmp_path / "c" / "a" / "seed-0" / "checkpoint" / "final.safetensors", process)
    wait_for_round(tmp_path / "c" / "b" / "seed-0", 2, process)
    process.kill()
    end(process)
    [pid] = workers(tmp_path)
    until = time.monotonic() + 10
    while lives(pid):
        assert time.monotonic() < until, "the worker outlives its parent"
        time.sleep(0.05)
    a, _ = folders(tmp_path / "c")
    before = (a / "metrics.jsonl").stat().st_mtime_ns
    compare(toml, "c", *more, "--resume")
    assert (a / "metrics.jsonl").stat().st_mtime_ns == before  # a finished run is not done again
    for mine, theirs in zip(folders(tmp_path / "c"), folders(alone), strict=True):
        same(mine, theirs)
    assert table(tmp_path / "c") == table(alone)


@POSIX
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_stopped_all_its_runs_are_saved(toml, tmp_path, alone, name):
    more = ["--set", "run.rounds=40", "--algorithms", "b"]
    process = start("compare", toml, "--out", tmp_path / "c", *MORE, *more, start_new_session=True)
    run = tmp_path / "c" / "b" / "seed-0"
    wait_for_round(run, 3, process)
    # Ctrl-C reaches the workers too, a batch system's signal the parent alone.
    os.killpg(process.pid, signal.SIGINT) if name == "SIGINT" else process.terminate()
    code, out, err = end(process, 10)
    assert code == 130 and out == "" and err == f"undrift: {name}: the runs are saved, --resume goes on from there\n"
    assert not any(map(lives, workers(tmp_path)))
    assert json.loads((run / "checkpoint" / "current.json").read_text())["round"] == rounds_of(run) < 40
    compare(toml, "c", *more, "--resume")
    same(run, folders(alone)[1])


def test_one_that_fails_does_not_stop_the_others(toml, tmp_path):
    said = compare(toml, "c", "--algorithms", "mine:Wrong,fedavg,mine:Dies,scaffold", "--set", "run.threads=1", code=3)
    assert said.count("\n") == 1 and "mine:Wrong, seed 0" in said and "mine.py, line" in said and "2 of 4" in said
    assert {p.name: rounds_of(p / "seed-0") for p in (tmp_path / "c").iterdir() if p.is_dir()} == {
        "mine-Wrong": 2, "fedavg": 6, "mine-Dies": 0, "scaffold": 6,
    }  # fmt: skip
    assert (tmp_path / "c" / "report.html").exists()


def test_all_of_them_wrong_is_bad_input(toml, tmp_path):
    said = compare(toml, "c", "--set", "participation.clients=99", code=2)
    assert said.count("\n") == 1 and "participation.clients" in said and "2 of 2" in said


def test_bad_comparisons(tmp_path):
    toml = write(tmp_path, TOML + LABELS)
    document, folder = config.load(toml), str(tmp_path)
    for algorithms, word in ((["fedavgg"], "fedavgg"), (["a", "a"], "twice"), (["mine:No"], "No")):
        with pytest.raises(BadInput, match=word):
            jobs(document, folder, algorithms, 1)
    with pytest.raises(BadInput, match="compare"):
        jobs(config.load(write(tmp_path)), folder, None, 1)
    with pytest.raises(BadInput, match="2\\^53"):
        jobs(config.assign(document, f"run.seed={2**53}"), folder, None, 2)


def test_labels_names_and_files_side_by_side(toml):
    todo = jobs(config.load(toml), str(toml.parent), ["a", "fedcm", "mine:Mine", "mine.py:Mine"], 2)
    assert [(job.label, job.seed) for job in todo[:4]] == [
        ("a", 0),
        ("fedcm", 0),
        ("mine:Mine", 0),
        ("mine.py:Mine", 0),
    ]
    assert len({job.folder for job in todo}) == len(todo) == 8
    assert todo[1].document["algorithm"]["name"] == "fedcm" and todo[0].document["local"] == todo[1].document["local"]


def test_a_comparison_goes_on_only_as_what_it_was(toml, tmp_path):
    todo = jobs(config.load(toml), str(tmp_path), None, 2)
    out = tmp_path / "c"
    out.mkdir()
    begin(out, todo, "a", resume=False)
    with pytest.raises(BadInput, match="--resume"):
        begin(out, todo, "a", resume=False)
    with pytest.raises(BadInput, match="b at seed 0"):
        begin(out, [job for job in todo if job.label == "a"], "a", resume=True)
    begin(out, [*todo, *jobs(config.load(toml), str(tmp_path), ["fedcm"], 2)], "a", resume=True)
    (out / "comparison.json").write_text("{")
    with pytest.raises(BadInput, match="comparison.json"):
        begin(out, todo, "a", resume=True)


def test_a_comparison_can_grow(toml, tmp_path, alone):
    """More rounds and more seeds; another setting is refused by name."""
    compare(toml, "c", "--algorithms", "a")
    [job] = jobs(config.load(toml), str(tmp_path), ["a"], 1)
    run = tmp_path / "c" / job.folder
    assert done(run, job)
    longer, other = (config.assign(config.load(toml), text) for text in ("run.rounds=40", "local.batch=4"))
    assert not done(run, jobs(longer, str(tmp_path), ["a"], 1)[0])
    with pytest.raises(BadInput, match="local.batch"):
        done(run, jobs(other, str(tmp_path), ["a"], 1)[0])
    compare(toml, "c", "--algorithms", "a", "--set", "run.rounds=40", "--resume")
    assert bits(run) == bits(folders(alone)[0])


def test_one_process_at_a_time(tmp_path):
    with held(tmp_path / "c"), pytest.raises(BadInput, match="another process"), held(tmp_path / "c"):
        pass
    with held(tmp_path / "c"):
        pass


def test_only_a_demo_that_is_done_is_cleared(tmp_path):
    out = tmp_path / "c"
    clear(out)  # nothing there
    (out / "a").mkdir(parents=True)
    clear(out)
    assert (out / "a").exists()  # no comparison: somebody else's
    (out / "comparison.json").write_text("{}")
    with held(out), pytest.raises(BadInput, match="another process"):
        clear(out)
    clear(out)
    assert [p.name for p in out.iterdir()] in ([], [".lock"])


def test_how_many_at_once(toml, monkeypatch):
    import undrift.comparison as module

    todo = jobs(config.load(toml), str(toml.parent), None, 1)
    for cores, threads, many in ((1, 1, 1), (8, 1, 8), (8, 3, 2), (2, 4, 1)):
        monkeypatch.setattr(module, "cores", lambda cores=cores: cores)
        run = todo[0].document["run"] | {"threads": threads, "device": "cpu"}
        assert side_by_side([type(todo[0])("a", 0, "a", {"run": run})]) == many


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
def test_a_comparison_tells_what_it_did(toml, tmp_path):
    code, out, err = end(start("compare", toml, "--out", tmp_path / "c", "--seeds", "1", "--algorithms", "a"))
    assert code == 0 and "accuracy" in out and str(tmp_path / "c" / "report.html") in out
    assert "one client at a time" in err
