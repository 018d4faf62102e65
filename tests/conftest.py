import sys

import pytest
import torch

import undrift.cli as cli
from undrift import failures, signals


@pytest.fixture(autouse=True)
def one_thread():
    """Small vectors gain nothing from threads, and tests run side by side."""
    torch.set_num_threads(1)


@pytest.fixture
def undrift(monkeypatch, capfd, tmp_path):
    """undrift(*arguments) -> (exit code, stdout, stderr), in tmp_path, without what is set for a whole process."""
    monkeypatch.setattr(signals, "_answer", lambda handler: None)
    monkeypatch.setattr(failures, "bound_memory", lambda: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["undrift", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capfd.readouterr()

    return command
