"""What a person sees while a run or a comparison goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between two lines where there is no terminal


class Shown:
    """A bar over `total` rounds on stderr. Lines go around it, unwrapped."""

    def __init__(self, total: int, quiet: bool):
        self.quiet, self.total, self.at, self.last = quiet, total, 0, time.monotonic()
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self.bar = Progress(
            SpinnerColumn(), BarColumn(), TextColumn("{task.completed}/{task.total} rounds"), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.description}"), console=self.console, transient=True,
            disable=quiet or not self.console.is_terminal,
        )  # fmt: skip

    def __enter__(self):
        self.bar.start()
        self.task = self.bar.add_task("", total=self.total)
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False)

    def moved(self, rounds: int, text: str) -> None:
        """`rounds` more are done; `text` says how it stands."""
        self.at += rounds
        self.bar.update(self.task, completed=self.at, description=text)
        if self.bar.disable and not self.quiet and time.monotonic() - self.last > EVERY:
            self.last = time.monotonic()
            print(f"{self.at}/{self.total} rounds {text}", file=sys.stderr, flush=True)


class RunProgress(Shown):
    """Of one run."""

    def __init__(self, rounds: int, quiet: bool):
        super().__init__(rounds, quiet)
        self.text = ""

    def round(self, record: dict) -> None:
        shown = {k: v for k, v in record.items() if k.startswith(("test_", "validation_")) and v is not None}
        if shown:
            self.text = "  ".join(f"{k} {v:.4g}" for k, v in shown.items())
        self.moved(record["round"] - self.at, self.text)

    def notice(self, text: str) -> None:
        self.say(text)

    def ended(self, records: list[dict]) -> None:
        """The last word: how far, and how well."""
        self.say(f"{records[-1]['round']} rounds in {records[-1]['seconds']:.0f} s: {self.text}")


class CompareProgress(Shown):
    """Of many runs."""

    def __init__(self, jobs: list, quiet: bool):
        super().__init__(sum(job.document["run"]["rounds"] for job in jobs), quiet)
        self.jobs, self.rounds, self.done, self.said = len(jobs), {}, 0, set()

    def heard(self, job, message: dict) -> None:
        if "notice" in message:
            if message["notice"] not in self.said:  # the same for every seed
                self.said.add(message["notice"])
                self.say(f"{job.label}: {message['notice']}")
            return
        before = self.rounds.get(job.folder, 0)
        if "record" in message:
            self.rounds[job.folder] = message["record"]["round"]
        else:
            self.rounds[job.folder] = job.document["run"]["rounds"]
            self.done += 1
            if "error" in message and message["error"] not in self.said:
                self.said.add(message["error"])
                self.say(f"{job.label}, seed {job.seed}: {message['error']}")
        self.moved(self.rounds[job.folder] - before, f"{self.done} of {self.jobs} runs done")
