"""The planner against brute force, and the costs it plans with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.types import DEVICE, DISK, HOST, BlockId, Match
from kvtier.plan import (
    Copy,
    CostModel,
    Costs,
    Plan,
    PrefillCost,
    Route,
    num_to_probe,
    ways_of,
    weigh,
)
from kvtier.plan.average import SMOOTHING, size_class
from kvtier.plan.cost import TRIAL_S
from kvtier.plan.probe import MAX_PROBE_PAUSE_S, PROBE_S

BLOCK_SIZE = 4
BLOCK_BYTES = 1000
HOST_TO_DEVICE = (HOST, DEVICE)
DISK_TO_HOST, DISK_TO_DEVICE = (DISK, HOST), (DISK, DEVICE)


def _match(tiers: str, in_flight: str = "") -> Match:
    """One letter per block: d, h, s for device, host, disk; + where it is on its way."""
    names = {"d": DEVICE, "h": HOST, "s": DISK}
    flags = tuple(flag == "+" for flag in in_flight.ljust(len(tiers)))
    blocks = tuple(BlockId(number) for number in range(len(tiers)))
    return Match(blocks, tuple(names[tier] for tier in tiers), flags, len(tiers) + 1)


def _plan(match: Match, costs: Costs, **limits: float) -> Plan:
    settings = {"num_tokens": 1000, "num_free_slots": 1000, **limits}
    sizes = {"block_size": BLOCK_SIZE, "bytes_per_block": BLOCK_BYTES}
    return weigh(match, costs, **sizes, **settings).plan  # type: ignore[arg-type]


WAYS = ways_of((DEVICE, HOST), (DISK,), ())
STORED = Costs(ways=WAYS)
"""Nothing measured yet, three tiers."""


def _costs(host_s: float, prefill_s: float | None, queued_s: float = 0.0) -> Costs:
    """Seconds per block from the host, and per block of prefill."""
    prefill = None if prefill_s is None else PrefillCost(prefill_s / BLOCK_SIZE)
    rates = {HOST_TO_DEVICE: {size_class(BLOCK_BYTES): host_s / BLOCK_BYTES}}
    return Costs(rates, prefill, {HOST_TO_DEVICE: queued_s}, ways=WAYS)


# -- against brute force ---------------------------------------------------------------------------

rates = st.dictionaries(st.integers(0, 12), st.sampled_from([1e-6, 1e-5, 1e-3, 1.0]), max_size=3)
costs_of_any_kind = st.builds(
    Costs,
    st.fixed_dictionaries({HOST_TO_DEVICE: rates, DISK_TO_HOST: rates}),
    st.none()
    | st.builds(
        PrefillCost, st.sampled_from([1e-6, 1e-4, 1e-2, 1.0]), st.sampled_from([0.0, 1e-4, 0.1])
    ),
    st.dictionaries(
        st.sampled_from([HOST_TO_DEVICE, DISK_TO_HOST]), st.sampled_from([0.0, 0.01, 5.0])
    ),
    st.just(WAYS),
    trials=st.sampled_from([frozenset(), frozenset({HOST_TO_DEVICE})]),
    trial_bytes=st.integers(0, 4).map(BLOCK_BYTES.__mul__),
)
matches = st.lists(st.tuples(st.sampled_from("dhs"), st.sampled_from(" +")), max_size=12).map(
    lambda rows: _match("".join(row[0] for row in rows), "".join(row[1] for row in rows))
)


def _cost_of_cut(cut: int, match: Match, costs: Costs, num_tokens: int) -> tuple[float, float, int]:
    """Load and prefill seconds, and slots, of reusing ``cut`` blocks, written from scratch."""
    coming = [at for at in range(cut) if match.tiers[at] != DEVICE]
    from_disk = [at for at in coming if match.tiers[at] == DISK]
    load_s, num_slots = 0.0, sum(not match.in_flight[at] for at in coming)
    for route, passing in ((DISK_TO_HOST, from_disk), (HOST_TO_DEVICE, coming)):
        if passing:
            copied = sum(not match.in_flight[at] for at in passing)
            load_s += costs.queued_s.get(route, 0.0)
            load_s += costs.copy_s(route, copied * BLOCK_BYTES)
    return load_s, costs.prefill_s(cut * BLOCK_SIZE, num_tokens), num_slots


@settings(max_examples=10 * settings.default.max_examples)
@given(
    matches,
    costs_of_any_kind,
    st.integers(1, 60),
    st.integers(0, 12),
    st.integers(1, 4),
    st.none() | st.sampled_from([0.001, 0.1, 10.0]),
)
def test_planner_picks_the_cheapest_cut(
    match: Match, costs: Costs, tokens: int, slots: int, grain: int, deadline_s: float | None
) -> None:
    decision = weigh(
        match,
        costs,
        num_tokens=tokens,
        block_size=BLOCK_SIZE,
        bytes_per_block=BLOCK_BYTES,
        num_free_slots=slots,
        grain_blocks=grain,
        deadline_s=deadline_s,
    )
    plan, costs = decision.plan, decision.costs
    allowed = {0: costs.prefill_s(0, tokens)}
    for cut in range(0, match.num_blocks + 1, grain):
        load_s, prefill_s, num_slots = _cost_of_cut(cut, match, costs, tokens)
        in_time = deadline_s is None or load_s <= deadline_s
        if cut * BLOCK_SIZE < tokens and num_slots <= slots and in_time:
            allowed[cut] = load_s + prefill_s
    chosen = plan.num_reused_blocks
    assert chosen in allowed, "a cut that is not allowed"
    assert plan.load_s + plan.recompute_s == pytest.approx(min(allowed.values()))
    assert plan.load_s + plan.recompute_s <= plan.all_recompute_s, "slower than without a cache"
    assert not [cut for cut in allowed if cut > chosen and allowed[cut] < allowed[chosen] * 0.999]
    copied = [block for copy in plan.copies for block in copy.blocks]
    assert sorted(copied) == [
        at for at in range(chosen) if match.tiers[at] != DEVICE and not match.in_flight[at]
    ]
    assert all(copy.dst == DEVICE and copy.blocks for copy in plan.copies)
    assert all(match.tiers[block] == copy.src for copy in plan.copies for block in copy.blocks)


# -- rules, one by one -----------------------------------------------------------------------------


def test_longer_cut_wins_where_two_cost_the_same() -> None:
    assert _plan(_match("hhhh"), _costs(host_s=1.0, prefill_s=1.0)).num_reused_blocks == 4


def test_what_is_on_the_device_is_always_reused() -> None:
    plan = _plan(_match("ddd"), _costs(host_s=9.0, prefill_s=1e-9))
    assert plan.num_reused_blocks == 3
    assert plan.copies == ()
    assert plan.load_s == 0


def test_without_measurements_everything_is_loaded() -> None:
    plan = _plan(_match("dhhs"), STORED)
    assert plan.num_reused_blocks == 4
    assert plan.copies == (
        Copy(HOST, DEVICE, (BlockId(1), BlockId(2))),
        Copy(DISK, DEVICE, (BlockId(3),)),
    )


def test_unknown_prefill_rate_means_load_even_where_loading_is_slow() -> None:
    assert _plan(_match("hh"), _costs(host_s=100.0, prefill_s=None)).num_reused_blocks == 2


def test_tier_slower_than_recomputing_is_left_alone() -> None:
    plan = _plan(_match("ddhh"), _costs(host_s=2.0, prefill_s=1.0))
    assert plan.num_reused_blocks == 2
    assert plan.copies == ()


def test_slow_tier_before_a_fast_one_may_be_worth_it() -> None:
    """One block from a slow tier gives five on the device their prefix back."""
    plan = _plan(_match("hddddd"), _costs(host_s=2.0, prefill_s=1.0))
    assert plan.num_reused_blocks == 6


def test_work_in_line_counts() -> None:
    assert _plan(_match("hh"), _costs(0.5, 1.0, queued_s=0.9)).num_reused_blocks == 2
    assert _plan(_match("hh"), _costs(0.5, 1.0, queued_s=1.1)).num_reused_blocks == 0


def test_reuse_ends_on_the_grain() -> None:
    assert _plan(_match("ddddd"), Costs(), grain_blocks=2).num_reused_blocks == 4
    assert _plan(_match("ddddd"), Costs(), grain_blocks=8).num_reused_blocks == 0


def test_one_token_is_left_to_compute() -> None:
    assert _plan(_match("dd"), Costs(), num_tokens=8).num_reused_blocks == 1
    assert _plan(_match("dd"), Costs(), num_tokens=9).num_reused_blocks == 2
    assert _plan(_match(""), Costs(), num_tokens=0).num_reused_blocks == 0


def test_reuse_ends_where_slots_do() -> None:
    assert _plan(_match("dhhhd"), STORED, num_free_slots=2).num_reused_blocks == 3


def test_reuse_ends_where_there_is_no_room_on_the_way() -> None:
    """Blocks from disk pass through host memory; those in host memory need no room."""
    match = _match("dhsssd")
    assert _plan(match, STORED, num_staging_slots=2).num_reused_blocks == 4
    assert _plan(match, STORED, num_staging_slots=3).num_reused_blocks == 6
    assert _plan(match, STORED).num_reused_blocks == 6
    assert _plan(_match("hhhh"), STORED, num_staging_slots=0).num_reused_blocks == 4


def test_load_that_would_miss_its_deadline_is_not_begun() -> None:
    plan = _plan(_match("dhhhh"), _costs(1.0, 10.0), deadline_s=2.5)
    assert plan.num_reused_blocks == 3
    assert plan.load_s == 2.0


def test_deadline_does_not_hide_a_longer_cut_that_is_faster() -> None:
    """Small copies pay for latency: two blocks may take less time than one."""
    one, two = size_class(BLOCK_BYTES), size_class(2 * BLOCK_BYTES)
    assert one != two
    costs = Costs({HOST_TO_DEVICE: {one: 1.0, two: 1e-6}}, PrefillCost(1.0), ways=WAYS)
    assert _plan(_match("hh"), costs, deadline_s=5.0).num_reused_blocks == 2


def test_blocks_in_flight_cost_no_bytes_and_no_slots() -> None:
    plan = _plan(_match("hhh", "++ "), _costs(1.0, 10.0), num_free_slots=1)
    assert plan.num_reused_blocks == 3
    assert plan.load_s == 1.0
    assert plan.copies == (Copy(HOST, DEVICE, (BlockId(2),)),)


def test_plan_says_what_it_does() -> None:
    text = str(_plan(_match("dh"), _costs(0.001, 1.0)))
    assert "reuse 2 blocks" in text
    assert "host -> device: 1 blocks" in text
    assert "nothing to copy" in str(Plan())


# -- costs -----------------------------------------------------------------------------------------


def test_first_observation_is_the_estimate_and_later_ones_move_it() -> None:
    model = CostModel()
    model.observe_copy(HOST_TO_DEVICE, 1000, 1.0)
    assert model.snapshot().copy_s(HOST_TO_DEVICE, 1000) == 1.0
    model.observe_copy(HOST_TO_DEVICE, 1000, 2.0)
    assert model.snapshot().copy_s(HOST_TO_DEVICE, 1000) == pytest.approx(1.5)
    model.observe_prefill(0, 10, 1.0)
    model.observe_prefill(0, 10, 2.0)
    assert model.snapshot().prefill_s(0, 10) == pytest.approx(1.5)


def test_newest_observation_keeps_its_weight_after_many() -> None:
    model = CostModel()
    for _ in range(100):
        model.observe_copy(HOST_TO_DEVICE, 1000, 1.0)
    model.observe_copy(HOST_TO_DEVICE, 1000, 2.0)
    assert model.snapshot().copy_s(HOST_TO_DEVICE, 1000) == pytest.approx(1 + SMOOTHING)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_estimate_stays_between_the_observations(seconds: list[float]) -> None:
    model = CostModel()
    for second in seconds:
        model.observe_copy(HOST_TO_DEVICE, 1000, second)
    estimate = model.snapshot().copy_s(HOST_TO_DEVICE, 1000)
    assert min(seconds) * 0.999 <= estimate <= max(seconds) * 1.001


def test_new_regime_is_learnt() -> None:
    model = CostModel()
    model.observe_copy(HOST_TO_DEVICE, 1000, 1.0)
    for _ in range(30):
        model.observe_copy(HOST_TO_DEVICE, 1000, 5.0)
    assert model.snapshot().copy_s(HOST_TO_DEVICE, 1000) == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize(("num_bytes", "number"), [(0, 0), (3, 0), (4, 1), (15, 1), (16, 2)])
def test_size_classes_are_powers_of_four(num_bytes: int, number: int) -> None:
    assert size_class(num_bytes) == number


@given(st.integers(0, 40))
def test_a_size_class_spans_a_factor_of_four(number: int) -> None:
    assert size_class(4**number) == size_class(4 ** (number + 1) - 1) == number


def test_unseen_class_borrows_from_the_nearest() -> None:
    costs = Costs({HOST_TO_DEVICE: {2: 0.5, 8: 0.125}})
    assert costs.copy_s(HOST_TO_DEVICE, 4**3) == 0.5 * 4**3
    assert costs.copy_s(HOST_TO_DEVICE, 4**7) == 0.125 * 4**7
    assert costs.copy_s(HOST_TO_DEVICE, 4**5) == 0.125 * 4**5, "the larger of two as near"


def test_what_is_not_known_costs_nothing_to_copy_and_everything_to_compute() -> None:
    assert Costs().copy_s(HOST_TO_DEVICE, 1 << 30) == 0


def test_a_copy_takes_what_its_tier_says_at_least() -> None:
    costs = Costs({HOST_TO_DEVICE: {5: 0.5}}, least_s={HOST_TO_DEVICE: 100.0})
    assert costs.copy_s(HOST_TO_DEVICE, 10) == 100.0
    assert costs.copy_s(HOST_TO_DEVICE, 1000) == 500.0
    assert costs.copy_s(HOST_TO_DEVICE, 0) == 0.0
    assert Costs(least_s={HOST_TO_DEVICE: 100.0}).copy_s(HOST_TO_DEVICE, 10) == 100.0
    assert Costs().prefill_s(0, 1) == inf
    assert Costs().prefill_s(7, 7) == 0
    assert _costs(1.0, 1.0).copy_s(HOST_TO_DEVICE, 0) == 0


def test_snapshot_does_not_change_later() -> None:
    model = CostModel()
    model.observe_copy(HOST_TO_DEVICE, 1000, 1.0)
    queued = {HOST_TO_DEVICE: 1.0}
    before = model.snapshot(queued)
    model.observe_copy(HOST_TO_DEVICE, 1000, 9.0)
    model.observe_prefill(0, 1, 1.0)
    queued.clear()
    assert before.copy_s(HOST_TO_DEVICE, 1000) == 1.0
    assert before.prefill_s(0, 1) == inf
    assert before.queued_s == {HOST_TO_DEVICE: 1.0}


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1.0), (1, 0.0), (-1, 1.0)])
def test_observations_of_nothing_are_ignored(amount: int, seconds: float) -> None:
    model = CostModel()
    model.observe_copy(HOST_TO_DEVICE, amount, seconds)
    model.observe_prefill(0, amount, seconds)
    assert model.snapshot() == Costs()


# -- the cost of prefill ---------------------------------------------------------------------------


def _seconds(num_before: int, num_tokens: int) -> float:
    """A machine as they are: 1 ms per call, 0.1 ms per token, 20 ns per pair."""
    return 1e-3 + 1e-4 * num_tokens + 2e-8 * num_tokens * (num_before + num_tokens / 2)


def _whole(chunk: int, num_tokens: int) -> float:
    return sum(_seconds(first, chunk) for first in range(0, num_tokens, chunk))


def test_ends_of_long_prompts_do_not_pass_for_whole_ones() -> None:
    """Over a warm cache nothing else is computed; three pieces were observed before."""
    model = CostModel()
    for first, num_tokens in ((0, 128), (0, 32), (4096, 128)):
        model.observe_prefill(first, num_tokens, _seconds(first, num_tokens))
    for _ in range(200):
        model.observe_prefill(3456, 44, _seconds(3456, 44))
    costs = model.snapshot()
    assert costs.prefill_s(0, 4096) == pytest.approx(_whole(128, 4096), rel=0.03)
    assert costs.prefill_s(0, 256) == pytest.approx(_whole(128, 256), rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 512)), min_size=1, max_size=40))
def test_prefill_is_estimated_from_whatever_was_seen(pieces: list[tuple[int, int]]) -> None:
    model = CostModel()
    for first, num_tokens in pieces:
        model.observe_prefill(first, num_tokens, _seconds(first, num_tokens))
    costs = model.snapshot()
    assert costs.prefill is not None
    assert costs.prefill.token_s >= 0
    assert costs.prefill.pair_s >= 0
    assert 0 < costs.prefill_s(0, 1000) < inf
    assert costs.prefill_s(0, 2000) >= costs.prefill_s(500, 2000) >= costs.prefill_s(500, 1500)


def test_a_slower_machine_is_noticed_wherever_prompts_are_computed() -> None:
    model = CostModel()
    for slowness in (1.0, 3.0):
        for _ in range(30):
            for first in range(0, 2048, 128):
                model.observe_prefill(first, 128, slowness * _seconds(first, 128))
    assert model.snapshot().prefill_s(0, 2048) == pytest.approx(3 * _whole(128, 2048), rel=0.03)


# -- doubt -----------------------------------------------------------------------------------------


def _model(route: Route, seconds: float, times: int, num_bytes: int = 1000) -> CostModel:
    model = CostModel()
    for _ in range(times):
        model.observe_copy(route, num_bytes, seconds)
    return model


@pytest.mark.parametrize("outlier_s", [1e-4, 100.0])
def test_one_outlier_moves_no_estimate_and_a_second_one_replaces_it(outlier_s: float) -> None:
    model = _model(DISK_TO_HOST, 1.0, 10)
    model.observe_copy(DISK_TO_HOST, 1000, outlier_s)
    assert model.snapshot().copy_s(DISK_TO_HOST, 1000) == pytest.approx(1.0)
    model.observe_copy(DISK_TO_HOST, 1000, outlier_s)
    assert model.snapshot().copy_s(DISK_TO_HOST, 1000) == pytest.approx(outlier_s)


def test_outliers_to_both_sides_move_no_estimate() -> None:
    model = _model(DISK_TO_HOST, 1.0, 10)
    for seconds in (100.0, 1e-4, 100.0, 1.0, 100.0):
        model.observe_copy(DISK_TO_HOST, 1000, seconds)
    assert model.snapshot().copy_s(DISK_TO_HOST, 1000) == pytest.approx(1.0)


def test_probes_renew_estimates_of_larger_copies_that_have_ceased() -> None:
    model = _model(DISK_TO_HOST, 100.0, 10, num_bytes=1_000_000)
    for _ in range(3):
        model.observe_copy(DISK_TO_HOST, 1000, 0.001)
    assert model.snapshot().copy_s(DISK_TO_HOST, 1_000_000) == pytest.approx(1.0)


def test_larger_copies_keep_their_own_estimate_while_they_are_made() -> None:
    model = CostModel()
    for _ in range(10):
        model.observe_copy(HOST_TO_DEVICE, 1_000_000, 2.0)
        model.observe_copy(HOST_TO_DEVICE, 1000, 0.001)
    assert model.snapshot().copy_s(HOST_TO_DEVICE, 1_000_000) == pytest.approx(2.0)


def test_memory_that_was_not_used_for_a_while_gets_a_trial_of_a_few_blocks() -> None:
    model = _model(HOST_TO_DEVICE, 100.0, 5)
    costs = partial(model.snapshot, witnesses={HOST_TO_DEVICE: None}, trial_bytes=1000)
    assert costs(now_s=TRIAL_S / 2).copy_s(HOST_TO_DEVICE, 1000) == pytest.approx(100.0)
    trial = costs(now_s=TRIAL_S)
    assert trial.copy_s(HOST_TO_DEVICE, 1000) == 0.0
    assert trial.copy_s(HOST_TO_DEVICE, 1001) == pytest.approx(100.1)
    assert trial.with_trials_of(5000).copy_s(HOST_TO_DEVICE, 5000) == 0.0


@pytest.mark.parametrize(
    ("probe_s", "is_tried"), [(None, False), (100.0, False), (1.0, True)], ids=str
)
def test_direct_reads_get_a_trial_once_a_probe_was_much_faster(
    probe_s: float | None, is_tried: bool
) -> None:
    model = _model(DISK_TO_DEVICE, 100.0, 5)
    if probe_s is not None:
        model.observe_copy(DISK_TO_HOST, 1000, probe_s, 1.0)
    costs = model.snapshot(witnesses={DISK_TO_DEVICE: DISK_TO_HOST}, trial_bytes=1000, now_s=9.0)
    assert (costs.copy_s(DISK_TO_DEVICE, 1000) == 0.0) == is_tried


def test_a_plan_tries_no_more_than_the_trial() -> None:
    costs = replace(
        _costs(1e-2, 1e-3),  # seconds per block to load, and to compute
        trials=frozenset({HOST_TO_DEVICE}),
        trial_bytes=2 * BLOCK_BYTES,
    )
    assert _plan(_match("h" * 10), costs).num_reused_blocks == 2


def test_one_step_of_a_stopped_engine_moves_no_estimate() -> None:
    model = CostModel()
    for _ in range(10):
        for first in range(0, 2048, 128):
            model.observe_prefill(first, 128, _seconds(first, 128))
    before = model.snapshot().prefill_s(0, 2048)
    model.observe_prefill(0, 128, 10.0)
    assert model.snapshot().prefill_s(0, 2048) == pytest.approx(before)


def test_a_first_step_with_one_time_costs_is_forgotten_at_the_second() -> None:
    model = CostModel()
    model.observe_prefill(0, 128, 50 * _seconds(0, 128))
    model.observe_prefill(0, 128, _seconds(0, 128))
    assert model.snapshot().prefill_s(0, 128) == pytest.approx(_seconds(0, 128))


def test_few_blocks_are_probed_and_not_all_the_time() -> None:
    assert num_to_probe(1000, 1 << 20, PROBE_S) == 4
    assert num_to_probe(3, 1 << 20, PROBE_S) == 3
    assert num_to_probe(1000, 1 << 30, PROBE_S) == 1
    assert num_to_probe(1000, 1 << 20, 0.9 * PROBE_S) == 0
    assert num_to_probe(1000, 1 << 20, PROBE_S, last_s=60.0) == 0, "the tier is slow"
    assert num_to_probe(1000, 1 << 20, MAX_PROBE_PAUSE_S, last_s=60.0) == 4


def test_the_faster_of_the_first_two_counts() -> None:
    for first_s, second_s in ((100.0, 1.0), (1.0, 100.0)):
        model = _model(DISK_TO_HOST, first_s, 1)
        model.observe_copy(DISK_TO_HOST, 1000, second_s)
        assert model.snapshot().copy_s(DISK_TO_HOST, 1000) == pytest.approx(1.0)
