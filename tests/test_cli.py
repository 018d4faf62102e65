"""The command line: exit codes, one plain sentence for each mistake, help, quiet."""

import json
import os
import subprocess
import sys

import pytest
from running import refused, same, write


@pytest.fixture
def toml(tmp_path):
    return write(tmp_path)


def test_a_run_and_what_it_leaves(undrift, toml, tmp_path):
    code, out, err = undrift("run", toml)
    assert code == 0 and out == ""
    assert "one client at a time" in err and "6 rounds" in err and "test_accuracy" in err
    folder = tmp_path / "runs" / "e"
    assert {p.name for p in folder.iterdir()} >= {"config.toml", "metrics.jsonl", "report.html", "checkpoint"}
    code, out, err = undrift("run", toml, "--resume")
    assert code == 0 and "nothing left to do" in err


def test_quiet_says_nothing(undrift, toml):
    assert undrift("run", toml, "-q") == (0, "", "")
    assert undrift("run", toml, "-q", "--resume") == (0, "", "")
    assert undrift("run", toml, "-q", "--resume", "--set", "run.rounds=7") == (0, "", "")


BAD = {
    "an unknown key": ("local.rate=0.1", "local.rate", "it takes"),
    "a slip": ("local.batsh=3", "local.batsh", "batch"),
    "a wrong type": ("local.lr='fast'", "local.lr", "a number"),
    "a negative rate": ("local.lr=-0.1", "local.lr", "above 0"),
    "no rate": ("local.lr=nan", "local.lr", "finite"),
    "beyond 2^53": ("run.seed=9007199254740993", "run.seed", "2^53"),
    "a cohort beyond the population": ("participation.clients=13", "participation.clients", "12"),
    "an unknown method": ("algorithm.name=fedavgg", "algorithm.name", "fedavg"),
    "an unknown option": ("algorithm.mu=0.1", "algorithm.mu", "scaffold"),
    "an unknown data set": ("data.name=mnisst", "data.name", "mnist"),
    "a missing partition": ("data={name='mnist'}", "data.partition", "missing"),
    "a missing partition file": ("data={name='mnist', partition={file='no.json'}}", "data.partition.file", "no.json"),
    "a partition of too many": (
        "data={name='mnist', partition={name='iid', clients=10000000}}", "data.partition.clients", "60000",
    ),
    "an unknown model": ("model.name=mlpp", "model.name", "mlp"),
    "missing weights": ("model.weights='w.safetensors'", "model.weights", "w.safetensors"),
    "parts that collide": (
        "algorithm={name='fedavgm', parts=[{part='server-momentum'}]}", "algorithm", "ServerMomentum", "'v'",
    ),
    "an unknown part": ("algorithm={name='fedavg', parts=[{part='proxx'}]}", "part", "prox"),
    "a metric that does not fit": ("task.metrics=['nothing']", "task.metrics", "accuracy"),
    "a loss that does not fit": ("task.loss='nothing'", "task.loss", "cross-entropy"),
    "no such file of one's own": ("algorithm.name='gone:Mine'", "algorithm.name", "gone.py"),
    "no such object": ("algorithm.name='mine:Mein'", "algorithm.name", "Mine"),
    "keep_best without a share": ("run.keep_best=true", "run.keep_best", "data.validation"),
    "no CUDA of that number": ("run.device='cuda:77'", "run.device", "CUDA"),
    "tf32 on a CPU": ("run={precision='tf32', device='cpu'}", "run.precision", "CUDA"),
    "threads without end": ("run.threads=9007199254740992", "run.threads", "1024"),
    "no equals sign": ("local.lr", "--set", "path=value"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence_and_changes_nothing(undrift, toml, tmp_path, what):
    text, *words = BAD[what]
    refused(undrift("run", toml, "--set", text, "--out", "out"), *words)
    assert not (tmp_path / "out" / "config.toml").exists()
    assert undrift("run", toml, "--out", "out", "-q")[0] == 0  # the folder is as good as new


def test_an_empty_client(undrift, toml, tmp_path):
    (tmp_path / "parts.json").write_text(json.dumps([[0, 1], [], [2]]))
    data = "data={name='mnist', partition={file='parts.json'}}"
    refused(undrift("run", toml, "--set", data), "parts.json", "client 1")


def test_a_model_whose_output_does_not_fit(undrift, toml, tmp_path):
    (tmp_path / "net.py").write_text("import torch\ndef three():\n    return torch.nn.Linear(8, 3)\n")
    refused(undrift("run", toml, "--set", "model={name='net:three'}"), "model.name", "3")


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_bytes(b"\xff\x00[")])
def test_a_toml_that_cannot_be_read(undrift, tmp_path, make):
    make(tmp_path / "x.toml")
    refused(undrift("run", "x.toml"), "x.toml")
    refused(undrift("compare", "x.toml"), "x.toml")


def test_a_command_line_that_is_wrong(undrift, toml):
    for arguments in (["rum"], ["run"], ["run", toml, "--sett", "x"], ["compare", toml, "--seeds", "0"], ["--what"]):
        refused(undrift(*arguments))


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_folder_that_cannot_be_one(undrift, toml, tmp_path, command):
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        refused(
            undrift(command, toml, "--out", out, *["--algorithms", "fedavg"] * (command == "compare")), "file", "--out"
        )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no place that refuses even the superuser")
@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_folder_that_cannot_be_written(undrift, toml, command):
    code, _, err = undrift(command, toml, "--out", "/proc/nobody", *["--algorithms", "fedavg"] * (command == "compare"))
    assert code in (2, 3) and err.count("\n") == 1 and "/proc/nobody" in err


def test_messages_are_never_wrapped(tmp_path):
    """Not on a narrow terminal either."""
    name = "a" * 60 + " " + "b" * 60
    done = subprocess.run(
        [sys.executable, "-m", "undrift.cli", "run", str(tmp_path / name)], capture_output=True, text=True,
        env=os.environ | {"COLUMNS": "40", "TERM": "xterm"},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and name in done.stderr


def test_help_names_every_command(undrift):
    code, out, _ = undrift("--help")
    assert code == 0
    for command in ("run", "compare", "demo", "report", "verify"):
        assert f"\n  {command} " in out
        assert "..." not in next(line for line in out.splitlines() if line.startswith(f"  {command} "))
        code, more, _ = undrift(command, "--help")
        assert code == 0 and "Usage: undrift" in more


def test_the_command_alone_shows_its_help(undrift):
    code, out, err = undrift()
    assert code == 2 and out == "" and err.startswith("Usage: undrift")


def test_a_report_of_nothing(undrift, tmp_path):
    refused(undrift("report", "gone"), "gone")
    (tmp_path / "empty").mkdir()
    refused(undrift("report", "empty"), "empty", "config.toml")


def test_a_report_of_a_run(undrift, toml):
    assert undrift("run", toml, "--out", "r", "-q")[0] == 0
    code, out, _ = undrift("report", "r")
    assert code == 0 and "report.html" in out and "accuracy" in out


# ---------------------------------------------------------------- what a user's own code does


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("algorithm.name='mine:Wrong'", ["mine.py, line", "x + torch.tensor", "RuntimeError"]),
        ("algorithm.name='mine:Leaves'", ["mine.py, line", "sys.exit(7)", "SystemExit"]),
        ("algorithm.name='quits:Mine'", ["quits.py, line 4", "sys.exit(5)", "SystemExit"]),
        ("data={name='mine:Loses'}", ["mine.py, line", "the disk with my data is gone"]),
        ("task.metrics=['broken:Metric']", ["broken.py, line 5", "KeyError"]),
        ("algorithm.name='unreadable:Mine'", ["unreadable.py", "line 1", "SyntaxError"]),
    ],
)
def test_a_users_failure_is_told_with_its_own_line(undrift, toml, tmp_path, setting, words):
    (tmp_path / "broken.py").write_text(
        "class Metric:\n    name, better = 'x', 'lower'\n    def update(self, outputs, target): ...\n"
        "    def merge(self, other): ...\n    def result(self): return {}['gone']\n"
    )
    (tmp_path / "quits.py").write_text(
        "import sys\nfrom undrift.algorithms.fedavg import FedAvg\nclass Mine(FedAvg):\n"
        "    def init(self, x): sys.exit(5)\n"
    )
    (tmp_path / "unreadable.py").write_text("class Mine(\n")
    refused(undrift("run", toml, "--set", setting, "-q"), *words, code=3)


def test_too_little_memory(undrift, toml, monkeypatch, tmp_path):
    from undrift.round import Simulation

    whole = Simulation.play
    errors = (
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("std::bad_alloc"),
    )
    for error in errors:

        def play(self, error=error):
            if self.round == 4:
                raise error
            return whole(self)

        monkeypatch.setattr(Simulation, "play", play)
        out = ["--out", f"o{errors.index(error)}", "--set", "run.checkpoint_every=2"]
        refused(undrift("run", toml, "-q", *out), "memory", code=3)
    monkeypatch.setattr(Simulation, "play", whole)
    assert undrift("run", toml, "-q", *out, "--resume")[0] == 0
    assert undrift("run", toml, "-q", "--out", "free")[0] == 0
    same(tmp_path / out[1], tmp_path / "free")


def test_a_model_that_no_memory_holds(undrift, toml):
    for hidden in (2**53, 10**12):
        refused(undrift("run", toml, "--set", f"model={{name='mlp', hidden=[{hidden}]}}"), "memory", code=3)


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.argv = ["undrift", *sys.argv[1:]]
import undrift.cli, undrift.files
if sys.argv.pop() == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
undrift.cli.main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a limit on files is POSIX")
def test_a_full_disk(undrift, toml, tmp_path):
    """The records grow beyond what fits: exit code 3, and the checkpoint before is whole."""
    many = ["run", toml, "--set", "run.checkpoint_every=1", "-q", "--set", "run.rounds=12"]

    def limited(*arguments):
        command = [sys.executable, "-c", LIMITED, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    refused(limited(*many, "--out", "full", "full"), "full", "could not be written", "whole", code=3)
    assert undrift(*many, "--out", "full", "--resume")[0] == 0
    assert undrift(*many, "--out", "free")[0] == 0
    same(tmp_path / "full", tmp_path / "free")


# ---------------------------------------------------------------- verify


def a_file(tmp_path, change=lambda document: None):
    """A file with the first two runs of the shipped quadratics, changed."""
    from undrift.conformance import VECTORS, read

    document = read(sorted(VECTORS.glob("*.json"))[0])
    document["runs"] = [run for run in document["runs"] if run["algorithm"] == "fedavg"][:2]
    change(document)
    path = tmp_path / "v.json"
    path.write_text(json.dumps(document))
    return path


def test_verify_passes_and_counts(undrift, tmp_path):
    code, out, _ = undrift("verify", a_file(tmp_path))
    assert code == 0 and "2 passed, 0 failed, 0 unknown" in out and out.count("passed  ") == 2
    code, out, err = undrift("verify", "-q", tmp_path / "v.json")
    assert (code, out, err) == (0, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_reader_that_leaves_early(tmp_path):
    verify = subprocess.Popen(
        [sys.executable, "-m", "undrift.cli", "verify"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "passed" in verify.stdout.readline()
    verify.stdout.close()
    assert verify.stderr.read() == "" and verify.wait(100) == 1
    verify.stderr.close()


def test_verify_tells_what_differs(undrift, tmp_path):
    def other_model(document):
        document["runs"][1]["x"][2][0] += 1e-6

    code, out, _ = undrift("verify", a_file(tmp_path, other_model))
    assert code == 1 and "1 passed, 1 failed" in out and "round 2" in out

    def other_floats(document):
        document["runs"][0]["floats_up"][0] += 1

    code, out, _ = undrift("verify", a_file(tmp_path, other_floats))
    assert code == 1 and "round 1" in out and "floats" in out


def test_verify_of_what_it_does_not_know(undrift, tmp_path):
    def other_method(document):
        document["runs"][0]["algorithm"] = "fedtomorrow"

    path = a_file(tmp_path, other_method)
    code, out, _ = undrift("verify", path)
    assert code == 0 and "1 passed, 0 failed, 1 unknown" in out and "fedtomorrow" in out
    assert undrift("verify", "--strict", path)[0] == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: d["runs"][0].pop("x"), "lacks x"),
        (lambda d: d["runs"][0].update(problem="nowhere"), "nowhere"),
        (lambda d: d["runs"][0].update(hp=3), "cannot be read"),
        (lambda d: d["runs"][0].update(x=[[1.0], "a"]), "cannot be read"),
        (lambda d: d.update(runs={"a": 1}), "runs"),
        (lambda d: d.update(runs=[1]), "runs"),
        (lambda d: d.update(problems=[]), "cannot be read"),
        (lambda d: next(iter(d["problems"].values())).pop("kind"), "cannot be read"),
        (lambda d: d.pop("schedules"), "schedules"),
    ],
)
def test_verify_refuses_a_file_in_pieces(undrift, tmp_path, change, word):
    refused(undrift("verify", a_file(tmp_path, change), "-q"), "v.json", word)


def test_verify_of_no_vectors(undrift, tmp_path):
    refused(undrift("verify", "gone.json"), "gone.json")
    for text in ("{", "[]", "3", "\udcff", "[" * 10_000):
        (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
        refused(undrift("verify", "x.json"), "x.json")


@pytest.mark.parametrize("part", ["blocks", "sub-model", "freeze"])
def test_a_part_that_needs_blocks_is_refused_where_none_are_given(undrift, toml, part):
    refused(undrift("run", toml, "--set", f'algorithm.parts=[{{part="{part}"}}]'), "algorithm.parts")


def test_one_run_that_cannot_be_read_hides_no_other(undrift, tmp_path):
    def damaged(document):
        good, bad = document["runs"][0], dict(document["runs"][0], id="bad", schedule="nowhere")
        off = dict(good, id="off", hp=good["hp"] | {"guess": 0, "lam": 0, "rho": None})
        document["runs"] = [bad, good, off]

    code, out, err = undrift("verify", a_file(tmp_path, damaged))
    assert code == 2 and "2 passed, 0 failed, 0 unknown" in out and "run bad cannot be read" in err


def test_a_partition_from_a_file_takes_the_place_of_a_named_one():
    from undrift import config

    document = {"data": {"name": "mnist", "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 100}}}
    changed = config.assign(document, 'data.partition={file="parts.json"}')
    assert changed["data"]["partition"] == {"file": "parts.json"}
