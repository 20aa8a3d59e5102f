"""Load or recompute, and how long to wait, for engines that look up before they have a slot."""

from __future__ import annotations

import pytest

from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.plan import CostModel, StepClock
from kvtier.plan.cost import Costs, ways_of
from kvtier.plan.worth import (
    MAX_CUTS,
    MAX_PATIENCE_S,
    is_worth_loading,
    num_worth_loading,
    patience_s,
)

MIB = 1 << 20
PREFILL_S = 0.01
"""Per block of 100 tokens."""
TO_DEVICE = (HOST, DEVICE)
TO_HOST = (DISK, HOST)
WAYS = ways_of([DEVICE, HOST], [DISK], ())


def _costs(disk_s: float = 0.0, host_s: float = 1e-4, queued_bytes: int = 0) -> Costs:
    """host_s, disk_s: per block. 0: never measured."""
    model = CostModel()
    clock = StepClock(model.observe_prefill)
    for end in range(1, 20):
        step = clock.begin(float(end), [(0, 1000)])
        assert step is not None
        clock.end(step, end + 10 * PREFILL_S)
    model.observe_copy(TO_DEVICE, 10 * MIB, 10 * host_s)
    model.observe_copy(TO_HOST, 10 * MIB, 10 * disk_s)
    queued_s = {TO_HOST: model.snapshot().copy_s(TO_HOST, queued_bytes)}
    return model.snapshot(queued_s, WAYS)


def _num(costs: Costs, tiers: list[str], num_tokens: int, num_staging_slots: int = 99) -> int:
    return num_worth_loading(
        costs,
        tiers,
        num_tokens=num_tokens,
        block_size=100,
        bytes_per_block=MIB,
        num_staging_slots=num_staging_slots,
    )


def test_blocks_of_a_disk_slower_than_computing_are_computed() -> None:
    tiers = [HOST] * 3 + [DISK] * 5
    assert _num(_costs(disk_s=0.5 * PREFILL_S), tiers, 850) == 8
    assert _num(_costs(disk_s=2 * PREFILL_S), tiers, 850) == 3


def test_disk_that_was_never_measured_is_tried() -> None:
    assert _num(_costs(), [DISK] * 5, 550) == 5


def test_what_stands_in_line_at_the_disk_counts() -> None:
    half = 0.5 * PREFILL_S
    assert _num(_costs(disk_s=half, queued_bytes=2 * MIB), [DISK] * 4, 450) == 4
    assert _num(_costs(disk_s=half, queued_bytes=20 * MIB), [DISK] * 4, 450) == 0


def test_no_more_is_loaded_than_passes_through_host_memory() -> None:
    tiers = [DEVICE, HOST] + [DISK] * 4
    assert _num(_costs(disk_s=1e-4), tiers, 650, num_staging_slots=2) == 4


def test_thousands_of_blocks_are_cut_in_few_places() -> None:
    tiers = [HOST] * 3000 + [DISK] * 3000
    num = _num(_costs(disk_s=1000 * PREFILL_S), tiers, 600_050, 9999)
    assert 3000 - 6000 / MAX_CUTS <= num <= 3000
    assert _num(_costs(disk_s=1e-6), tiers, 600_050, 9999) == 6000


def test_groups_are_loaded_together_or_not_at_all() -> None:
    costs = _costs(disk_s=2 * PREFILL_S)
    assert is_worth_loading(costs, {HOST: 8 * MIB}, 0, 800)
    assert not is_worth_loading(costs, {HOST: 4 * MIB, DISK: 8 * MIB}, 0, 800)


def test_nobody_waits_longer_than_computing_takes() -> None:
    assert patience_s(_costs(), 200, 700) == pytest.approx(5 * PREFILL_S, rel=0.01)
    assert patience_s(Costs(), 0, 100) == MAX_PATIENCE_S


def test_overlapping_steps_are_told_apart() -> None:
    model = CostModel()
    clock = StepClock(model.observe_prefill)
    assert (clock.begin(0.0, [(0, 100)]), clock.begin(0.0, [(100, 100)])) == (1, 2)
    clock.end(1, 1.0)
    clock.end(2, 2.0)
    assert patience_s(model.snapshot(), 0, 200) == pytest.approx(2.0, rel=0.05)


def test_steps_without_prompts_say_nothing() -> None:
    clock = StepClock(CostModel().observe_prefill)
    assert clock.begin(0.0, []) is None
    assert clock.begin(0.0, [(500, 8)]) is None
