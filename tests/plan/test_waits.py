"""Whether a request goes on waiting: the table of cases, and waits for nothing."""

from __future__ import annotations

import pytest

from kvtier.cache.waiters import Signal
from kvtier.plan.decide import Wait, WaitState

from .decide_cases import WAITS, WaitCase

UNTIL_S = 100.0


@pytest.mark.parametrize("case", WAITS, ids=str)
def test_state(case: WaitCase) -> None:
    reads, answers = ([Signal() for block in case.blocks if block == kind] for kind in "SU")
    wait, now_s = Wait(UNTIL_S, reads, answers), 0.0
    for event in case.happens:
        now_s = UNTIL_S if event == "t" else now_s
        for signal in {"r": reads, "f": reads, "a": answers[:1]}.get(event, []):
            signal.is_over = True
    assert wait.state(now_s) is case.state
    assert wait.state(now_s) is case.state


def test_all_reads_have_to_end_and_one_answer_has_to_come() -> None:
    signals = [Signal(), Signal()]
    signals[0].is_over = True
    assert Wait(UNTIL_S, reads=signals).state(0.0) is WaitState.READS
    assert Wait(UNTIL_S, answers=signals).state(0.0) is WaitState.OVER


def test_nobody_waits_for_nothing() -> None:
    assert Wait(UNTIL_S).state(0.0) is WaitState.OVER
