"""Signals that end a process in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvtier.core.system.signals import ended_by_signals, ending_signals, signals_ignored

TERM, HANGUP = signal.SIGTERM, signal.SIGHUP


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    before = [signal.getsignal(each) for each in (TERM, HANGUP)]
    yield
    for each, handler in zip((TERM, HANGUP), before, strict=True):
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [TERM, HANGUP])
def test_signal_ends_a_process_that_starts_and_closes_what_it_began(number: signal.Signals) -> None:
    before, steps = signal.getsignal(number), list[str]()

    def start() -> None:
        with ended_by_signals():
            try:
                signal.raise_signal(number)
                steps.append("went on")
            finally:
                steps.append("closed")

    with pytest.raises(SystemExit) as ended:
        start()
    assert (steps, ended.value.code) == (["closed"], 0)
    assert signal.getsignal(number) == before


def test_signal_whose_exception_was_discarded_is_not_lost() -> None:
    with ended_by_signals() as ending:
        with suppress(SystemExit):
            signal.raise_signal(TERM)
        assert ending.is_asked


def test_hangup_that_is_ignored_stays_ignored() -> None:
    """As under ``nohup``."""
    assert HANGUP in ending_signals()
    signal.signal(HANGUP, signal.SIG_IGN)
    assert HANGUP not in ending_signals()
    with ended_by_signals():
        signal.raise_signal(HANGUP)


def test_signals_are_ignored_while_files_are_closed() -> None:
    with ended_by_signals() as ending:
        with signals_ignored():
            signal.raise_signal(TERM)
            signal.raise_signal(HANGUP)
        assert not ending.is_asked
