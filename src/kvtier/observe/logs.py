"""Logs: one line per event, as text or JSON, with a rate limit.

A message is some words, then ``key=value`` pairs: ``load given up after_s=2.500``. In JSON the
values are separate fields. No message contains text or tokens of a prompt or an answer, or a
secret; tests check all log output for that.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from math import isfinite
from threading import Lock
from typing import Protocol, runtime_checkable

from kvtier.core.errors import ConfigError, printable
from kvtier.core.types import LogFormat

VARIABLE = "KVTIER_LOG_FORMAT"
"""Environment variable: "text" or "json", for ``kvtier serve`` and inside engines."""

BURST = 10
PER_S = 0.2
MAX_KINDS = 256
"""Kinds of records that are counted separately; all others share one more kind."""

_VARIES = re.compile(r"0x[0-9a-f]+|\d+")
_VALUE = re.compile(r"(?:\b(\w+)=)?%([-+ #0]*\d*(?:\.\d+)?)([diouxXeEfFgGcrsa%])")


@runtime_checkable
class Told(Protocol):
    """A value with a JSON form of its own; in text its ``str`` is used."""

    def as_json(self) -> dict[str, object]: ...


class TextLines(logging.Formatter):
    """One line per event; a traceback follows as indented lines."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = printable(super().formatMessage(record))
        detail = getattr(record, "detail", "")
        return line + _indented(detail) if detail else line

    def formatException(self, *args: object, **kwargs: object) -> str:  # noqa: N802
        return _indented(super().formatException(*args, **kwargs))[1:]  # type: ignore[arg-type]


class JsonLines(logging.Formatter):
    """One object per line: time, level, logger, event, and the event's values by name."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = taken_apart(record)
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
        }
        for name, value in fields.items():
            entry[f"{name}_" if name in entry else name] = _plain(value)
        detail = getattr(record, "detail", "")
        if record.exc_info:
            detail = self.formatException(record.exc_info)
        if detail:
            entry["detail"] = detail
        return json.dumps(entry, ensure_ascii=False)


def taken_apart(record: logging.LogRecord) -> tuple[str, Mapping[str, object]]:
    """Return a message's words, and its values by name."""
    if not isinstance(record.args, tuple) or not record.args:
        return record.getMessage(), {}
    values = iter(record.args)
    fields: dict[str, object] = {}

    def put(found: re.Match[str]) -> str:
        name, flags, kind = found.groups()
        if kind == "%":
            return "%"
        value = next(values)
        if name is None and not isinstance(value, Told):
            return str(f"%{flags}{kind}" % (value,))
        fields[name or type(value).__name__.lower()] = value
        return ""

    try:
        words = _VALUE.sub(put, str(record.msg))
    except (StopIteration, TypeError, ValueError):
        return record.getMessage(), {}
    return " ".join(words.split()), fields


def _plain(value: object) -> object:
    if isinstance(value, Told):
        return value.as_json()
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and isfinite(value) else str(value)


def _indented(text: str) -> str:
    return "".join(f"\n  {printable(line)}" for line in text.splitlines())


# -- rate limit, so that clients cannot make logs grow without bound -------------------------------


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


# -- handlers -------------------------------------------------------------------------------------


def handler(wanted: LogFormat) -> logging.Handler:
    """Return a handler that writes to stderr in this format, with a rate limit."""
    made = logging.StreamHandler()
    made.setFormatter(JsonLines() if wanted is LogFormat.JSON else TextLines())
    made.addFilter(LogRate())
    return made


def log_to_stderr(level: str, wanted: LogFormat) -> None:
    """Set up logging of a kvtier program: all records go to stderr."""
    logging.basicConfig(level=level.upper(), handlers=[handler(wanted)])
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.root.level))


class _Through(logging.Handler):
    """Passes records to the current handlers of an engine's logger.

    An engine's lines may name only a file, as vLLM's do. So each message begins with "kvtier".
    """

    def __init__(self, theirs: logging.Logger) -> None:
        super().__init__()
        self._theirs = theirs

    def emit(self, record: logging.LogRecord) -> None:
        if not str(record.msg).startswith("kvtier"):
            record = copy(record)
            record.msg = f"kvtier: {record.msg}"
        self._theirs.callHandlers(record)


def log_in_engine(theirs: logging.Logger) -> None:
    """Set up logging inside an engine: records go to the engine's own handlers.

    ``KVTIER_LOG_FORMAT`` selects stderr in that format instead. Both have a rate limit. Does
    nothing if kvtier's logger is configured already, or on a second call.
    """
    ours = logging.getLogger("kvtier")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    wanted, complaint = _from_environment()
    if wanted is None:
        made: logging.Handler = _Through(theirs)
        made.addFilter(LogRate())
    else:
        made = handler(wanted)
    ours.addHandler(made)
    ours.propagate = False
    if theirs is not logging.root:
        ours.setLevel(theirs.getEffectiveLevel())
    if complaint:
        logging.getLogger(__name__).warning("%s", complaint)


def _from_environment() -> tuple[LogFormat | None, str]:
    """Return the format and an error message, if any."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None, ""
    try:
        return LogFormat(text), ""
    except ValueError:
        return None, f"{VARIABLE}={text!r} in the environment: use text or json"


def format_of(text: str | None) -> LogFormat:
    """Return the log format of an option; None takes the environment's, or text.

    Raises ``ConfigError`` for anything else.
    """
    if text:
        return LogFormat(text)
    wanted, complaint = _from_environment()
    if complaint:
        raise ConfigError(complaint)
    return wanted or LogFormat.TEXT
