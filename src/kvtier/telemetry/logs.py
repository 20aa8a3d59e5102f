"""Logs: one line for each event, as text or JSON, at a bounded rate, wherever kvtier runs.

A message is some words, then ``key=value`` as often as it takes: ``load given up after_s=2.500``.
As JSON the values are fields of their own. No message has text or tokens of a prompt, an answer or
a secret in it: that is up to whoever writes it, and tests look through all that is logged.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from math import isfinite
from typing import Protocol, runtime_checkable

from kvtier.errors import ConfigError, printable
from kvtier.telemetry.log_rate import LogRate
from kvtier.types import LogFormat

VARIABLE = "KVTIER_LOG_FORMAT"
"""In the environment: "text" or "json", for ``kvtier serve`` and inside of engines."""

_VALUE = re.compile(r"(?:\b(\w+)=)?%([-+ #0]*\d*(?:\.\d+)?)([diouxXeEfFgGcrsa%])")


@runtime_checkable
class Told(Protocol):
    """A value that knows what it is in JSON; its ``str`` goes into text."""

    def as_json(self) -> dict[str, object]: ...


class TextLines(logging.Formatter):
    """A line for an event; where it has a traceback, indented lines below it."""

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
    """An object in each line: time, level, logger, event, and the event's values by their names."""

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
    """A message's words, and its values by their names."""
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


# -- where they go ---------------------------------------------------------------------------------


def handler(wanted: LogFormat) -> logging.Handler:
    """To stderr, in that format, at a bounded rate."""
    made = logging.StreamHandler()
    made.setFormatter(JsonLines() if wanted is LogFormat.JSON else TextLines())
    made.addFilter(LogRate())
    return made


def log_to_stderr(level: str, wanted: LogFormat) -> None:
    """For a program of ours: everybody's records."""
    logging.basicConfig(level=level.upper(), handlers=[handler(wanted)])
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.root.level))


class _Through(logging.Handler):
    """To the handlers of an engine's logger, those of a moment later as well."""

    def __init__(self, theirs: logging.Logger) -> None:
        super().__init__()
        self._theirs = theirs

    def emit(self, record: logging.LogRecord) -> None:
        self._theirs.callHandlers(record)


def log_in_engine(theirs: logging.Logger) -> None:
    """Inside of an engine: to where its own records go, looking as they do.

    Or in the format that ``KVTIER_LOG_FORMAT`` names, to stderr. At a bounded rate in any case.

    Nothing happens where somebody has said how kvtier logs, or when called again.
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
    """The format, and what is wrong with it."""
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
