"""A run from outside: killed, stopped, resumed, lengthened, damaged, and what its folder says."""

import json
import os
import subprocess
import sys

import pytest
import torch
from running import bits, end, lines, same, start, wait_for, wait_for_round, write

from undrift import config
from undrift.errors import BadInput, RunFailed
from undrift.record import read_config
from undrift.running import run

POSIX = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def toml(tmp_path):
    return write(tmp_path)


def play(toml, out, *sets, resume=False, **more):
    return run(config.read(toml, sets), toml.parent / out, resume, **more)


def sentence(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    return text


# ---------------------------------------------------------------- killed

KILLS = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from undrift import config
from undrift.running import run

toml, seed = Path(sys.argv[1]), int(sys.argv[2])
experiment = config.read(toml, sys.argv[3:])
draw = random.Random(seed)

def child(out):
    pid = os.fork()
    if not pid:
        try:
            run(experiment, toml.parent / out, resume=True)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return pid

start = time.monotonic()
assert os.waitpid(child("whole"), 0)[1] == 0
seconds = time.monotonic() - start
kills = 0
while kills < 8:
    pid = child("killed")
    until, ended = time.monotonic() + draw.uniform(0.02, 0.7) * seconds, False
    while time.monotonic() < until and not ended:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
    if ended:
        assert status == 0, status
        break
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    kills += 1
assert kills, "it was never killed"
assert os.waitpid(child("killed"), 0)[1] == 0
"""


@POSIX
@pytest.mark.parametrize(
    "sets",
    [
        ["run.checkpoint_every=2"],
        ["run.checkpoint_every=1", "algorithm.name='mine:Mine'", "data.validation=0.2", "run.keep_best=true"],
    ],
    ids=["states", "records"],
)
def test_killed_at_random_moments_it_ends_with_the_same_bits(toml, tmp_path, sets):
    sets = [*sets, "run.rounds=30", "run.eval_every=4"]
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(toml), "1", *sets], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    same(tmp_path / "whole", tmp_path / "killed")
    if len(sets) > 3:
        assert bits(tmp_path / "whole", "best") == bits(tmp_path / "killed", "best")
        assert len(lines(tmp_path / "whole", "clients.jsonl")) == 30 * 3


@POSIX
def test_a_resume_begins_where_the_last_checkpoint_was(toml, tmp_path):
    slow = ["--set", "algorithm.name='mine:Slow'", "--set", "run.rounds=40", "--set", "run.checkpoint_every=5"]
    process = start("run", toml, "--out", tmp_path / "a", "-q", *slow)
    wait_for_round(tmp_path / "a", 22, process)
    process.kill()
    end(process)
    played = []
    sets = [text for text in slow if text != "--set"]
    play(toml, "a", *sets, resume=True, on_round=lambda record: played.append(record["round"]))
    assert played[0] in (21, 26, 31, 36) and played[-1] == 40
    play(toml, "b", *sets)
    same(tmp_path / "a", tmp_path / "b")


@POSIX
def test_killed_before_its_first_checkpoint_it_begins_anew(toml, tmp_path):
    more = ["algorithm.name='mine:Slow'", "run.rounds=30", "run.checkpoint_every=1000"]
    process = start("run", toml, "--out", tmp_path / "a", "-q", *(word for text in more for word in ("--set", text)))
    wait_for_round(tmp_path / "a", 3, process)
    process.kill()
    end(process)
    assert not (tmp_path / "a" / "checkpoint" / "current.json").exists()
    with pytest.raises(BadInput, match="--resume"):
        play(toml, "a", *more)
    records = play(toml, "a", *more, resume=True).records
    assert [record["round"] for record in records] == list(range(1, 31))


def test_resume_of_a_folder_that_is_not_there_begins(toml, tmp_path):
    play(toml, "a", resume=True)
    play(toml, "b")
    same(tmp_path / "a", tmp_path / "b")


# ---------------------------------------------------------------- lengthened


def test_more_rounds_end_with_the_bits_of_the_longer_run(toml, tmp_path):
    play(toml, "a", "run.rounds=7")
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    play(toml, "a", "run.rounds=11", resume=True)
    play(toml, "b", "run.rounds=11")
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes().startswith(before)
    assert bits(tmp_path / "a") == bits(tmp_path / "b")
    mine, theirs = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert "test_loss" in mine[6] and "test_loss" not in theirs[6]  # the evaluation at the old end stays
    mine[6] = {k: v for k, v in mine[6].items() if k in theirs[6]}
    assert mine == theirs
    assert read_config(tmp_path / "a")["run"]["rounds"] == 11


def test_a_finished_run_is_left_as_it_is(toml, tmp_path):
    play(toml, "a")
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file() and p.name != ".lock"}
    result = play(toml, "a", resume=True)
    assert not result.played and len(result.records) == 6
    assert before == {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file() and p.name != ".lock"}


def test_what_a_resume_refuses(toml, tmp_path):
    play(toml, "a")
    for text, word in (
        ("local.lr=0.2", "local.lr"),
        ("algorithm.option=1", "algorithm.option"),
        ("run.seed=1", "run.seed"),
        ("data.clients=13", "data.clients"),
        ("local.schedule='cosine'", "local.schedule"),
    ):
        with pytest.raises(BadInput) as error:
            play(toml, "a", text, resume=True)
        assert word in sentence(error) and str(tmp_path / "a") in sentence(error)
    with pytest.raises(BadInput) as error:
        play(toml, "a", "run.rounds=5", resume=True)
    assert "run.rounds = 5" in sentence(error) and "6" in sentence(error)
    with pytest.raises(BadInput, match="--resume"):
        play(toml, "a")
    play(toml, "a", "local.batch=5", resume=True)  # said otherwise, the same


def test_a_cosine_cannot_grow(toml, tmp_path):
    play(toml, "a", "local.schedule='cosine'")
    with pytest.raises(BadInput) as error:
        play(toml, "a", "local.schedule='cosine'", "run.rounds=9", resume=True)
    assert "cosine" in sentence(error) and "run.rounds" in sentence(error)
    fixed = "local.schedule={name='cosine', rounds=20}"
    play(toml, "b", fixed)
    play(toml, "b", fixed, "run.rounds=9", resume=True)
    play(toml, "c", fixed, "run.rounds=9")
    assert bits(tmp_path / "b") == bits(tmp_path / "c")


def test_other_source_files_are_refused_and_their_copies_are_there(toml, tmp_path):
    (tmp_path / "helper.py").write_text("RATE = 1.0\n")
    text = "import helper\nfrom undrift.algorithms.fedavg import FedAvg\ndef Own():\n    return FedAvg(helper.RATE)\n"
    (tmp_path / "own.py").write_text(text)
    own = "algorithm.name='own:Own'"
    play(toml, "a", own)
    copies = {p.name.partition("-")[2]: p for p in (tmp_path / "a" / "sources").iterdir()}
    assert copies["own.py"].read_text() == text and copies["helper.py"].read_text() == "RATE = 1.0\n"
    for name in ("own.py", "helper.py"):
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text(whole + "# changed\n")
        with pytest.raises(BadInput) as error:
            play(toml, "a", own, "run.rounds=9", resume=True)
        assert name in sentence(error) and str(copies[name]) in sentence(error)
        (tmp_path / name).write_text(whole)
    play(toml, "a", own, "run.rounds=9", resume=True)


def test_a_run_knows_only_its_own_sources(toml, tmp_path):
    """A worker plays many runs in one process."""
    play(toml, "a", "algorithm.name='mine:Mine'")
    play(toml, "b")
    assert read_config(tmp_path / "a")["recorded"]["sources"]["mine:Mine"]["file"] == str(tmp_path / "mine.py")
    assert read_config(tmp_path / "b")["recorded"]["sources"] == {}


def test_another_partition_is_refused(toml, tmp_path):
    rows = [list(range(40 * i, 40 * (i + 1))) for i in range(4)]
    (tmp_path / "parts.json").write_text(json.dumps(rows))
    data = "data={name='mnist', partition={file='parts.json'}}"
    play(toml, "a", data)
    (tmp_path / "parts.json").write_text(json.dumps([*rows[:3], rows[3][::-1]]))
    with pytest.raises(BadInput) as error:
        play(toml, "a", data, "run.rounds=9", resume=True)
    assert "parts.json" in sentence(error) and "sources" in sentence(error)
    (tmp_path / "parts.json").write_text(json.dumps(rows))
    play(toml, "a", data, "run.rounds=9", resume=True)


# ---------------------------------------------------------------- damaged


@pytest.mark.parametrize("name", ["current.json", "server-*.safetensors", "rows-*.safetensors"])
@pytest.mark.parametrize("how", ["cut", "flip", "gone", "empty"])
def test_a_damaged_checkpoint_is_named(toml, tmp_path, name, how):
    play(toml, "a")
    [path, *_] = (tmp_path / "a" / "checkpoint").glob(name)
    data = path.read_bytes()
    middle = len(data) // 2
    changed = {
        "cut": data[:middle],
        "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "empty": b"",
    }
    path.unlink() if how == "gone" else path.write_bytes(changed[how])
    with pytest.raises(BadInput) as error:
        play(toml, "a", "run.rounds=9", resume=True)
    assert path.name in sentence(error)
    path.write_bytes(data)  # nothing else was touched
    play(toml, "a", "run.rounds=9", resume=True)


@pytest.mark.parametrize(
    "data", [b"", b"[run", b"\xff\x00", b"format = 99\n", b"format = 1\n", b"format = 1\nrun = 3\n"]
)
def test_a_damaged_config_is_named(toml, tmp_path, data):
    play(toml, "a")
    (tmp_path / "a" / "config.toml").write_bytes(data)
    with pytest.raises(BadInput) as error:
        play(toml, "a", resume=True)
    assert "config.toml" in sentence(error)


# ---------------------------------------------------------------- one process at a time


def test_a_second_process_is_refused_while_the_first_lives(toml, tmp_path):
    sets = ["algorithm.name='mine:Stuck'"]
    process = start("run", toml, "--out", tmp_path / "a", "-q", "--set", *sets)
    wait_for(tmp_path / "stuck", process)
    for resume in (True, False):
        with pytest.raises(BadInput) as error:
            play(toml, "a", *sets, resume=resume)
        assert "another process" in sentence(error) and str(tmp_path / "a") in sentence(error)
    process.kill()
    end(process)
    (tmp_path / "free").touch()
    play(toml, "a", *sets, resume=True)
    play(toml, "b", *sets)
    same(tmp_path / "a", tmp_path / "b")


def test_a_run_does_not_go_into_a_comparison(toml, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "comparison.json").write_text("{}")
    for resume in (True, False):
        with pytest.raises(BadInput) as error:
            play(toml, "a", resume=resume)
        assert "comparison" in sentence(error)


# ---------------------------------------------------------------- what the records say


def test_the_records_have_the_fields_that_are_promised(toml, tmp_path):
    records = play(toml, "a", "data.validation=0.25").records
    every = {
        "round", "bytes_down", "bytes_up", "floats_down", "floats_up", "gradients", "seconds", "train_loss",
        "divergence", "cohort", "lost",
    }  # fmt: skip
    where = {
        "test_loss", "test_accuracy", "validation_loss", "validation_accuracy", "client_accuracy_mean",
        "client_accuracy_worst10",
    }  # fmt: skip
    for n, record in enumerate(records, 1):
        assert record["round"] == n and record["cohort"] == 3 and record["lost"] == 0
        assert record.keys() == every | (where if n in (3, 6) else set())
    for key in ("bytes_down", "bytes_up", "floats_down", "floats_up", "gradients", "seconds"):
        assert [r[key] for r in records] == sorted(r[key] for r in records)  # totals so far
    size = read_config(tmp_path / "a")["recorded"]["parameters"]
    assert records[-1]["floats_up"] == 6 * 3 * 2 * size and records[-1]["bytes_up"] == 4 * records[-1]["floats_up"]
    assert all(0 <= records[-1][key] <= 1 for key in where if "accuracy" in key)
    assert "validation_loss" not in play(toml, "b").records[-1]


def test_bytes_are_of_float32_whatever_is_computed_in(toml):
    single, double = (play(toml, name, f"run.precision='{name}'").records[-1] for name in ("float32", "float64"))
    assert single["bytes_up"] == double["bytes_up"] > 0


def test_lost_uploads_are_counted(toml):
    records = play(toml, "a", "participation.lost=0.5", "run.rounds=12").records
    assert 0 < sum(r["lost"] for r in records) < 36


def test_a_diverged_run_ends_and_stays_ended(toml, tmp_path):
    said = []
    wild = "local={lr=1e38, steps=2, batch=5}"
    result = play(toml, "a", wild, "run.rounds=50", notice=said.append)
    assert result.diverged and len(result.records) < 50 and result.records[-1]["diverged"]
    assert any("diverged" in text for text in said)
    assert "NaN" not in (tmp_path / "a" / "metrics.jsonl").read_text()
    again = play(toml, "a", wild, "run.rounds=50", resume=True)
    assert not again.played and again.diverged


def test_the_config_can_be_run_again(toml, tmp_path):
    play(toml, "a", "local.lr=0.07")
    assert run(config.read(tmp_path / "a" / "config.toml"), tmp_path / "b").played
    same(tmp_path / "a", tmp_path / "b")
    recorded = read_config(tmp_path / "a")["recorded"]
    assert recorded["versions"].keys() == {"undrift", "torch", "numpy", "python"}
    assert recorded["choices"]["engine"] == "loop" and recorded["choices"]["threads"] == 1


# ---------------------------------------------------------------- best model, weights to start from


def test_keep_best_needs_a_validation_share(toml):
    with pytest.raises(BadInput) as error:
        play(toml, "a", "run.keep_best=true")
    assert "run.keep_best" in sentence(error) and "data.validation" in sentence(error)


def test_the_best_model_is_the_one_of_the_best_evaluation(toml, tmp_path):
    sets = ["run.keep_best=true", "data.validation=0.3", "run.eval_every=1", "local.lr=3.0"]
    records = play(toml, "a", *sets, "run.rounds=12").records
    values = [r["validation_accuracy"] for r in records]
    best = values.index(max(values)) + 1
    assert best < 12  # else the test shows nothing
    play(toml, "b", *sets, f"run.rounds={best}")
    assert bits(tmp_path / "a", "best")["x"] == bits(tmp_path / "b")["server.x"]
    play(toml, "b", *sets, "run.rounds=12", resume=True)
    assert bits(tmp_path / "a", "best") == bits(tmp_path / "b", "best")


def test_weights_from_a_run_and_from_a_file(toml, tmp_path):
    play(toml, "first")
    from_run = play(toml, "a", "model.weights='first'").records
    fresh = play(toml, "b").records
    assert from_run[0]["train_loss"] != fresh[0]["train_loss"]

    from safetensors.torch import save_file

    from undrift.files import read_tensors

    x = read_tensors(tmp_path / "first" / "checkpoint" / "final.safetensors")["server.x"]
    experiment = config.read(toml)
    from undrift.experiment import build

    layout = build(experiment).simulation.net.layout
    save_file({k: v.clone().contiguous() for k, v in layout.split(x).items()}, tmp_path / "w.safetensors")
    play(toml, "c", "model.weights='w.safetensors'")
    same(tmp_path / "a", tmp_path / "c")
    save_file({"other": torch.zeros(3)}, tmp_path / "w.safetensors")
    for given in ("w.safetensors", "gone", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(BadInput) as error:
            play(toml, "d", f"model.weights='{given}'")
        assert given in sentence(error) and "model.weights" in sentence(error)
    with pytest.raises(BadInput) as error:
        play(toml, "d", "model={name='mlp', weights='first'}")
    assert "model.weights" in sentence(error)


# ---------------------------------------------------------------- what a user's code may do


def test_a_users_failure_keeps_what_was_saved(toml, tmp_path):
    sets = ["algorithm.name='mine:Wrong'", "run.checkpoint_every=1"]
    from undrift.failures import as_ours

    with pytest.raises(RuntimeError) as error:
        play(toml, "a", *sets)
    said = as_ours(error.value)
    assert isinstance(said, RunFailed) and "mine.py, line" in str(said)
    with pytest.raises(RuntimeError):
        play(toml, "a", *sets, resume=True)
    assert [r["round"] for r in lines(tmp_path / "a")] == [1, 2]


def test_runs_outside_the_main_thread_go_without_signals(toml, tmp_path):
    import threading

    thread = threading.Thread(target=play, args=(toml, "a"))
    thread.start()
    thread.join()
    play(toml, "b")
    same(tmp_path / "a", tmp_path / "b")
