"""Signals that ask a run to stop: the round in flight is dropped, what is saved stays whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import Interrupted

NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")  # the last is what batch systems send before they end a job


class Stop:
    """Whether a signal has come. Inside `droppable()` it raises Interrupted at once, elsewhere it waits to be asked."""

    def __init__(self):
        self.name: str | None = None
        self._droppable = False

    def __call__(self, number, frame) -> None:
        self.name = signal.Signals(number).name
        if self._droppable:
            self._droppable = False
            raise Interrupted(self.name)

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Work that may be dropped at any point."""
        self.ask()
        self._droppable = True
        try:
            yield
        except Exception:
            self.ask()  # what a library or a user's code made of it was still the signal
            raise
        finally:
            self._droppable = False
        self.ask()  # somebody swallowed it: the work is not to be trusted

    def ask(self) -> None:
        if self.name is not None:
            raise Interrupted(self.name)


class Stopped(KeyboardInterrupt):
    """A signal before or after a run. Not KeyboardInterrupt itself: where that leaves an `exec`, as in a library that
    is being loaded, Python ends by SIGINT in the end, whoever catches it."""


def interrupt() -> None:
    """From here on each of the signals raises Stopped, where nothing else catches it."""

    def stop(number, frame):
        raise Stopped

    _answer(stop)


def ignore() -> None:
    """From here on the signals come too late."""
    _answer(signal.SIG_IGN)


def _answer(handler) -> None:
    for name in NAMES:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), handler)


@contextmanager
def stopping() -> Iterator[Stop]:
    """Catches the signals while it lasts; only the main thread of a process can."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    before = {n: signal.signal(n, stop) for n in numbers}
    try:
        yield stop
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
