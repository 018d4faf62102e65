"""A small experiment, and the command line on it: in this process where that will do, in one of its own where signals
and kills come."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from undrift.files import read_tensors

TOML = """
[data]
name = "synthetic"
clients = 12
dim = 8

[model]
name = "logistic"

[local]
lr = 0.1
steps = 2
batch = 5
momentum = 0.5

[algorithm]
name = "scaffold"

[participation]
clients = 3

[run]
rounds = 6
eval_every = 3
engine = "loop"
threads = 1
"""

# What a user may have beside the TOML: methods, a metric, data. `mark` tells a test how far it got.
MINE = """
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from undrift.algorithms.fedavg import FedAvg

HERE = Path(__file__).parent


def mark(name):
    (HERE / name).touch()


def is_real(x):
    # Not the toy round that a stack is tried with.
    return x.shape[-1] > 20


@dataclass(frozen=True)
class Mine(FedAvg):
    def client(self, work, x):
        up, mine = super().client(work, x)
        work.log("moved", up["dx"].abs().sum(-1, keepdim=True))
        return up, mine


@dataclass(frozen=True)
class Slow(Mine):
    seconds: float = 0.03

    def server(self, cohort, **fields):
        if is_real(fields["x"]):
            mark(f"worker-{os.getpid()}")
            time.sleep(self.seconds)
        return super().server(cohort, **fields)


@dataclass(frozen=True)
class Stuck(FedAvg):
    def server(self, cohort, **fields):
        if cohort.round == 3 and not (HERE / "free").exists():
            mark("stuck")
            time.sleep(120)
        return super().server(cohort, **fields)


@dataclass(frozen=True)
class Wrong(FedAvg):
    def server(self, cohort, x, dx):
        if cohort.round == 2:
            return {"x": x + torch.tensor([1.0, 2.0])}  # does not fit
        return {"x": x + dx}


@dataclass(frozen=True)
class Leaves(FedAvg):
    def server(self, cohort, x, dx):
        sys.exit(7) if is_real(x) else None
        return {"x": x + dx}


@dataclass(frozen=True)
class Dies(FedAvg):
    def server(self, cohort, x, dx):
        if is_real(x):
            os.kill(os.getpid(), 9)
        return {"x": x + dx}


class SlowMetric:
    name, better = "accuracy", "higher"

    def __init__(self):
        self.right = self.all = 0

    def update(self, outputs, target):
        if not (HERE / "free").exists():
            mark("stuck")
            try:
                time.sleep(120)
            except Exception:  # as careless code does
                pass
        self.right += int((outputs.argmax(-1) == target).sum())
        self.all += len(target)

    def merge(self, other):
        self.right, self.all = self.right + other.right, self.all + other.all

    def result(self):
        return self.right / self.all


class SlowData:
    population = 4

    def size(self, i):
        return 6

    def client(self, i):
        if not (HERE / "free").exists():
            mark("stuck")
            time.sleep(120)
        x = torch.arange(24.0).reshape(6, 4) / 24 + i
        return x, torch.arange(6) % 2


class Loses(SlowData):
    def client(self, i):
        raise OSError("the disk with my data is gone")
"""


def write(folder: Path, text: str = TOML) -> Path:
    (folder / "mine.py").write_text(MINE)
    (folder / "e.toml").write_text(text)
    return folder / "e.toml"


def start(*arguments, **options) -> subprocess.Popen:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "undrift.cli", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options,
    )  # fmt: skip


def end(process: subprocess.Popen, seconds: float = 300) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def wait_for(path: Path, process: subprocess.Popen | None = None, seconds: float = 300) -> Path:
    """Returns when there is something at `path`, a name or a pattern in its last part."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := sorted(path.parent.glob(path.name)):
            return found[0]
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


def rounds_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_round(run: Path, n: int, process: subprocess.Popen) -> None:
    until = time.monotonic() + 300
    while rounds_of(run) < n:
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.005)


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    """A record without what may differ between equal runs."""
    records = map(json.loads, (run / name).read_text().splitlines())
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


def bits(run: Path, name: str = "final") -> dict:
    tensors = read_tensors(run / "checkpoint" / f"{name}.safetensors")
    return {k: (str(v.dtype), tuple(v.shape), v.numpy().tobytes()) for k, v in tensors.items()}


def same(a: Path, b: Path) -> None:
    """Two runs ended with the same bits and the same metrics."""
    assert bits(a) == bits(b)
    assert lines(a) == lines(b)
    assert (a / "clients.jsonl").exists() == (b / "clients.jsonl").exists()
    if (a / "clients.jsonl").exists():
        assert lines(a, "clients.jsonl") == lines(b, "clients.jsonl")


SENTENCE = 400  # characters are enough for one


def refused(answer, *words, code=2):
    """A failure told in one line on stderr that holds the words."""
    got, out, err = answer
    assert got == code, (got, out, err)
    assert out == ""
    assert err.startswith("undrift: ") and err.count("\n") == 1 and len(err) < SENTENCE, err
    assert "Traceback" not in err
    for word in words:
        assert word in err, (word, err)
