"""Long work yields to other requests, and work that is alone does not wait."""

from __future__ import annotations

import pytest

from kvtier.serve.server.pace import PAUSE, Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_piece_does_not_wait_and_the_next_one_does() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.wait_s == 0
    clock.now += 1
    pace.worked(1.0)
    assert pace.wait_s == PAUSE
    clock.now += PAUSE + 5
    assert pace.wait_s == 0


def test_all_keep_to_one_pace() -> None:
    clock = Clock()
    pace = Pace(clock)
    for _ in range(3):
        pace.worked(0.5)
    assert pace.wait_s == pytest.approx(3 * 0.5 * PAUSE)
