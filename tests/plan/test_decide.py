"""Load, wait or compute: the table of cases, and what is decided beside it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.types import DEVICE, DISK, HOST, Direct
from kvtier.plan import CostModel, Costs, ways_of
from kvtier.plan.decide import (
    Compute,
    FoundBlocks,
    GivenUp,
    LoadUpTo,
    Reuse,
    Waited,
    WaitUntil,
    decide,
    end_without_room,
    reads_directly,
)
from kvtier.plan.worth import MAX_PATIENCE_S

from .decide_cases import BLOCK_TOKENS, CASES, PREFILL_S, Case

BLOCK_BYTES = 4096
TIERS = {"M": HOST, "A": HOST, "U": HOST, "S": DISK}


def costs_of(case: Case) -> Costs:
    model = CostModel()
    for route, seconds in (((HOST, DEVICE), case.load_s), ((DISK, HOST), case.promote_s)):
        model.observe_copy(route, BLOCK_BYTES, seconds)
    for num in (4, 8, 16, 32) if case.computes_s is not None else ():
        model.observe_prefill(0, num * BLOCK_TOKENS, num * case.computes_s)
    return model.snapshot(ways=ways_of([DEVICE, HOST], [DISK], ()))


def found_of(case: Case, *, together: bool = False, num_staging: int | None = None) -> FoundBlocks:
    """together: all blocks are loaded, or none."""
    first = case.num_device * BLOCK_TOKENS
    there = case.behind[: case.num_found]
    ends = [first + (at + 1) * BLOCK_TOKENS for at in range(len(there))]
    tiers = [TIERS[letter] for letter in there]
    return FoundBlocks(
        first,
        len(case.blocks) * BLOCK_TOKENS + 1,
        ends[: len(there) - len(there.lstrip("M"))],
        ends,
        lambda end: tiers[: (end - first) // BLOCK_TOKENS],
        0 if together else BLOCK_TOKENS,
        BLOCK_BYTES,
        num_staging,
    )


def decide_case(case: Case, found: FoundBlocks) -> Reuse:
    return decide(
        found,
        Waited(100.0, has_failed=case.has_failed),
        lambda: costs_of(case),
        100.0 + case.waited_s,
        always_loads=case.always_loads,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decides(case: Case) -> None:
    found = found_of(case)
    ready = found.first + case.loads * BLOCK_TOKENS
    decision = decide_case(case, found)
    if case.waits_for:
        end = found.first + case.waits_for * BLOCK_TOKENS
        assert decision == WaitUntil(ANY, end, ready)
        assert isinstance(decision, WaitUntil)
        longest = costs_of(case).prefill_s(found.first, end)
        assert decision.until_s == pytest.approx(100.0 + min(longest, 10.0))
    elif case.loads:
        assert decision == LoadUpTo(ready, ANY)
    else:
        assert decision == Compute(ANY)


def test_reason_of_giving_up_is_told() -> None:
    late, failed = Case("", "MS", waited_s=1.0), Case("", "SS", has_failed=True)
    end = BLOCK_TOKENS
    assert decide_case(late, found_of(late)) == LoadUpTo(end, GivenUp.OVERDUE)
    assert decide_case(failed, found_of(failed)) == Compute(GivenUp.READ_FAILED)
    nothing_to_wait_for = Case("", "MM", waited_s=1.0)
    assert decide_case(nothing_to_wait_for, found_of(nothing_to_wait_for)) == LoadUpTo(2 * end)


def test_who_waits_for_nothing_more_loads_what_is_ready() -> None:
    found, costs = found_of(Case("", "MMSS")), costs_of(Case("", "MMSS"))
    for waited in (Waited(may_wait=False), Waited(given_up=GivenUp.OVERDUE)):
        assert decide(found, waited, lambda: costs, 0.0) == LoadUpTo(
            2 * BLOCK_TOKENS, waited.given_up
        )


def test_blocks_that_go_together_are_loaded_all_or_as_far_as_they_are_ready() -> None:
    slow = Case("", "MMSS", promote_s=1.0)
    assert decide_case(slow, found_of(slow, together=True)) == LoadUpTo(2 * BLOCK_TOKENS)
    slower = Case("", "MMSS", promote_s=1.0, load_s=1.0)
    assert decide_case(slower, found_of(slower, together=True)) == Compute()


def test_no_more_is_promoted_than_there_is_room_for_on_the_way() -> None:
    case = Case("", "SSSS")
    decision = decide_case(case, found_of(case, num_staging=3))
    assert decision == WaitUntil(ANY, 3 * BLOCK_TOKENS, 0)


def test_a_block_without_room_cuts_a_prompt_before_it() -> None:
    case = Case("", "DSSS")
    assert end_without_room(found_of(case), 48) == 47
    assert end_without_room(found_of(case, together=True), 48) == BLOCK_TOKENS


def test_costs_are_asked_for_once_or_not_at_all() -> None:
    calls = count()

    def costs() -> Costs:
        next(calls)
        return costs_of(Case("", ""))

    always = found_of(Case("", "MMMM"))
    decide(always, Waited(), costs, 0.0, always_loads=True)
    decide(found_of(Case("", "....")), Waited(), costs, 0.0)
    assert next(calls) == 0
    decide(found_of(Case("", "MMSS")), Waited(), costs, 0.0)
    assert next(calls) == 2


def test_direct_reads_are_tried_once() -> None:
    for lacks_room in (False, True):
        assert reads_directly(Direct.ON, lacks_room=lacks_room, was_read=False)
        assert not reads_directly(Direct.ON, lacks_room=lacks_room, was_read=True)
        assert not reads_directly(Direct.OFF, lacks_room=lacks_room, was_read=False)
    assert reads_directly(Direct.AUTO, lacks_room=True, was_read=False)
    assert not reads_directly(Direct.AUTO, lacks_room=False, was_read=False)


def test_waits_since_now_if_it_has_not_waited_yet() -> None:
    found, costs = found_of(Case("", "SS")), costs_of(Case("", "SS"))
    decision = decide(found, Waited(), lambda: costs, 7.0)
    assert isinstance(decision, WaitUntil)
    assert decision.until_s == pytest.approx(7.0 + 2 * PREFILL_S)


def test_what_was_weighed_before_it_was_promoted_is_not_weighed_on_its_way() -> None:
    case = Case("", "MMAA", load_s=1.0)
    costs = costs_of(case)
    assert isinstance(decide(found_of(case), Waited(), lambda: costs, 0.0), Compute)
    on_its_way = decide(found_of(case), Waited(is_weighed=True), lambda: costs, 0.0)
    assert on_its_way == WaitUntil(ANY, 4 * BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    arrived = Case("", "MMMM", load_s=1.0)
    assert decide(found_of(arrived), Waited(is_weighed=True), lambda: costs, 0.0) == Compute()


# -- properties ------------------------------------------------------------------------------------

PROMPTS = st.builds(
    Case,
    st.just("any"),
    st.builds(
        str.__add__,
        st.sampled_from(["", "D", "DDD"]),
        st.text("MSAU.", min_size=1, max_size=12),
    ),
    load_s=st.sampled_from([1e-4, 0.01, 1.0]),
    promote_s=st.sampled_from([1e-4, 0.01, 1.0]),
    computes_s=st.sampled_from([None, PREFILL_S]),
    waited_s=st.sampled_from([0.0, PREFILL_S, 20.0]),
    always_loads=st.booleans(),
    has_failed=st.booleans(),
)


def _prefix(case: Case) -> Case:
    """Return the case without the blocks behind the first miss, which no look-up reports."""
    behind = case.behind.partition(".")[0]
    return replace(case, blocks="D" * case.num_device + behind.ljust(len(case.behind), "."))


@given(PROMPTS, st.booleans(), st.sampled_from([None, 2]))
def test_decision_stays_within_what_was_found(
    case: Case, together: bool, num_staging: int | None
) -> None:
    case = _prefix(case)
    found = found_of(case, together=together, num_staging=num_staging)
    match decide_case(case, found):
        case LoadUpTo(end):
            assert end in found.ready
        case WaitUntil(until_s, end, ready):
            assert end in found.reachable
            assert ready in (found.first, *found.ready)
            assert ready < end
            assert not case.has_failed
            assert 100.0 + case.waited_s < until_s <= 100.0 + MAX_PATIENCE_S
        case Compute():
            pass


@given(PROMPTS)
def test_request_that_can_not_wait_never_waits(case: Case) -> None:
    case = _prefix(case)
    found, costs = found_of(case), costs_of(case)
    for waited in (Waited(may_wait=False), Waited(given_up=GivenUp.READ_FAILED)):
        decision = decide(found, waited, lambda: costs, 0.0, always_loads=case.always_loads)
        assert not isinstance(decision, WaitUntil)
        if case.always_loads and found.ready:
            assert decision == LoadUpTo(found.ready[-1], waited.given_up)


@given(PROMPTS, st.floats(0.0, 20.0))
def test_longer_wait_never_begins_another(case: Case, more_s: float) -> None:
    """A request that has given up at some time gives up at any later time."""
    case = replace(_prefix(case), has_failed=False)
    later = replace(case, waited_s=case.waited_s + more_s)
    if not isinstance(decide_case(case, found_of(case)), WaitUntil):
        assert not isinstance(decide_case(later, found_of(later)), WaitUntil)


@given(PROMPTS)
def test_ready_blocks_that_are_loaded_slower_are_loaded_no_further(case: Case) -> None:
    ready = replace(_prefix(case), has_failed=False, waited_s=0.0, always_loads=False)
    ready = replace(ready, blocks=ready.blocks.translate(str.maketrans("SAU", "MMM")))
    slower = replace(ready, load_s=10 * ready.load_s)

    def end(case: Case) -> int:
        decision = decide_case(case, found_of(case))
        assert not isinstance(decision, WaitUntil)
        return decision.end if isinstance(decision, LoadUpTo) else found_of(case).first

    assert end(slower) <= end(ready)
