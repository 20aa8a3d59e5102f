"""Audits: which hits are chosen, how far KV is apart, what a difference is, and what follows."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtier.cache.audit import (
    CAP,
    FACTOR,
    MIN_LEARNED,
    AuditedPiece,
    Auditor,
    AuditOutcome,
    ComputedBlocks,
    Distances,
    Quarantine,
    Tolerance,
    likely_cause,
    stacked,
    token_distances,
)
from kvtier.core.config import check_share
from kvtier.core.errors import ConfigError
from kvtier.core.types import BlockId
from kvtier.observe import Metrics
from kvtier.observe.specs import AUDITS

NAME = b"n" * 32
EXACT = AuditedPiece("host", NAME, first=64, tolerance=0.0)
TOKENS, NUMBERS = 6, 32


def apart(value: float = 0.0, shape: tuple[int, int, int] = (3, 2, TOKENS)) -> Distances:
    return np.full(shape, value, np.float32)


def count(auditor: Auditor, tier: str, outcome: AuditOutcome) -> float:
    found = auditor._metrics.take_recent()
    return found.get((AUDITS, (tier, outcome)), 0.0)


# -- which hits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (1.0, 1000, 1000), (0.1, 70, 130)])
def test_the_share_of_hits_is_chosen(share: float, low: int, high: int) -> None:
    auditor = Auditor(share, Metrics(), random.Random(3))
    assert low <= sum(auditor.chooses() for _ in range(1000)) <= high


def test_each_piece_of_a_hit_has_the_same_probability() -> None:
    auditor = Auditor(1.0, Metrics(), random.Random(3))
    chosen = np.bincount([auditor.piece(5) for _ in range(5000)], minlength=5)
    assert chosen.min() > 900
    assert len(chosen) == 5


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "0.001", None, True])
def test_no_share_is_refused_in_one_sentence(share: object) -> None:
    with pytest.raises(ConfigError, match=r"^audit: .* is no share of hits; give a number from"):
        check_share(share)


# -- distances -------------------------------------------------------------------------------------


def numbers(dtype: str, seed: int = 0) -> Any:
    """Return random numbers, [TOKENS, NUMBERS], and their bytes, which share memory."""
    torch = pytest.importorskip("torch")
    made = np.random.default_rng(seed).standard_normal((TOKENS, NUMBERS)).astype(np.float32)
    tensor = torch.from_numpy(made).to(getattr(torch, dtype))
    return tensor, tensor.view(torch.uint8)


each_dtype = pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)


@pytest.mark.engine
@each_dtype
def test_unrelated_kv_is_far_beyond_the_cap_and_equal_kv_at_0(dtype: str) -> None:
    (ours, _), (theirs, _) = numbers(dtype), numbers(dtype, seed=1)
    assert token_distances(ours, ours.clone()) == [0.0] * TOKENS
    found = token_distances(ours, theirs)
    assert found == pytest.approx([np.sqrt(2)] * TOKENS, rel=0.35)
    assert min(found) > 3 * CAP


@pytest.mark.engine
@each_dtype
def test_a_last_token_that_is_missing_is_found(dtype: str) -> None:
    (ours, as_bytes), (theirs, _) = numbers(dtype), numbers(dtype)
    as_bytes[-1] = 0
    assert token_distances(ours, theirs) == [0.0] * (TOKENS - 1) + [1.0]


@pytest.mark.engine
@each_dtype
def test_the_lowest_bit_of_one_number_is_no_0(dtype: str) -> None:
    (ours, as_bytes), (theirs, _) = numbers(dtype), numbers(dtype)
    as_bytes[2, 0] ^= 1
    found = token_distances(ours.view(TOKENS, 4, -1), theirs.view(TOKENS, 4, -1))
    assert [at for at, distance in enumerate(found) if distance] == [2]
    assert found[2] < 0.2


@pytest.mark.engine
def test_tiny_numbers_whose_squares_are_0_differ() -> None:
    (ours, _), (theirs, _) = numbers("float32"), numbers("float32")
    assert token_distances(ours.fill_(0), theirs.fill_(1e-30))[0] > 0


@pytest.mark.engine
def test_what_is_no_number_is_infinitely_far() -> None:
    (ours, _), (theirs, _) = numbers("float32"), numbers("float32")
    ours[1, 3] = float("nan")
    assert token_distances(ours, theirs)[1] == float("inf")
    assert token_distances(ours, ours.clone()) == [0.0] * TOKENS, "it overflows every time"


def test_layers_may_have_different_numbers_of_parts() -> None:
    found = stacked([[[0.0, 0.5], [0.0, 0.0], [0.25, 0.0]], [[0.0, 0.0], [1.0, 0.0]]])
    assert found.tolist() == [
        [[0.0, 0.5], [0.0, 0.0], [0.25, 0.0]],
        [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]],
    ]


# -- tolerance -------------------------------------------------------------------------------------


def test_the_tolerance_is_learned_and_never_above_the_cap() -> None:
    tolerance = Tolerance()
    for _ in range(MIN_LEARNED - 1):
        tolerance.learn(0.001)
    assert tolerance.value == CAP, "too little was learned"
    tolerance.learn(0.002)
    assert tolerance.value == FACTOR * 0.002
    tolerance.learn(1.0)
    assert tolerance.value == CAP


def test_the_greatest_distance_counts_although_smaller_ones_follow() -> None:
    tolerance = Tolerance()
    for distance in (0.04, *[0.001] * MIN_LEARNED):
        tolerance.learn(distance)
    assert tolerance.value == pytest.approx(FACTOR * 0.04)


def test_an_engine_that_promises_equal_bits_is_held_to_them() -> None:
    tolerance = Tolerance()
    for _ in range(MIN_LEARNED):
        tolerance.learn(0.0)
    assert tolerance.value == 0.0


# -- outcomes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distance", "tolerance", "outcome"),
    [
        (0.0, 0.0, AuditOutcome.EQUAL),
        (1e-6, 0.0, AuditOutcome.DIFFERENT),
        (1e-6, 1e-3, AuditOutcome.WITHIN_TOLERANCE),
        (1e-2, 1e-3, AuditOutcome.DIFFERENT),
        (float("inf"), CAP, AuditOutcome.DIFFERENT),
    ],
)
def test_an_outcome_is_counted_by_tier(
    distance: float, tolerance: float, outcome: AuditOutcome
) -> None:
    auditor, distances = Auditor(1.0, Metrics()), apart()
    distances[1, 0, 2] = distance
    piece = AuditedPiece("disk", NAME, 0, tolerance)
    assert auditor.judge(distances, piece) is outcome
    assert count(auditor, "disk", outcome) == 1


def test_a_skipped_audit_is_counted() -> None:
    auditor = Auditor(1.0, Metrics())
    auditor.skip("host")
    assert count(auditor, "host", AuditOutcome.SKIPPED) == 1


def test_a_difference_is_one_log_line_with_the_facts(caplog: pytest.LogCaptureFixture) -> None:
    distances = apart()
    distances[2, 1, 4] = 0.5
    piece = AuditedPiece("host", NAME, 64, 0.0, age_s=12.3)
    with caplog.at_level(logging.WARNING):
        Auditor(1.0, Metrics()).judge(distances, piece)
        Auditor(1.0, Metrics()).judge(apart(), piece)
    (record,) = caplog.records
    line = record.getMessage()
    for part in (
        "tier=host",
        "age_s=12",
        "writer='this process'",
        f"namespace={NAME.hex()[:16]}",
        f"first_token=64 end_token={64 + TOKENS}",
        f"worst_token={64 + 4}",
        "layer=2",
        "distance=0.5",
        "attention",
    ):
        assert part in line


def test_the_pattern_of_a_difference_suggests_its_cause() -> None:
    def cause(distances: Distances, has_first_layer: bool = True) -> str:
        whole = AuditedPiece("host", NAME, 0, 1e-3, has_first_layer=has_first_layer)
        return likely_cause(distances, replace(whole, block_tokens=TOKENS // 2))

    missing = apart()
    missing[:, :, -1] = 1.0
    assert "1 of 6 tokens differ, and others of the same block do not" in cause(missing)
    attention = apart(0.1)
    attention[0] = 0.0
    assert "attention computes something else" in cause(attention)
    positions = apart(0.1)
    positions[0, 1] = 0.0
    assert "positions (RoPE)" in cause(positions)
    positions[0, 0, 0] = 0.0
    assert "positions (RoPE)" in cause(positions), "the first token has none to differ in"
    assert "other tokens" in cause(apart(1.4))
    swapped = apart(1.4)
    swapped[0, :, : TOKENS // 2] = 0.0
    assert "other tokens" in cause(swapped), "one of two blocks"
    assert "1 of 6 tokens" in cause(missing, has_first_layer=False)
    assert cause(apart(1.4), has_first_layer=False) == "unknown"


# -- provenance ------------------------------------------------------------------------------------


def test_the_age_of_blocks_that_this_process_computed_is_known() -> None:
    now = 0.0
    written = ComputedBlocks(lambda: now)
    written.note([BlockId(block) for block in (5, 6, 7)])
    now = 30.0
    written.note([BlockId(block) for block in (6, 7, 20)])
    now = 40.0
    ages = [written.age_s(BlockId(block)) for block in (4, 5, 7, 8, 20)]
    assert ages == [None, 40.0, 40.0, None, 10.0]


def test_what_is_remembered_of_blocks_is_bounded() -> None:
    now = 0.0
    written = ComputedBlocks(lambda: now)
    for block in range(2 * ComputedBlocks.MAX_RUNS):
        written.note([BlockId(2 * block)])
    assert len(written._runs) == ComputedBlocks.MAX_RUNS
    many = ComputedBlocks(lambda: now)
    for block in range(2 * ComputedBlocks.MAX_RUNS):
        many.note([BlockId(block)])
    assert len(many._runs) == 1, "neighbours of one moment"


# -- quarantine ------------------------------------------------------------------------------------


def test_after_one_difference_a_namespace_has_another_name_and_after_two_it_is_closed() -> None:
    quarantine, other = Quarantine(), b"o" * 32
    assert quarantine.names(NAME) == (NAME,)
    quarantine.add(NAME)
    before, renamed = quarantine.names(NAME)
    assert before == NAME != renamed
    assert len(renamed) == 32
    quarantine.add(NAME)
    assert [*quarantine.names(NAME)] == [NAME, renamed], "this KV was not used any more"
    assert not quarantine.is_closed(renamed)
    quarantine.add(renamed)
    closed = quarantine.names(NAME)[-1]
    assert quarantine.is_closed(closed)
    quarantine.add(closed)
    assert [*quarantine.names(NAME)] == [NAME, renamed, closed]
    assert quarantine.names(other) == (other,)
    assert not quarantine.is_closed(other)


def test_no_two_processes_use_the_same_name_after_a_difference() -> None:
    quarantines = Quarantine(), Quarantine()
    for quarantine in quarantines:
        quarantine.add(NAME)
    assert len({quarantine.names(NAME)[-1] for quarantine in quarantines}) == 2
