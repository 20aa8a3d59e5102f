"""Load or recompute, and how long to wait."""

from __future__ import annotations

import pytest

from kvtier.connectors.vllm.judge import MAX_CUTS, MAX_PATIENCE_S, TO_DEVICE, TO_HOST, Judge
from kvtier.types import DEVICE, DISK, HOST, LoadPolicy

MIB = 1 << 20
PREFILL_S = 0.01
"""Per chunk of 100 tokens."""


def _judge(
    policy: LoadPolicy = LoadPolicy.AUTO, disk_s: float = 0.0, host_s: float = 1e-4
) -> Judge:
    """host_s, disk_s: per chunk. 0: never measured."""
    judge = Judge(policy, 100, MIB)
    for end in range(1, 20):
        step = judge.begin_step(float(end), [(0, 1000)])
        assert step is not None
        judge.end_step(step, end + 10 * PREFILL_S)
    judge.costs.observe_copy(TO_DEVICE, 10 * MIB, 10 * host_s)
    judge.costs.observe_copy(TO_HOST, 10 * MIB, 10 * disk_s)
    return judge


def test_chunks_of_a_disk_slower_than_computing_are_computed() -> None:
    tiers = [HOST] * 3 + [DISK] * 5
    assert _judge(disk_s=0.5 * PREFILL_S).num_worth_loading(tiers, 850, 99) == 8
    assert _judge(disk_s=2 * PREFILL_S).num_worth_loading(tiers, 850, 99) == 3


def test_disk_that_was_never_measured_is_tried() -> None:
    assert _judge().num_worth_loading([DISK] * 5, 550, 99) == 5


def test_what_stands_in_line_at_the_disk_counts() -> None:
    judge = _judge(disk_s=0.5 * PREFILL_S)
    assert judge.num_worth_loading([DISK] * 4, 450, 99, queued_bytes=2 * MIB) == 4
    assert judge.num_worth_loading([DISK] * 4, 450, 99, queued_bytes=20 * MIB) == 0


def test_no_more_is_loaded_than_passes_through_host_memory() -> None:
    assert _judge(disk_s=1e-4).num_worth_loading([DEVICE, HOST] + [DISK] * 4, 650, 2) == 4


def test_thousands_of_chunks_are_cut_in_few_places() -> None:
    tiers = [HOST] * 3000 + [DISK] * 3000
    num = _judge(disk_s=1000 * PREFILL_S).num_worth_loading(tiers, 600_050, 9999)
    assert 3000 - 6000 / MAX_CUTS <= num <= 3000
    assert _judge(disk_s=1e-6).num_worth_loading(tiers, 600_050, 9999) == 6000


def test_copies_to_the_device_are_learnt_together() -> None:
    judge = _judge(host_s=0.0)
    judge.observe_loads([2 * MIB, 8 * MIB], 1000 * PREFILL_S)
    assert judge.num_worth_loading([HOST] * 8, 850, 99) == 0
    for nothing in ([], [0]):
        judge.observe_loads(nothing, 0.0)


def test_groups_are_loaded_together_or_not_at_all() -> None:
    judge = _judge(disk_s=2 * PREFILL_S)
    assert judge.is_worth_loading({HOST: 8}, 0, 800)
    assert not judge.is_worth_loading({HOST: 4, DISK: 8}, 0, 800)
    always = _judge(LoadPolicy.ALWAYS, disk_s=2 * PREFILL_S)
    assert always.is_worth_loading({HOST: 4, DISK: 8}, 0, 800)
    assert always.num_worth_loading([DISK] * 8, 850, 1) == 8


def test_nobody_waits_longer_than_computing_takes() -> None:
    assert _judge().patience_s(200, 700) == pytest.approx(5 * PREFILL_S, rel=0.01)
    assert Judge(LoadPolicy.AUTO, 100, MIB).patience_s(0, 100) == MAX_PATIENCE_S


def test_overlapping_steps_are_told_apart() -> None:
    judge = Judge(LoadPolicy.AUTO, 100, MIB)
    first, second = judge.begin_step(0.0, [(0, 100)]), judge.begin_step(0.0, [(100, 100)])
    assert (first, second) == (1, 2)
    judge.end_step(1, 1.0)
    judge.end_step(2, 2.0)
    assert judge.patience_s(0, 200) == pytest.approx(2.0, rel=0.05)


def test_steps_without_prompts_say_nothing() -> None:
    judge = Judge(LoadPolicy.AUTO, 100, MIB)
    assert judge.begin_step(0.0, []) is None
    assert judge.begin_step(0.0, [(500, 8)]) is None
