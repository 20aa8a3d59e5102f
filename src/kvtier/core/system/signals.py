"""Signals that end a process in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a process: SIGTERM, SIGINT, and SIGHUP unless it is ignored.

    SIGHUP arrives when a terminal is closed; ``nohup`` has it ignored.
    """
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


class Ending:
    """Whether a signal has asked this process to end."""

    def __init__(self) -> None:
        self.is_asked = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        raise SystemExit(0)


@contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """End the process by ``SystemExit`` when SIGTERM or SIGHUP arrives, so that files are closed.

    They have no default action in process 1 of a container. What calls Python may discard the
    exception, so look at ``is_asked``, too. An event loop inside may take the signals over.
    """
    ending = Ending()
    numbers = [
        ending_signal for ending_signal in ending_signals() if ending_signal is not signal.SIGINT
    ]
    before = {number: signal.signal(number, ending._note) for number in numbers}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGTERM and SIGHUP, while a process that ends closes its files."""
    numbers = [
        ending_signal for ending_signal in ending_signals() if ending_signal is not signal.SIGINT
    ]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
