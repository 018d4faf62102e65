"""A run's folder: what was committed survives kills at any point, full disks, damage and impatience."""

import errno
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from undrift import checkpoint as checkpoint_module
from undrift import files
from undrift.cadence import Cadence
from undrift.checkpoint import Checkpoints, decode, encode, read_checkpoint
from undrift.errors import BadInput, RunFailed
from undrift.files import pack, read_lines, read_tensors, write
from undrift.record import RunFolder, read_config

CONFIG = "format = 1\n[run]\nrounds = 6\n# é\n"
ROUNDS = 6


def server_at(round):
    return {"x": torch.arange(5.0) * round, "past.0": torch.full((5,), round - 1.0), "steps": torch.tensor(round)}


def cohort_of(round):
    return [round % 4, (round * round) % 7 + 4] if round != 3 else []


def rows_at(round):
    """The states of all clients after `round` rounds: each holds the last round it took part in."""
    last = {i: r for r in range(1, round + 1) for i in cohort_of(r)}
    return table(last)


def table(last):
    clients = sorted(last)
    rounds = torch.tensor([last[i] for i in clients], dtype=torch.int64)
    fields = {"c": rounds[:, None] * torch.ones(3), "seen": rounds[:, None].to(torch.int16)}
    return {"clients": torch.tensor(clients, dtype=torch.int64), "last": rounds, **fields} if clients else {}


def line_of(round):
    return {"round": round, "train_loss": 1 / round, "note": "é" * round}


def equal(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def go(path, every=1, rounds=ROUNDS):
    """Runs, or resumes, a small made-up run."""
    with RunFolder.open(path, resume=True) as folder:
        if folder.config is None:
            folder.begin(CONFIG)
        state = folder.last()
        done = state.round if state else 0
        if state and state.done and done == rounds:
            return
        changed = {}
        for round in range(done + 1, rounds + 1):
            changed |= dict.fromkeys(cohort_of(round), round)
            folder.append(line_of(round), [{"round": round, "client": i} for i in cohort_of(round)])
            if round == 4:
                folder.best(round, 0.5, {"x": torch.arange(5.0)})
            if round % every == 0:
                folder.save(round, server_at(round), table(changed), {"bytes_up": round * 10, "time": round / 3})
                changed = {}
        folder.finish(rounds, server_at(rounds), rows_at(rounds), {"bytes_up": rounds * 10, "time": rounds / 3})


def check_state(path):
    """The folder holds one consistent moment of the run; which one?"""
    with RunFolder.open(path, resume=True) as folder:
        state = folder.last()
        if state is None:
            assert not (path / "metrics.jsonl").exists()
            return 0
        assert equal(state.server, server_at(state.round))
        assert equal(state.rows, rows_at(state.round))
        assert state.counters == {"bytes_up": state.round * 10, "time": state.round / 3}
        assert read_lines(path / "metrics.jsonl") == [line_of(r) for r in range(1, state.round + 1)]
        logged = [{"round": r, "client": i} for r in range(1, state.round + 1) for i in cohort_of(r)]
        assert read_lines(path / "clients.jsonl") == logged
        return state.round


def content(path):
    return {
        name: (path / name).read_bytes()
        for name in ("config.toml", "metrics.jsonl", "clients.jsonl", "checkpoint/final.safetensors")
    }


class Killed(BaseException):
    """Stands for SIGKILL: nothing that would be executed later has an effect."""


class Disk:
    """Counts what touches the disk, and at the `fatal`-th time raises; `forever`: from then on each time."""

    def __init__(self, fatal, error, forever):
        self.fatal, self.error, self.forever, self.count = fatal, error, forever, 0

    def touch(self):
        self.count += 1
        if self.count == self.fatal or (self.forever and self.count > self.fatal):
            raise self.error

    def install(self, patch):
        disk = self

        class File:
            def __init__(self, file):
                self.file = file

            def write(self, data):
                try:
                    disk.touch()
                except BaseException:
                    self.file.write(data[: len(data) // 2])
                    raise
                return self.file.write(data)

            def __getattr__(self, name):
                return getattr(self.file, name)

        @contextmanager
        def opened(*args):
            disk.touch()
            with open(*args) as file:
                yield File(file)

        def touching(function):
            return lambda *args, **kwargs: (disk.touch(), function(*args, **kwargs))[1]

        patch.setattr(files, "open", opened, raising=False)
        patch.setattr(os, "replace", touching(os.replace))
        patch.setattr(os, "truncate", touching(os.truncate))
        patch.setattr(os, "fsync", touching(lambda handle: None))
        patch.setattr(Path, "unlink", touching(Path.unlink))


def survives(path, every):
    try:
        go(path, every)
    except Killed:
        return False
    return True


@pytest.mark.parametrize("every", [1, 2, 100])
def test_a_kill_at_any_point_leaves_a_commit_and_the_run_ends_the_same(tmp_path, monkeypatch, every):
    go(tmp_path / "whole", every)
    rounds, fatal, survived = set(), 0, False
    while not survived:
        fatal += 1
        path = tmp_path / str(fatal)
        with monkeypatch.context() as patch:
            Disk(fatal, Killed(), forever=True).install(patch)
            survived = survives(path, every)
        if fatal % 3 == 0:  # and once more while it resumes
            with monkeypatch.context() as patch:
                Disk(1 + fatal % 17, Killed(), forever=True).install(patch)
                survives(path, every)
        round = check_state(path)
        assert round % every == 0 or round == ROUNDS
        rounds.add(round)
        go(path, every)
        assert content(path) == content(tmp_path / "whole")
        assert sorted(p.name for p in path.rglob("*")) == sorted(p.name for p in (tmp_path / "whole").rglob("*"))
    assert fatal > 40
    assert rounds == {0, *range(every, ROUNDS, every), ROUNDS}


def test_a_disk_that_fails_at_any_point_ends_the_run_in_one_sentence_and_keeps_the_commit(tmp_path, monkeypatch):
    go(tmp_path / "whole")
    said, fatal, survived = set(), 0, False
    while not survived:
        fatal += 1
        path = tmp_path / str(fatal)
        with monkeypatch.context() as patch:
            disk = Disk(fatal, OSError(errno.ENOSPC, "No space left on device"), forever=False)
            disk.install(patch)
            try:
                go(path)
                survived = disk.count < fatal  # else a file could not be removed, which nobody has to know
            except RunFailed as error:
                said.add(str(error).removeprefix(str(path)).replace("\\", "/"))
        check_state(path)
        go(path)
        assert content(path) == content(tmp_path / "whole")
    reason = "could not be written (No space left on device); what was saved before is whole"
    assert {f"/metrics.jsonl {reason}", f"/checkpoint/server-3.safetensors {reason}"} < said
    assert all(sentence.endswith(reason) for sentence in said)


LOOP = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
import test_record
print("ready", flush=True)
test_record.go(test_record.Path({path!r}), every={every}, rounds=100000)
"""


def start(path, every, before=""):
    tests = Path(__file__).parent
    code = before + LOOP.format(tests=str(tests), root=str(tests.parent), path=str(path), every=every)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_sigkill_of_a_real_process(tmp_path):
    reached = [0]
    for _ in range(4):
        process = start(tmp_path / "run", every=3)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "checkpoint" / "current.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.4))
        process.kill()
        process.communicate()
        reached.append(check_state(tmp_path / "run"))  # also: the lock went with the process
    assert reached == sorted(reached)
    assert reached[-1] > 0


def test_a_file_size_limit_of_the_system(tmp_path):
    pytest.importorskip("resource")
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    process = start(tmp_path / "run", every=3, before=limit)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "RunFailed" in said
    assert "metrics.jsonl could not be written (File too large)" in said
    assert check_state(tmp_path / "run") > 3


def test_a_second_process_is_refused_while_the_first_lives(tmp_path):
    with RunFolder.open(tmp_path) as folder:
        folder.begin(CONFIG)
        with pytest.raises(BadInput, match="another process is running here"):
            RunFolder.open(tmp_path, resume=True)
        code = f"from undrift.record import RunFolder; RunFolder.open({str(tmp_path)!r}, resume=True)"
        root = Path(__file__).parent.parent
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
        assert "another process is running here" in second.stderr
    RunFolder.open(tmp_path, resume=True).close()


def test_a_folder_that_holds_a_run_needs_resume(tmp_path):
    path = tmp_path / "runs" / "a"
    with RunFolder.open(path) as folder:
        assert folder.config is None
        folder.begin(CONFIG)
        assert folder.config == read_config(path) == {"format": 1, "run": {"rounds": 6}}
    before = sorted(path.rglob("*"))
    with pytest.raises(BadInput, match=r"a holds a run: .*--resume.*--out"):
        RunFolder.open(path)
    assert sorted(path.rglob("*")) == before
    with RunFolder.open(path, resume=True) as folder:  # released by the refusal
        assert folder.last() is None


def test_resume_before_the_first_checkpoint_begins_anew_and_keeps_other_files(tmp_path):
    with RunFolder.open(tmp_path, resume=True) as folder:
        folder.begin(CONFIG)
        folder.append(line_of(1), [{"client": 1}])
        folder.best(1, 0.1, {"x": torch.zeros(2)})
    others = [tmp_path / "notes.txt", tmp_path / "checkpoint" / "mine.safetensors", tmp_path / "report.html"]
    for other in others:
        other.write_text("mine")
    go(tmp_path)
    assert check_state(tmp_path) == ROUNDS
    assert all(other.read_text() == "mine" for other in others)


def test_a_folder_cannot_be_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    for path in (tmp_path / "f", tmp_path / "f" / "g"):
        with pytest.raises(BadInput, match=r"cannot be a run's folder.*--out"):
            RunFolder.open(path)


def test_all_types_shapes_and_shared_memory_come_back(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    server = {
        "x": whole,
        "same": whole,
        "row": whole[1],
        "transposed": whole.T,
        "double": torch.rand(3, dtype=torch.float64, requires_grad=True),
        "half": torch.rand(3).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "number": torch.tensor(2**53 + 1),
        "nan": torch.tensor([float("nan"), float("inf")]),
        "empty": torch.empty(0, 3),
    }
    counters = {"a": 1, "b": 0.1, "c": None, "d": {"e": [1, "x"]}, "big": 2**60}
    with RunFolder.open(tmp_path) as folder:
        folder.begin(CONFIG)
        folder.save(7, server, {}, counters)
    state = read_checkpoint(tmp_path)
    assert (state.round, state.rows, state.counters, state.done) == (7, {}, counters, False)
    assert state.server.keys() == server.keys()
    for name, tensor in server.items():
        assert state.server[name].dtype == tensor.dtype
        torch.testing.assert_close(state.server[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)
        state.server[name].zero_()  # it can be written to


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 12), max_size=6)), max_size=12))
def test_generations_amount_to_the_last_row_of_each_client(saves):
    with tempfile.TemporaryDirectory() as name:
        folder = Checkpoints(Path(name))
        last = {}
        for round, (reopen, changed) in enumerate(saves):
            if reopen:
                folder = Checkpoints(Path(name))  # loaded or not: nothing may be lost
            update = dict.fromkeys(changed, round)
            last |= update
            folder.save(round, server_at(round), table(update), {}, {})
            held = sum(part.rows for part in folder.commit.rows)
            assert held <= 2 * len(last) + 6
            assert len(list(Path(name).iterdir())) == len(folder.commit.rows) + 2
            assert equal(Checkpoints(Path(name)).load().rows, table(last))


def test_a_resume_never_has_to_open_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "GENERATIONS", 5)
    folder = Checkpoints(tmp_path)
    for round in range(23):  # never the same client twice: nothing is superseded
        folder.save(round, {}, table({round: round}), {}, {})
        assert len(folder.commit.rows) <= 5
    assert equal(folder.load().rows, table({i: i for i in range(23)}))


def test_the_final_file_is_complete_and_a_longer_run_goes_on_from_it(tmp_path):
    go(tmp_path / "run", every=4)
    path = tmp_path / "run" / "checkpoint" / "final.safetensors"
    final = read_tensors(path)
    rows = rows_at(ROUNDS)
    expected = {f"server.{name}": tensor for name, tensor in server_at(ROUNDS).items()}
    expected |= {"clients": rows["clients"], "last": rows["last"], "client.c": rows["c"], "client.seen": rows["seen"]}
    expected |= {"counter.bytes_up": torch.tensor(60), "counter.time": torch.tensor(2.0, dtype=torch.float64)}
    assert equal(final, expected)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "1"}
    with safetensors.safe_open(path.with_name("best.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "1", "round": "4", "value": "0.5"}
    assert read_checkpoint(tmp_path / "run").done

    with RunFolder.open(tmp_path / "run", resume=True) as folder:
        folder.last()
        folder.append(line_of(ROUNDS + 1), [{"round": ROUNDS + 1, "client": i} for i in cohort_of(ROUNDS + 1)])
        folder.save(ROUNDS + 1, server_at(7), table(dict.fromkeys(cohort_of(7), 7)), {"bytes_up": 70, "time": 7 / 3})
        assert not path.exists()  # it was that of a shorter run
    go(tmp_path / "run", rounds=10)
    go(tmp_path / "long", every=3, rounds=10)
    assert content(tmp_path / "run") == content(tmp_path / "long")


def test_a_finish_in_any_order_of_clients_is_the_same(tmp_path):
    for name, order in (("a", [0, 1, 2]), ("b", [2, 0, 1])):
        rows = {key: values[order] for key, values in table({1: 4, 5: 2, 9: 3}).items()}
        with RunFolder.open(tmp_path / name) as folder:
            folder.begin(CONFIG)
            folder.finish(4, server_at(4), rows, {"nested": {"a": True}, "none": None})
    a, b = (read_tensors(tmp_path / name / "checkpoint" / "final.safetensors") for name in "ab")
    assert equal(a, b)
    assert a["counter.nested.a"] == 1
    assert not any("none" in name for name in a)


@pytest.mark.parametrize("name", ["current.json", "server-6.safetensors", "rows-5.safetensors", "rows-6.safetensors"])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(tmp_path, name):
    with RunFolder.open(tmp_path) as folder:
        folder.begin(CONFIG)
        for round in (5, 6):
            folder.append(line_of(round))
            folder.save(round, server_at(round), table(dict.fromkeys(cohort_of(round), round)), {"bytes_up": 1.5})
    path = tmp_path / "checkpoint" / name
    good, draw = path.read_bytes(), random.Random(0)

    def refuse():
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(BadInput, match=rf"{name} is (damaged|missing)"), RunFolder.open(tmp_path, True) as folder:
            folder.last()
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before

    for _ in range(40):
        at, bit = draw.randrange(len(good)), 1 << draw.randrange(8)
        path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        refuse()
        path.write_bytes(good[: draw.randrange(len(good))])
        refuse()
    path.write_bytes(good + b"0")
    refuse()
    path.unlink()
    refuse()
    path.write_bytes(good)
    with RunFolder.open(tmp_path, resume=True) as folder:
        assert folder.last().round == 6


@pytest.mark.parametrize("position", range(60))
def test_a_safetensors_file_that_is_no_checkpoint_is_refused_without_a_checksum_too(tmp_path, position):
    path = tmp_path / "final.safetensors"
    good = pack({"server.x": torch.arange(3.0), "clients": torch.arange(2)})
    draw, complaints = random.Random(position), set()
    for at in (position, 8 + draw.randrange(len(good) - 8)):
        path.write_bytes(good[:at] + bytes([draw.randrange(256)]) + good[at + 1 :])
        try:
            assert read_tensors(path).keys()  # a byte of the data, or a harmless one
        except BadInput as error:
            complaints.add(str(error).split(" is damaged")[0])
    assert complaints <= {str(path)}
    path.write_bytes(good[: position * 2])
    with pytest.raises(BadInput, match=r"final.safetensors is damaged"):
        read_tensors(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rows: rows.pop("clients"), "'clients' is not in it"),
        (lambda rows: rows.pop("last"), "'last' is not in it"),
        (lambda rows: rows.pop("c"), "'c' is in one generation"),
        (lambda rows: rows.update(d=rows["c"]), "'d' is in one generation"),
        (lambda rows: rows.update(c=rows["c"][:1]), "'c' has not one row a client"),
        (lambda rows: rows.update(c=rows["c"][:, :2]), "'c' has not the type and shape"),
        (lambda rows: rows.update(c=rows["c"].double()), "'c' has not the type and shape"),
        (lambda rows: rows.update(last=rows["last"].float()), "'last' is not a list of whole numbers"),
        (lambda rows: rows.update(clients=torch.tensor([4, 4])), "a client is in it twice"),
    ],
)
def test_client_states_that_do_not_fit_are_refused(tmp_path, change, complaint):
    folder = Checkpoints(tmp_path)
    folder.save(1, {}, table({1: 1, 2: 1, 3: 1}), {}, {})
    rows = table({3: 2, 4: 2})
    change(rows)
    with pytest.raises(ValueError, match=complaint):
        folder.save(2, {}, rows, {}, {})
    assert equal(Checkpoints(tmp_path).load().rows, table({1: 1, 2: 1, 3: 1}))

    folder.save(2, {}, table({3: 2, 4: 2}), {}, {})
    data = pack(rows)
    (tmp_path / "rows-2.safetensors").write_bytes(data)
    first, second = folder.commit.rows
    forged = replace(folder.commit, rows=(first, replace(second, checksum=files.checksum(data))))
    (tmp_path / "current.json").write_bytes(encode(forged))
    with pytest.raises(BadInput, match=rf"rows-2.safetensors is damaged: {complaint}"):
        Checkpoints(tmp_path).load()


def test_records_that_do_not_go_with_the_checkpoint_are_refused(tmp_path):
    go(tmp_path)
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes()
    for data in (good[:-5], good[:-1] + b"x", None):
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(BadInput, match=r"metrics.jsonl is (damaged|missing)"), RunFolder.open(tmp_path, True) as f:
            f.last()
    path.write_bytes(good + b'{"round": 7}\n{"rou')
    assert check_state(tmp_path) == ROUNDS
    assert path.read_bytes() == good


def test_a_configuration_that_is_damaged_missing_or_newer(tmp_path):
    go(tmp_path)
    path = tmp_path / "config.toml"
    for data, complaint in (
        (b"format = ", "config.toml is damaged"),
        (b"\xff\xfe", "config.toml is damaged"),
        (b"rounds = 1", "config.toml is damaged: it does not say its format"),
        (b"format = true", "config.toml is damaged: it does not say its format"),
        (b"format = 2", "config.toml has format 2 .* newer"),
    ):
        path.write_bytes(data)
        with RunFolder.open(tmp_path, resume=True) as folder, pytest.raises(BadInput, match=complaint):
            _ = folder.config
    path.unlink()
    with pytest.raises(BadInput, match=r"config.toml is missing"):
        RunFolder.open(tmp_path, resume=True)
    with pytest.raises(BadInput, match="holds a run"):
        RunFolder.open(tmp_path)


def test_newer_formats_are_named(tmp_path):
    go(tmp_path)
    current = tmp_path / "checkpoint" / "current.json"
    current.write_text(json.dumps({**json.loads(current.read_text()), "format": 2}))
    with pytest.raises(BadInput, match=r"current.json has format 2 .* newer"):
        read_checkpoint(tmp_path)
    final = tmp_path / "checkpoint" / "final.safetensors"
    final.write_bytes(pack({}, format="2"))
    with pytest.raises(BadInput, match=r"final.safetensors has format 2 .* newer"):
        read_tensors(final)


def test_an_append_that_failed_is_cut_off_by_the_next(tmp_path, monkeypatch):
    with RunFolder.open(tmp_path) as folder:
        folder.begin(CONFIG)
        folder.append(line_of(1), [{"client": 1}])
        with monkeypatch.context() as patch:
            Disk(4, KeyboardInterrupt(), forever=False).install(patch)  # in the line about the clients
            with pytest.raises(KeyboardInterrupt):
                folder.append(line_of(2), [{"client": 2}])
        assert (tmp_path / "clients.jsonl").read_bytes() == b'{"client": 1}\n{"clien'
        folder.append(line_of(3), [{"client": 3}])
        folder.save(3, {}, {}, {})
    with RunFolder.open(tmp_path, resume=True) as folder:
        folder.last()
    assert read_lines(tmp_path / "metrics.jsonl") == [line_of(1), line_of(3)]
    assert read_lines(tmp_path / "clients.jsonl") == [{"client": 1}, {"client": 3}]


def test_an_interrupt_right_after_the_commit_harms_nothing(tmp_path, monkeypatch):
    folder = Checkpoints(tmp_path)
    folder.save(1, server_at(1), table({1: 1}), {}, {})
    rename = os.replace

    def interrupted(source, target):
        rename(source, target)
        if Path(target).name == "current.json":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            folder.save(2, server_at(2), table({2: 2}), {}, {})
    committed = {part.file for part in Checkpoints(tmp_path).commit.rows}
    before = {name: (tmp_path / name).read_bytes() for name in committed}

    def refused(source, target):
        if Path(target).name == "current.json":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        with pytest.raises(KeyboardInterrupt):
            folder.save(2, server_at(5), table({2: 5, 3: 5}), {}, {})
    assert {name: (tmp_path / name).read_bytes() for name in committed} == before
    folder.save(2, server_at(2), table({2: 2, 3: 2}), {}, {})
    assert equal(Checkpoints(tmp_path).load().rows, table({1: 1, 2: 2, 3: 2}))


def test_numbers_that_are_not_finite_never_reach_a_record(tmp_path):
    with RunFolder.open(tmp_path) as folder:
        folder.begin(CONFIG)
        with pytest.raises(ValueError, match="not JSON compliant"):
            folder.append({"round": 1, "train_loss": float("nan")})
        folder.append({"round": 1, "train_loss": None})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"round": 1, "train_loss": null}\n'


def test_lines_are_read_while_the_last_is_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == []
    path.write_bytes(b'{"round": 1}\n{"round": 2}\n{"round": ')
    assert read_lines(path) == [{"round": 1}, {"round": 2}]
    path.write_bytes(b'{"round": 1}\n{"round": \n{"round": 3}\n')
    with pytest.raises(BadInput, match=r"metrics.jsonl is damaged: line 2"):
        read_lines(path)


def test_a_checkpoint_is_read_while_the_run_replaces_it(tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()
    run = Checkpoints(tmp_path / "checkpoint")
    run.save(1, server_at(1), {}, {}, {})
    load, meanwhile = Checkpoints.load, [lambda: run.save(2, server_at(2), {}, {}, {})]

    def late(checkpoints):
        while meanwhile:
            meanwhile.pop()()
        return load(checkpoints)

    monkeypatch.setattr(Checkpoints, "load", late)
    assert equal(read_checkpoint(tmp_path).server, server_at(2))
    (tmp_path / "checkpoint" / "server-2.safetensors").unlink()
    with pytest.raises(BadInput, match=r"server-2.safetensors is missing"):
        read_checkpoint(tmp_path)
    assert read_checkpoint(tmp_path / "elsewhere") is None


def test_a_commit_reads_back_as_it_was():
    folder = Path("current.json")
    part = checkpoint_module.Part("server-1.safetensors", "00000000")
    commit = checkpoint_module.Commit(3, part, (part, part), {"metrics": 5}, {"a": 0.1, "b": [1, {"c": None}]}, True)
    assert decode(folder, encode(commit)) == commit


def test_write_replaces_in_one_step(tmp_path):
    write(tmp_path / "a", b"old")
    write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(RunFailed, match=r"missing.* could not be written"):
        write(tmp_path / "missing" / "a", b"")


def test_every_n_rounds():
    cadence = Cadence(5)
    assert [round for round in range(1, 21) if cadence.due(round)] == [5, 10, 15, 20]


def test_by_the_clock_saving_costs_at_most_a_hundredth():
    now = 0.0
    cadence = Cadence("auto", clock=lambda: now)
    assert not cadence.due(1)
    now = 0.99
    assert not cadence.due(2)
    now = 1.0
    assert cadence.due(3)
    cadence.saved(0.001)
    now = 1.99
    assert not cadence.due(4)
    now = 2.0
    assert cadence.due(5)
    now = 2.5
    cadence.saved(0.5)
    now = 52.4
    assert not cadence.due(6)
    now = 52.5
    assert cadence.due(7)
