"""Plans that compute the front of a prefix while its end is loaded."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.types import DEVICE, DISK, HOST, BlockId, Match
from kvtier.plan import Costs, Plan, PrefillCost, ways_of, weigh
from kvtier.plan.average import size_class
from kvtier.plan.decide import is_computed_sooner

SIZE, BYTES, GRAIN = 4, 1000, 2
WAYS = ways_of((DEVICE, HOST), (DISK,), ())
NAMES = {"d": DEVICE, "h": HOST, "s": DISK}


def match_of(tiers: str, in_flight: str = "") -> Match:
    """One letter per block: d, h, s for device, host, disk; + where it is in flight."""
    flags = tuple(flag == "+" for flag in in_flight.ljust(len(tiers)))
    blocks = tuple(BlockId(number) for number in range(len(tiers)))
    return Match(blocks, tuple(NAMES[tier] for tier in tiers), flags, len(tiers))


def costs_of(disk_s: float, prefill_s: float | None = 1.0, queued_s: float = 0.0) -> Costs:
    """Seconds per block from the disk, and to compute it."""
    prefill = None if prefill_s is None else PrefillCost(prefill_s / SIZE)
    rates = {(HOST, DEVICE): {size_class(BYTES): 1e-12}}
    if disk_s:
        rates[DISK, HOST] = {size_class(BYTES): disk_s / BYTES}
    return Costs(rates, prefill, {(DISK, HOST): queued_s}, ways=WAYS)


def plan_of(match: Match, costs: Costs, both: bool = True, deadline_s: float | None = None) -> Plan:
    return weigh(
        match,
        costs,
        num_tokens=match.num_blocks * SIZE + 1,
        block_size=SIZE,
        bytes_per_block=BYTES,
        num_free_slots=10_000,
        grain_blocks=GRAIN,
        deadline_s=deadline_s,
        from_both_ends=both,
    ).plan


@pytest.mark.parametrize(
    ("times", "num_claimed"), [(0.25, 32), (0.5, 28), (1, 20), (2, 14), (4, 8)]
)
def test_it_takes_as_long_as_both_together(times: float, num_claimed: int) -> None:
    """times: rate of the disk as a multiple of the rate of computing."""
    match, costs = match_of("s" * 40), costs_of(1 / times)
    alone, plan = plan_of(match, costs, both=False), plan_of(match, costs)
    assert plan.from_both_ends
    assert not alone.from_both_ends
    assert plan.num_reused_blocks == 40
    assert plan.num_claimed_blocks == num_claimed
    together = 40 / (1 + times)
    assert plan.seconds == pytest.approx(together + 0.25, rel=0.06)
    assert alone.seconds == pytest.approx(min(40, 40 / times) + 0.25)


def test_chunks_are_copied_from_the_last_to_the_first() -> None:
    plan = plan_of(match_of("s" * 8), costs_of(1.0))
    assert [list(copy.blocks) for copy in plan.copies] == [[6, 7], [4, 5], [2, 3], [0, 1]]
    assert {(copy.src, copy.dst) for copy in plan.copies} == {(DISK, DEVICE)}


def test_a_chunk_that_is_partly_on_the_device_is_copied_first() -> None:
    plan = plan_of(match_of("ddd" + "s" * 9), costs_of(1.0))
    assert [list(copy.blocks) for copy in plan.copies] == [
        *([3], [10, 11], [8, 9]),
        *([6, 7], [4, 5]),
    ]
    assert plan.num_claimed_blocks == 4
    assert plan.load_s == pytest.approx(1 + 4)
    assert plan.recompute_s == pytest.approx(4 + 0.25)
    assert plan.seconds == pytest.approx(1 + 4 + 0.25)


def test_a_chunk_in_two_tiers_is_copied_from_both() -> None:
    plan = plan_of(match_of("hsshssss"), costs_of(1.0))
    assert [(copy.src, list(copy.blocks)) for copy in plan.copies] == [
        *((HOST, [0]), (DISK, [1])),
        *((DISK, [6, 7]), (DISK, [4, 5])),
        *((DISK, [2]), (HOST, [3])),
    ]


@pytest.mark.parametrize(
    ("match", "costs"),
    [
        (match_of("s" * 40), costs_of(1 / 20)),  # the load takes 2, together 1.9
        (match_of("s" * 40), costs_of(20.0)),  # computing takes 40, together 38
        (match_of("s" * 40), costs_of(1.0, prefill_s=None)),
        (match_of("s" * 40), costs_of(1.0, queued_s=50.0)),
        (match_of("s" * 40), costs_of(1.0, queued_s=inf)),
        (match_of("s" * 2), costs_of(1.0)),  # a single chunk
        (match_of("s" * 20 + "d" + "s" * 19), costs_of(1.0)),
        (match_of("s" * 40, " " * 20 + "+"), costs_of(1.0)),
        (match_of("d" * 40), costs_of(1.0)),
        (match_of("h" * 40), costs_of(1.0)),
        (match_of("h" * 40), Costs({(HOST, DEVICE): {4: 1e-3}}, PrefillCost(0.25), ways=WAYS)),
        (match_of("s" * 40), costs_of(0.001, prefill_s=0.001)),  # it would save 20 ms
        (match_of("s" * 40), costs_of(0.0, prefill_s=0.002)),  # computing takes 80 ms
        (match_of(""), costs_of(1.0)),
        (match_of("s" * 2100), costs_of(1.0)),  # too many copies
    ],
)
def test_otherwise_the_plan_is_the_usual_one(match: Match, costs: Costs) -> None:
    assert plan_of(match, costs) == plan_of(match, costs, both=False)


def test_the_part_that_is_loaded_has_to_arrive_before_the_deadline() -> None:
    match, costs = match_of("s" * 40), costs_of(1.0)
    assert plan_of(match, costs, deadline_s=40.5).from_both_ends
    assert plan_of(match, costs, deadline_s=40.5).load_s == pytest.approx(20)
    assert not plan_of(match, costs, deadline_s=1.5).from_both_ends


def test_a_first_read_from_storage_is_made_from_the_end() -> None:
    plan = plan_of(match_of("s" * 40), costs_of(0.0))
    assert plan.from_both_ends
    assert plan.num_claimed_blocks == 0


@given(
    st.text("dhs", max_size=24),
    st.sampled_from([0.0, 0.01, 0.3, 1.0, 3.0, 100.0]),
    st.sampled_from([0.0, 2.0]),
)
def test_it_is_never_slower_and_copies_each_block_once(
    tiers: str, disk_s: float, queued_s: float
) -> None:
    match, costs = match_of(tiers), costs_of(disk_s, queued_s=queued_s)
    alone, plan = plan_of(match, costs, both=False), plan_of(match, costs)
    if disk_s:
        assert plan.seconds <= alone.seconds
    assert plan.num_reused_blocks + plan.num_declined_blocks == (
        alone.num_reused_blocks + alone.num_declined_blocks
    )
    copied = sorted(block for copy in plan.copies for block in copy.blocks)
    assert copied == [at for at in range(plan.num_reused_blocks) if match.tiers[at] != DEVICE]
    assert all(match.tiers[block] == copy.src for copy in plan.copies for block in copy.blocks)


def test_a_chunk_is_computed_if_that_ends_before_the_load() -> None:
    assert is_computed_sooner(1.0, 1.5)
    assert not is_computed_sooner(1.5, 1.0)
    assert not is_computed_sooner(0.0, 1.0), "computing was not measured"
    assert not is_computed_sooner(1.0, 0.0), "the load was not measured"
