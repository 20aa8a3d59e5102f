"""The planner over several groups of layers, against brute force over all cuts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.types import DEVICE, DISK, HOST, BlockId, GroupMatch
from kvtier.plan import Copy, Costs, GroupCapacity, PrefillCost, Route, plan_groups
from tests.plan.test_plan import DISK_TO_HOST, HOST_TO_DEVICE, STORED, costs_of_any_kind

BLOCK_SIZE = 4
NAMES = {"d": DEVICE, "h": HOST, "s": DISK, "-": None}
ALL = None
"""Rule of a group of which a cut needs all blocks; the others are the number of the last ones."""

Rule = int | None
rules_of_models = st.lists(st.sampled_from([ALL, ALL, 0, 1, 2, 3]), min_size=1, max_size=3).filter(
    lambda rules: any(rule != 0 for rule in rules)
)
"""Rules of one to three groups. At least one needs blocks: a cut that needs none keeps none."""


def needed(rule: Rule, cut: int) -> set[int]:
    """Return the positions of the blocks that a cut needs."""
    return {at for at in range(cut) if rule is ALL or cut - at <= rule}


def match_of(rows: list[str], rules: list[Rule], arriving: str = "") -> GroupMatch:
    """One row per group, one letter per block: d, h, s for a tier, - for none.

    + in ``arriving`` where the first group's block is on its way.
    """
    num_blocks, groups = len(rows[0]), list(zip(rows, rules, strict=True))
    cuts = tuple(
        cut
        for cut in range(1, num_blocks + 1)
        if all(row[at] != "-" for row, rule in groups for at in needed(rule, cut))
    )
    flags = tuple(flag == "+" for flag in arriving.ljust(num_blocks))
    return GroupMatch(
        tuple(BlockId(100 + at) for at in range(num_blocks)),
        tuple(tuple(NAMES[letter] for letter in row) for row in rows),
        (flags,) + ((False,) * num_blocks,) * (len(rows) - 1),
        cuts,
        num_blocks,
    )


@dataclass
class Case:
    """A match, and what is known of its groups."""

    match: GroupMatch
    rooms: list[GroupCapacity]


@st.composite
def cases(draw: Any) -> Case:
    rules = draw(rules_of_models)
    num_blocks = draw(st.integers(0, 10))
    some = [draw(st.sampled_from(["d", "dddh", "ddhhs"])) for _ in rules]
    letters = [each if rule is ALL else each + "-" for each, rule in zip(some, rules, strict=True)]
    rows = [draw(st.text(letter, min_size=num_blocks, max_size=num_blocks)) for letter in letters]
    arriving = draw(st.text(" +", min_size=num_blocks, max_size=num_blocks))
    rooms = [
        GroupCapacity(
            draw(st.sampled_from([0, 10, 1000, 4000])),
            draw(st.integers(0, 12)),
            draw(st.none() | st.integers(0, 4)),
            rule,
        )
        for rule in rules
    ]
    return Case(match_of(rows, rules, arriving), rooms)


def cost_of_cut(case: Case, cut: int, costs: Costs) -> tuple[float, bool]:
    """Seconds to load what a cut needs, and whether there is room for it, written from scratch."""
    match, passing, num_bytes = case.match, set(), {HOST_TO_DEVICE: 0, DISK_TO_HOST: 0}
    fits = True
    for group, room in enumerate(case.rooms):
        coming = [at for at in needed(room.num_last, cut) if match.tiers[group][at] != DEVICE]
        copied = [at for at in coming if not match.in_flight[group][at]]
        staged = [at for at in copied if match.tiers[group][at] == DISK]
        limit = len(staged) if room.num_staging_slots is None else room.num_staging_slots
        fits &= len(copied) <= room.num_free_slots and len(staged) <= limit
        if coming:
            passing.add(HOST_TO_DEVICE)
        if any(match.tiers[group][at] == DISK for at in coming):
            passing.add(DISK_TO_HOST)
        num_bytes[HOST_TO_DEVICE] += len(copied) * room.bytes_per_block
        num_bytes[DISK_TO_HOST] += len(staged) * room.bytes_per_block
    each = (costs.queued_s.get(way, 0.0) + costs.copy_s(way, num_bytes[way]) for way in passing)
    return sum(each), fits


@settings(max_examples=10 * settings.default.max_examples)
@given(
    cases(),
    costs_of_any_kind,
    st.integers(1, 50),
    st.integers(1, 3),
    st.none() | st.sampled_from([0.001, 0.1, 10.0]),
)
def test_planner_picks_the_cheapest_of_the_possible_cuts(
    case: Case, costs: Costs, tokens: int, grain: int, deadline_s: float | None
) -> None:
    plan = plan_groups(
        case.match,
        costs,
        case.rooms,
        num_tokens=tokens,
        block_size=BLOCK_SIZE,
        grain_blocks=grain,
        deadline_s=deadline_s,
    )
    allowed = {0: costs.prefill_s(0, tokens)}
    for cut in case.match.cuts:
        load_s, fits = cost_of_cut(case, cut, costs)
        in_time = deadline_s is None or load_s <= deadline_s
        if cut * BLOCK_SIZE < tokens and cut % grain == 0 and fits and in_time:
            allowed[cut] = load_s + costs.prefill_s(cut * BLOCK_SIZE, tokens)
    chosen = plan.num_reused_blocks
    assert chosen in allowed, "a cut that is not allowed"
    assert plan.load_s + plan.recompute_s == pytest.approx(min(allowed.values()))
    assert not [cut for cut in allowed if cut > chosen and allowed[cut] < allowed[chosen] * 0.999]
    for group, room in enumerate(case.rooms):
        copies = [copy for copy in plan.copies if copy.group == group]
        copied = sorted(block for copy in copies for block in copy.blocks)
        tiers, in_flight = case.match.tiers[group], case.match.in_flight[group]
        assert copied == [
            100 + at
            for at in sorted(needed(room.num_last, chosen))
            if tiers[at] != DEVICE and not in_flight[at]
        ], f"group {group}: other blocks than the cut needs"
        assert all(tiers[block - 100] == copy.src for copy in copies for block in copy.blocks)
        assert all(copy.dst == DEVICE for copy in copies)
        assert all(list(copy.blocks) == sorted(copy.blocks) for copy in copies)


def test_a_window_costs_its_last_blocks_only() -> None:
    rules = [ALL, 2, 1]
    match = match_of(["ddddd", "--hhh", "d-d-h"], rules)
    assert match.cuts == (5,)
    rooms = [GroupCapacity(1000, 9, num_last=rule) for rule in rules]
    plan = plan_groups(match, STORED, rooms, num_tokens=99, block_size=BLOCK_SIZE)
    assert plan.copies == (
        Copy(HOST, DEVICE, (BlockId(103), BlockId(104)), 1),
        Copy(HOST, DEVICE, (BlockId(104),), 2),
    )
    assert "host -> device: 2 blocks of group 1" in str(plan)


def test_a_shorter_cut_is_taken_where_a_group_has_no_room_for_the_longer_one() -> None:
    """A longer one may fit again: what a window needs moves on."""
    rules = [ALL, 1]
    match = match_of(["dddd", "dhhd"], rules)
    for num_free, reused in ((1, 4), (0, 4)):
        rooms = [GroupCapacity(1000, 0), GroupCapacity(1000, num_free, num_last=rules[1])]
        plan = plan_groups(match, STORED, rooms, num_tokens=99, block_size=BLOCK_SIZE)
        assert plan.num_reused_blocks == reused
        assert plan.copies == ()
    rooms = [GroupCapacity(1000, 0), GroupCapacity(1000, 0, num_last=rules[1])]
    short = plan_groups(match, STORED, rooms, num_tokens=13, block_size=BLOCK_SIZE)
    assert short.num_reused_blocks == 1


@pytest.mark.parametrize("num_blocks", [2_000, 60_000])
def test_a_plan_weighs_few_cuts_of_long_runs(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of cuts that are looked at grows with the runs, not with the blocks."""
    rules = [ALL, 700, 1]
    some = (DEVICE,) * 500 + (DISK,) * (num_blocks // 3)
    tiers = tuple(some + (HOST,) * (num_blocks - len(some)) for _ in rules)
    flags = ((False,) * num_blocks,) * len(rules)
    blocks = tuple(map(BlockId, range(num_blocks)))
    match = GroupMatch(blocks, tiers, flags, range(1, num_blocks + 1), num_blocks)
    rooms = [GroupCapacity(1000, num_blocks, num_last=rule) for rule in rules]
    weighed: Any = []
    load_s = Costs.load_s
    monkeypatch.setattr(Costs, "load_s", lambda *given: weighed.append(given) or load_s(*given))
    rates = {HOST_TO_DEVICE: {4: 1e-6, 8: 1e-8}, DISK_TO_HOST: {6: 1e-7}}
    costs = Costs(rates, PrefillCost(1e-3), ways=STORED.ways, least_s={DISK_TO_HOST: 0.01})
    plan = plan_groups(match, costs, rooms, num_tokens=10**6, block_size=BLOCK_SIZE)
    found = [sum(len(copy.blocks) for copy in plan.copies if copy.group == at) for at in range(3)]
    assert found == [num_blocks - 500, 700, 1]
    assert len(weighed) <= 300


@settings(max_examples=2 * settings.default.max_examples)
@given(
    st.lists(st.tuples(st.sampled_from("dhs"), st.integers(1, 60)), max_size=5),
    costs_of_any_kind,
    st.dictionaries(st.sampled_from([HOST_TO_DEVICE, DISK_TO_HOST]), st.sampled_from([0.03, 9.0])),
    st.sampled_from([ALL, 7, 40]),
    st.integers(1, 300),
    st.integers(1, 5),
    st.sampled_from([0, 37, 90, 1000]),
    st.none() | st.sampled_from([0.05, 1.0, 60.0]),
)
def test_no_cut_of_long_runs_is_cheaper_than_the_one_that_is_found(
    runs: list[tuple[str, int]],
    costs: Costs,
    least_s: dict[Route, float],
    rule: Rule,
    num_most: int,
    grain: int,
    num_free: int,
    deadline_s: float | None,
) -> None:
    row = "".join(letter * num for letter, num in runs)
    rules = [ALL, rule]
    match = match_of([row, row[::-1] if rule is ALL else row], rules)
    rooms = [GroupCapacity(1000, num_free, 50, ALL), GroupCapacity(300, 80, None, rule)]
    case, tokens = Case(match, rooms), num_most * BLOCK_SIZE
    costs = replace(costs, least_s=least_s)
    plan = plan_groups(
        match,
        costs,
        rooms,
        num_tokens=tokens,
        block_size=BLOCK_SIZE,
        grain_blocks=grain,
        deadline_s=deadline_s,
    )
    allowed = {0: costs.prefill_s(0, tokens)}
    for cut in range(grain, min(len(row), num_most - 1) + 1, grain):
        load_s, fits = cost_of_cut(case, cut, costs)
        if fits and (deadline_s is None or load_s <= deadline_s):
            allowed[cut] = load_s + costs.prefill_s(cut * BLOCK_SIZE, tokens)
    assert plan.num_reused_blocks in allowed, "a cut that is not allowed"
    assert plan.load_s + plan.recompute_s == pytest.approx(min(allowed.values()))
