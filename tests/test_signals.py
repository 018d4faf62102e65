"""Signals that ask a run to stop, at every stage of a real process."""

import os
import signal
import time

import pytest
from running import end, lines, rounds_of, same, start, wait_for, wait_for_round, write

from undrift import config
from undrift.errors import Interrupted
from undrift.running import run
from undrift.signals import NAMES, stopping

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="signals of POSIX")
SECONDS = 60  # ten are promised on a machine that is not busy; a test asserts no time
SLOW = ["--set", "algorithm.name='mine:Slow'", "--set", "run.rounds=80"]


@pytest.fixture
def toml(tmp_path):
    return write(tmp_path)


def stop(process, name="SIGTERM"):
    """Sends a signal; the command ends in time, with 130 and one sentence."""
    process.send_signal(getattr(signal, name))
    code, out, err = end(process, SECONDS)
    assert code == 130 and out == "" and err.count("\n") == 1 and "Traceback" not in err, (code, out, err)
    return err


def finish(toml, out, *arguments, resume=False):
    run(config.read(toml, [text for text in arguments if text != "--set"]), out, resume)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run that was left alone."""
    folder = tmp_path_factory.mktemp("alone")
    sets = [text for text in SLOW if text != "--set"]
    return run(config.read(write(folder), sets), folder / "a").folder


@pytest.mark.parametrize("name", NAMES)
def test_between_and_in_rounds(toml, tmp_path, alone, name):
    process = start("run", toml, "--out", tmp_path / "a", "-q", *SLOW)
    wait_for_round(tmp_path / "a", 5, process)
    said = stop(process, name)
    n = rounds_of(tmp_path / "a")
    assert f"{name} after {n} of 80 rounds" in said and "--resume" in said and 5 <= n < 80
    finish(toml, tmp_path / "a", *SLOW, resume=True)
    same(tmp_path / "a", alone)


def test_in_the_middle_of_a_round(toml, tmp_path):
    stuck = ["--set", "algorithm.name='mine:Stuck'"]
    process = start("run", toml, "--out", tmp_path / "a", "-q", *stuck)
    wait_for(tmp_path / "stuck", process)
    assert "SIGTERM after 3 of 6 rounds" in stop(process)
    assert len(lines(tmp_path / "a")) == 3
    (tmp_path / "free").touch()
    finish(toml, tmp_path / "a", *stuck, resume=True)
    finish(toml, tmp_path / "b", *stuck)
    same(tmp_path / "a", tmp_path / "b")


def test_in_an_evaluation_of_careless_code(toml, tmp_path):
    """The metric swallows every exception: the round is dropped all the same."""
    slow = ["--set", "task.metrics=['mine:SlowMetric']"]
    (tmp_path / "free").touch()
    process = start(
        "run", toml, "--out", tmp_path / "a", "-q", "--set", "run.rounds=2000", "--set", "run.eval_every=40", *slow
    )
    wait_for_round(tmp_path / "a", 40, process)
    (tmp_path / "free").unlink()
    wait_for(tmp_path / "stuck", process)
    stop(process, "SIGUSR1")
    n = rounds_of(tmp_path / "a")
    assert n % 40 == 39, "the round that was being evaluated does not count"


def test_while_the_data_are_read(toml, tmp_path):
    slow = ["--set", "data={name='mine:SlowData'}"]
    process = start("run", toml, "--out", tmp_path / "a", "-q", *slow)
    wait_for(tmp_path / "stuck", process)
    assert "before the first round" in stop(process)
    assert not (tmp_path / "a" / "config.toml").exists()
    (tmp_path / "free").touch()
    finish(toml, tmp_path / "a", *slow)  # the folder is free: nothing had begun


SAVES_SLOWLY = """
import time
from pathlib import Path
import undrift.checkpoint as checkpoint
from undrift.algorithms.fedavg import FedAvg as Own

HERE, whole = Path(__file__).parent, checkpoint.write

def write(path, data):
    if not (HERE / "free").exists():
        (HERE / "stuck").touch()
        time.sleep(1)
    whole(path, data)

checkpoint.write = write
"""


def test_in_a_checkpoint(toml, tmp_path):
    (tmp_path / "own.py").write_text(SAVES_SLOWLY)
    slow = ["--set", "algorithm.name='own:Own'", "--set", "run.checkpoint_every=3"]
    process = start("run", toml, "--out", tmp_path / "a", "-q", *slow)
    wait_for(tmp_path / "stuck", process)
    assert "after 3 of 6 rounds" in stop(process)
    (tmp_path / "free").touch()
    for out in ("a", "b"):  # in processes of their own, as that file changes what saves
        code, _, err = end(start("run", toml, "--out", tmp_path / out, "-q", "--resume", *slow))
        assert code == 0, err
    same(tmp_path / "a", tmp_path / "b")


def test_while_torch_is_loaded(toml, tmp_path):
    """Before there is a run that could be saved."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal\nwhole = signal.signal\n"
        "def seen(number, handler):\n"
        "    got = whole(number, handler)\n"
        f"    if number == signal.SIGUSR1: open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "    return got\n"
        "signal.signal = seen\n"
    )
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), before]))
    try:
        process = start("run", toml, "--out", tmp_path / "a", "-q")
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    wait_for(tmp_path / "ready", process)
    time.sleep(0.05)
    stop(process, "SIGTERM")
    assert not (tmp_path / "a" / "config.toml").exists()


# ---------------------------------------------------------------- the catcher itself


def test_work_that_may_be_dropped_is_dropped_at_once():
    with stopping() as stop:
        with pytest.raises(Interrupted, match="SIGUSR1"), stop.droppable():
            signal.raise_signal(signal.SIGUSR1)
            raise AssertionError("it went on")
        with pytest.raises(Interrupted), stop.droppable():
            raise AssertionError("it began again")


def test_other_work_is_finished_first():
    with stopping() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            stop.ask()


@pytest.mark.parametrize("made_of_it", [None, ValueError])
def test_what_careless_code_makes_of_a_signal_does_not_count(made_of_it):
    with stopping() as stop, pytest.raises(Interrupted, match="SIGTERM"), stop.droppable():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception as error:
            if made_of_it:
                raise made_of_it from error


def test_the_old_handlers_come_back():
    before = [signal.getsignal(getattr(signal, name)) for name in NAMES]
    with stopping():
        assert [signal.getsignal(getattr(signal, name)) for name in NAMES] != before
    assert [signal.getsignal(getattr(signal, name)) for name in NAMES] == before
