"""Format and destination of log records."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvtier.core.errors import ConfigError
from kvtier.core.types import DEVICE, HOST, LogFormat, Match
from kvtier.observe.logs import (
    BURST,
    VARIABLE,
    JsonLines,
    LogRate,
    TextLines,
    format_of,
    log_in_engine,
)
from kvtier.plan import Costs, explain, ways_of, weigh


def _record(message: str, *values: object, **more: object) -> logging.LogRecord:
    record = logging.LogRecord("kvtier.part", logging.WARNING, "file", 1, message, values, None)
    record.__dict__.update(more)
    return record


def _json(record: logging.LogRecord) -> dict[str, object]:
    line = JsonLines().format(record)
    assert "\n" not in line
    found: dict[str, object] = json.loads(line)
    assert found.pop("time")
    assert found.pop("logger") == "kvtier.part"
    assert found.pop("level") == "warning"
    return found


@pytest.mark.parametrize(
    ("message", "values", "found"),
    [
        (
            "given up after_s=%.3f num=%d",
            (2.5, 7),
            {"event": "given up", "after_s": 2.5, "num": 7},
        ),
        ("%s: %s has left", ("a", "b"), {"event": "a: b has left"}),
        ("half 50%% num=%d", (1,), {"event": "half 50%", "num": 1}),
        ("no values 50%", (), {"event": "no values 50%"}),
        ("tiers=%s rest", (["x"],), {"event": "rest", "tiers": "['x']"}),
        ("event=%s time=%s", ("e", 1.0), {"event": "", "event_": "e", "time_": 1.0}),
        ("seconds=%s", (float("nan"),), {"event": "", "seconds": "nan"}),
        ("why=%s", ("two words\nand a line",), {"event": "", "why": "two words\nand a line"}),
    ],
)
def test_values_are_fields(
    message: str, values: tuple[object, ...], found: dict[str, object]
) -> None:
    assert _json(_record(message, *values)) == found


def test_a_message_that_does_not_fit_its_values_is_kept_as_it_is() -> None:
    record = _record("num=%(num)d", {"num": 3})
    assert _json(record) == {"event": "num=3"}


def test_a_value_in_a_message_can_forge_no_line() -> None:
    line = TextLines().format(_record("bad name=%s", "x\n2026-01-01 INFO kvtier: all is well"))
    assert len(line.splitlines()) == 1
    assert r"x\n2026" in line


def test_tracebacks_stand_below_their_event() -> None:
    try:
        raise ValueError("why\n\x1b[2J")
    except ValueError:
        record = _record("failed id=%s", 1)
        record.exc_info = sys.exc_info()
    lines = TextLines().format(record).splitlines()
    assert lines[0].endswith("WARNING kvtier.part: failed id=1")
    assert len(lines) > 2
    assert all(line.startswith("  ") for line in lines[1:])
    assert "\x1b" not in "".join(lines)
    record.exc_text = None
    assert "ValueError: why" in str(_json(record)["detail"])


def test_detail_is_told_like_a_traceback() -> None:
    record = _record("failed id=%s", 1, detail="one\ntwo")
    assert TextLines().format(record).endswith("failed id=1\n  one\n  two")
    assert _json(record) == {"event": "failed", "id": 1, "detail": "one\ntwo"}


def test_what_was_left_out_is_a_value() -> None:
    clock = [0.0]
    rate = LogRate(lambda: clock[0])
    for message, values in (("late after_s=%d", (3,)), ("late by 10%", ())):
        for _ in range(BURST + 2):
            rate.filter(_record(message, *values))
        clock[0] += 5
        record = _record(message, *values)
        assert rate.filter(record)
        assert record.getMessage() == (message % values if values else message) + " suppressed=2"
        assert _json(record)["suppressed"] == 2


def test_an_explanation_is_a_value_too() -> None:
    match = Match((), (), (), 0)
    costs = Costs(ways=ways_of((DEVICE, HOST), (), ()))
    told = explain(
        weigh(match, costs, num_tokens=9, block_size=2, bytes_per_block=1, num_free_slots=1)
    )
    record = _record("prompt request=%s %s", "r", told)
    assert _json(record) == {"event": "prompt", "request": "r", "explanation": told.as_json()}
    assert "tokens=9 reused=0 computed_tokens=9" in TextLines().format(record)


# -- inside engines --------------------------------------------------------------------------------


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """The kvtier logger with an engine's defaults: no handlers, no level."""
    logger = logging.getLogger("kvtier")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


class Engine:
    """An engine's logger, and the text it has written."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.logger = logging.getLogger("tests.serve.engine")
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(logging.Formatter("engine says %(message)s"))
        self.logger.handlers = [handler]


def test_in_an_engine_records_look_as_its_own_at_a_bounded_rate(ours: logging.Logger) -> None:
    engine = Engine()
    log_in_engine(engine.logger)
    log_in_engine(engine.logger)
    for at in range(BURST + 5):
        logging.getLogger("kvtier.part").warning("full at=%d", at)
    logging.getLogger("kvtier.part").debug("not asked for")
    assert engine.stream.getvalue().splitlines() == [
        f"engine says kvtier: full at={at}" for at in range(BURST)
    ]


def test_in_an_engine_every_message_names_kvtier_once(ours: logging.Logger) -> None:
    engine = Engine()
    log_in_engine(engine.logger)
    for message in ("kvtier serves without a recording", "90% of it", "full of %s"):
        logging.getLogger("kvtier.part").warning(message, *("blocks",) * message.count("%s"))
    assert engine.stream.getvalue().splitlines() == [
        "engine says kvtier serves without a recording",
        "engine says kvtier: 90% of it",
        "engine says kvtier: full of blocks",
    ]


def test_the_environment_says_how_they_look_there(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "json")
    engine = Engine()
    log_in_engine(engine.logger)
    logging.getLogger("kvtier.part").warning("full at=%d", 3)
    assert engine.stream.getvalue() == ""
    found = json.loads(capsys.readouterr().err)
    assert (found["event"], found["at"]) == ("full", 3)


def test_a_format_that_there_is_not_is_told_and_stops_nothing(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "xml")
    engine = Engine()
    log_in_engine(engine.logger)
    assert "KVTIER_LOG_FORMAT='xml' in the environment" in engine.stream.getvalue()
    with pytest.raises(ConfigError, match="use text or json"):
        format_of(None)
    assert format_of("text") is LogFormat.TEXT


def test_who_has_said_how_kvtier_logs_is_left_alone(ours: logging.Logger) -> None:
    ours.setLevel(logging.ERROR)
    log_in_engine(Engine().logger)
    assert not ours.handlers


@pytest.mark.parametrize("wanted", list(LogFormat))
def test_whatever_is_logged_is_written_when_no_file_can_be_opened(wanted: LogFormat) -> None:
    code = (
        "import logging, os, resource, sys; from kvtier.observe.logs import log_to_stderr\n"
        "from kvtier.core.types import LogFormat\n"
        "log_to_stderr('info', LogFormat(sys.argv[1]))\n"
        "limit = len(os.listdir('/proc/self/fd')) - 1\n"  # without the one that lists them
        "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "try:\n    open('/dev/null')\n"
        "except OSError:\n    logging.exception('first\\nsecond \\x1b \\u2028 value=%s', '\\t')\n"
    )
    command = [sys.executable, "-c", code, wanted.value]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Logging error" not in done.stderr
    assert "Too many open files" in done.stderr  # the error itself, with its traceback
    if wanted is LogFormat.TEXT:
        assert r"first\nsecond \x1b \u2028 value=\t" in done.stderr
    else:
        assert json.loads(done.stderr)["value"] == "\t"
