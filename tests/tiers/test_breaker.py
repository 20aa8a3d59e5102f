"""The breaker: when calls to a failing tier are paused, and when they are retried."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker, BreakerState


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(clock: Clock, trial_s: float = 0.0) -> Breaker:
    breaker = Breaker(clock, trial_s=trial_s)
    assert breaker.note(False)
    return breaker


def test_closed_breaker_lets_everything_pass(clock: Clock) -> None:
    breaker = Breaker(clock, 3)
    for succeeded in (True, False, False, True, False, False):
        assert breaker.enter()
        assert breaker.enter(), "another call, at the same time"
        assert not breaker.note(succeeded), "it was closed, and is"
        assert (breaker.is_open, breaker.is_passable, breaker.left_s) == (False, True, 0)


def test_so_many_failures_in_a_row_open_it(clock: Clock) -> None:
    breaker = Breaker(clock, 3)
    assert [breaker.note(False) for _ in range(3)] == [False, False, True]
    assert (breaker.is_open, breaker.is_passable, breaker.left_s) == (True, False, FIRST_PAUSE_S)
    assert not breaker.enter()
    assert not breaker.is_tried


def test_after_the_pause_one_call_tries_and_its_success_closes_it(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += FIRST_PAUSE_S / 2
    assert breaker.left_s == FIRST_PAUSE_S / 2
    assert not breaker.enter()
    clock.now += FIRST_PAUSE_S / 2
    assert breaker.is_passable
    assert breaker.is_open, "half-open is not closed"
    assert breaker.enter()
    assert (breaker.is_tried, breaker.is_passable) == (True, False)
    assert not breaker.enter(), "another one came through"
    assert breaker.note(True)
    assert (breaker.is_open, breaker.is_tried, breaker.is_passable) == (False, False, True)


def test_each_trial_that_fails_doubles_the_pause_up_to_the_longest(clock: Clock) -> None:
    breaker = opened(clock)
    pauses = []
    for _ in range(9):
        pauses.append(breaker.left_s)
        clock.now += breaker.left_s
        assert breaker.enter()
        assert not breaker.note(False), "it was open, and is"
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    clock.now += breaker.left_s
    assert breaker.enter()
    breaker.note(True)
    breaker.note(False)
    assert breaker.left_s == FIRST_PAUSE_S, "a new series begins anew"


def test_success_makes_the_next_failure_the_first_in_a_row(clock: Clock) -> None:
    breaker = Breaker(clock, 2)
    breaker.note(False)
    breaker.note(True)
    assert not breaker.note(False)
    assert breaker.note(False)


def test_failure_of_a_call_that_began_before_does_not_double_the_pause(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += FIRST_PAUSE_S / 2
    breaker.note(False)
    assert breaker.left_s == FIRST_PAUSE_S, "nor does it count as nothing"


def test_trial_of_which_nothing_is_heard_is_not_the_last_one(clock: Clock) -> None:
    breaker = opened(clock)
    for _ in range(5):
        clock.now += FIRST_PAUSE_S
        assert breaker.enter()
        assert not breaker.enter()


def test_trial_is_waited_for_as_long_as_it_may_take(clock: Clock) -> None:
    breaker = opened(clock, trial_s=20)
    clock.now += FIRST_PAUSE_S
    assert breaker.enter()
    clock.now += 19
    assert not breaker.is_passable
    assert not breaker.enter()
    clock.now += 1
    assert breaker.is_passable
    assert breaker.enter()


def test_of_many_threads_one_comes_through(clock: Clock) -> None:
    breaker = opened(clock)
    clock.now += FIRST_PAUSE_S
    begin, came = Barrier(8), []

    def ask() -> None:
        begin.wait()
        if breaker.enter():
            came.append(1)

    threads = [Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(came) == 1


@given(
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 3.0, 100.0]),
    st.lists(st.sampled_from(["wait", "ask", "fails", "succeeds", "fails late"]), max_size=80),
    st.lists(st.integers(1, 40), min_size=80, max_size=80),
)
def test_open_breaker_lets_exactly_one_call_through_per_pause(
    limit: int, trial_s: float, steps: list[str], quarters: list[int]
) -> None:
    """A model predicts when the next call may pass, from the outcomes that the breaker got."""
    clock = Clock()
    breaker = Breaker(clock, limit, trial_s)
    in_row, pause_s, next_s, is_tried = 0, FIRST_PAUSE_S, 0.0, False
    num_under_way = 0
    for step, num_quarters in zip(steps, quarters, strict=False):
        is_open = in_row >= limit
        if step == "wait":
            clock.now += num_quarters / 4
        elif step == "ask":
            passes = not is_open or clock.now >= next_s
            assert breaker.is_passable == passes
            assert [breaker.enter() for _ in range(3)] == [passes] + [passes and not is_open] * 2
            if passes and is_open:
                is_tried, next_s = True, clock.now + max(pause_s, trial_s)
            num_under_way += passes
        elif num_under_way:
            num_under_way -= 1
            succeeded = step == "succeeds"
            if step == "fails late":  # a call that the breaker no longer counts
                clock.now += 2 * LONGEST_PAUSE_S + trial_s
            assert breaker.note(succeeded) == (
                is_open if succeeded else not is_open and in_row + 1 == limit
            )
            if succeeded:
                in_row, pause_s, is_tried = 0, FIRST_PAUSE_S, False
            else:
                in_row = limit if is_open else in_row + 1
            if in_row >= limit:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if is_tried else pause_s
                is_tried, next_s = False, clock.now + pause_s
        assert breaker.is_open == (in_row >= limit)
        assert breaker.is_tried == is_tried


def test_its_state_is_told_without_changing_it(clock: Clock) -> None:
    breaker = Breaker(clock)
    assert breaker.state is BreakerState.CLOSED
    breaker.note(False)
    assert breaker.state is BreakerState.OPEN
    clock.now += FIRST_PAUSE_S
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.enter(), "nobody has tried yet"
    assert breaker.state is BreakerState.HALF_OPEN, "somebody tries"
    breaker.note(True)
    assert breaker.state is BreakerState.CLOSED
