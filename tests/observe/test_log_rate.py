"""The rate limit of repeated log lines."""

from __future__ import annotations

import logging

import pytest

from kvtier.observe.logs import BURST, MAX_KINDS, LogRate


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.texts: list[str] = []
        self.addFilter(LogRate(lambda: self.clock))

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def kept() -> Kept:
    return Kept()


def log(kept: Kept, message: str, *values: object, level: int = logging.WARNING) -> None:
    kept.handle(logging.LogRecord("name", level, "file", 1, message, values, None))


def test_of_a_flood_the_beginning_is_kept_and_the_rest_counted(kept: Kept) -> None:
    for at in range(1000):
        log(kept, "bad request id=%s", at)
    assert kept.texts == [f"bad request id={at}" for at in range(BURST)]
    kept.clock += 5
    log(kept, "bad request id=%s", 1000)
    assert kept.texts[BURST:] == [f"bad request id=1000 suppressed={1000 - BURST}"]


def test_a_flood_of_one_kind_hides_no_other(kept: Kept) -> None:
    for _ in range(100):
        log(kept, "out of files\nsocket: <fd=%d>", 3)
    log(kept, "the disk is gone")
    assert kept.texts[BURST:] == ["the disk is gone"]


def test_numbers_in_a_message_make_no_new_kind(kept: Kept) -> None:
    for at in range(100):
        log(kept, f"failed at 0x{at:x} {at}")
    assert len(kept.texts) == BURST


def test_kinds_without_end_are_one_kind(kept: Kept) -> None:
    for at in range(100_000):
        letters = "".join(chr(97 + int(digit)) for digit in str(at))
        log(kept, f"failed {letters}")
    assert len(kept.texts) <= MAX_KINDS + BURST


def test_what_is_no_warning_passes(kept: Kept) -> None:
    for _ in range(100):
        log(kept, "request", level=logging.DEBUG)
    assert len(kept.texts) == 100
