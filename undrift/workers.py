"""Runs in processes of their own, side by side. A worker ends with its parent, however that ends.

Parent and worker talk in lines of JSON: a job goes in at stdin, what became of each round and of the job comes out. The
end of stdin is the end of the parent.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from .errors import Interrupted, UndriftError
from .failures import as_ours, bound_memory
from .signals import Stop

PATIENCE = 9.0  # seconds that workers get to save what they have, all together
# Threads that spin would take the other workers' cores. glibc gives freed vectors back to the system and faults them in
# again, which costs a tenth of a small model's round; elsewhere nobody reads the last three.
SETTINGS = {
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


class Worker:
    """A process that plays one run after another, seen from the parent."""

    def __init__(self, said: queue.Queue):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "undrift.workers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            encoding="utf-8", env=SETTINGS | os.environ,
        )  # fmt: skip
        self.job: dict | None = None
        threading.Thread(target=self._listen, args=(said,), daemon=True).start()

    def begin(self, job: dict) -> None:
        self.job = job
        with suppress(BrokenPipeError):  # it has just died, and `_listen` will tell
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def _listen(self, said: queue.Queue) -> None:
        with self.process.stdout as lines:
            for line in lines:
                said.put((self, json.loads(line)))
        said.put((self, {"ended": self.process.wait()}))

    def end(self, deadline: float) -> None:
        """Waits for its end, and makes it end at the deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()


def play(jobs: list[dict], workers: int, stop: Stop) -> Iterator[tuple[dict, dict]]:
    """Plays all jobs; yields (job, message) as they come: {"record": ...}, {"notice": ...}, {"done": true} or
    {"error": ...}."""
    said: queue.Queue = queue.Queue()
    waiting, crew = list(reversed(jobs)), []
    try:
        while waiting or any(worker.job for worker in crew):
            stop.ask()
            while waiting and len(crew) < workers:
                crew.append(Worker(said))
                crew[-1].begin(waiting.pop())
            try:
                worker, message = said.get(timeout=0.2)
            except queue.Empty:
                continue
            stop.ask()  # the signal may have reached the worker as well, whose words do not count then
            job = worker.job
            if "ended" in message:
                crew.remove(worker)
                worker.end(time.monotonic())
                message = {"error": f"the worker process ended with exit code {message['ended']}", "exit": 3}
            if "done" in message or "error" in message:
                worker.job = None
                if waiting and worker in crew and message.get("exit") != Interrupted.exit_code:
                    worker.begin(waiting.pop())
            if job is not None:
                yield job, message
    finally:
        for worker in crew:
            worker.process.terminate()
        deadline = time.monotonic() + PATIENCE
        for worker in crew:
            worker.end(deadline)


# ---------------------------------------------------------------- the worker itself


def main() -> None:
    """Reads jobs until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole group, and the parent ends its workers
    bound_memory()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a user's code prints must not come between the lines
    jobs: queue.Queue = queue.Queue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()

    def say(**message) -> None:
        try:
            out.write(json.dumps(message) + "\n")
            out.flush()
        except BrokenPipeError:
            os._exit(0)  # as `_read` does, and sooner

    while True:
        job = jobs.get()
        try:
            _play(job, say)
            say(done=True)
        except Interrupted as error:
            say(error=str(error), exit=error.exit_code)
            sys.exit(error.exit_code)
        except UndriftError as error:
            say(error=str(error), exit=error.exit_code)


def _read(jobs: queue.Queue) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)  # the parent is gone or done: a run in flight goes on with --resume, as after any kill


def _play(job: dict, say: Callable) -> None:
    from . import config
    from .running import run

    try:
        experiment = config.parse(job["document"], job["folder"])
        run(
            experiment, Path(job["out"]), job["resume"], on_round=lambda record: say(record=record),
            notice=lambda text: say(notice=text), record_also={"label": job["label"], "command": job["command"]},
        )  # fmt: skip
    except Exception as error:
        raise as_ours(error) from error


if __name__ == "__main__":
    main()
