"""Rate limit for logs, so that clients cannot make them grow without bound."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

BURST = 10
PER_S = 0.2
MAX_KINDS = 256
"""Kinds of records that are counted separately; all others share one more kind."""

_VARIES = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(slots=True)
class _Kind:
    allowance: float
    seen_s: float
    num_suppressed: int = 0


class LogRate(logging.Filter):
    """Lets ``BURST`` warnings of a kind pass, then one every five seconds with the number dropped.

    A kind is a logger and the first line of a message before its values are filled in. Attach it to
    a handler, which sees the records of all loggers. Records below WARNING always pass.

    now: clock, seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._lock = Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        with self._lock:
            return self._is_due(record)

    def _is_due(self, record: logging.LogRecord) -> bool:
        now = self._now()
        key = (record.name, _VARIES.sub("#", str(record.msg).partition("\n")[0][:200]))
        if len(self._kinds) >= MAX_KINDS and key not in self._kinds:
            key = ("", "")
        kind = self._kinds.setdefault(key, _Kind(BURST, now))
        kind.allowance = min(BURST, kind.allowance + (now - kind.seen_s) * PER_S)
        kind.seen_s = now
        if kind.allowance < 1:
            kind.num_suppressed += 1
            return False
        kind.allowance -= 1
        if kind.num_suppressed:
            _append(record, kind.num_suppressed)
            kind.num_suppressed = 0
        return True


def _append(record: logging.LogRecord, num_suppressed: int) -> None:
    """Append the number as one more argument, so that formatters still see separate values."""
    if isinstance(record.args, tuple):
        text = str(record.msg) if record.args else str(record.msg).replace("%", "%%")
        record.msg, record.args = f"{text} suppressed=%d", (*record.args, num_suppressed)
    else:
        record.msg, record.args = f"{record.getMessage()} suppressed={num_suppressed}", None
