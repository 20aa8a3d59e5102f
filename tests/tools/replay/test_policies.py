"""Hits by capacity: known by hand, and compared with caches replayed block by block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.core.errors import ConfigError
from kvtier.core.hot import NATIVE, NATIVE_REASON
from kvtier.tools.replay import segments as segments_module
from kvtier.tools.replay.lru import find_distances
from kvtier.tools.replay.policies import ASKED, Optimum, Replayer, check_policies, usual_policies
from kvtier.tools.replay.segments import find_segments

from .oracle import Prompts, lru_hits, most_hits, trace_of

BY_HAND: Prompts = [[1, 2, 3], [1, 9], [1, 2, 3], [7], [1, 2, 3, 4], []]

native = pytest.mark.skipif(not NATIVE, reason=f"no native core: {NATIVE_REASON}")

prompts = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=14)
few_prompts = st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=1, max_size=5)


def test_segments_say_who_touched_a_block_last() -> None:
    found = find_segments(trace_of(BY_HAND))
    rows = np.stack([found.request, found.previous, found.first, found.length], axis=1)
    assert rows.tolist() == [
        [0, -1, 0, 3],  # all new
        [1, 0, 0, 1],  # the first block is the first request's
        [1, -1, 1, 1],
        [2, 1, 0, 1],  # touched by the second request meanwhile
        [2, 0, 1, 2],
        [3, -1, 0, 1],
        [4, 2, 0, 3],
        [4, -1, 3, 1],
    ]
    assert found.num_unique == 6


def test_keys_are_sorted_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of([[at % 7, at % 3, at % 5, at] for at in range(200)])
    whole = find_segments(trace)
    monkeypatch.setattr(segments_module, "_KEYS_AT_ONCE", 16)
    told: list[tuple[int, int]] = []
    parts = find_segments(trace, lambda done, of: told.append((done, of)))
    assert len(told) > 16
    assert told[-1][0] == told[-1][1]
    for name in ("request", "previous", "first", "length"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))


@pytest.mark.parametrize(
    ("capacity", "hits"),
    [
        (0, [0, 0, 0, 0, 0, 0]),
        (1, [0, 1, 1, 0, 0, 0]),  # of a longer prompt the first block stays
        (2, [0, 1, 1, 0, 1, 0]),
        (3, [0, 1, 2, 0, 2, 0]),
        (4, [0, 1, 3, 0, 3, 0]),
        (6, [0, 1, 3, 0, 3, 0]),
    ],
)
def test_lru_by_hand(capacity: int, hits: list[int]) -> None:
    found = find_distances(find_segments(trace_of(BY_HAND)))
    assert found.hits(capacity).tolist() == hits


@pytest.mark.parametrize(
    ("capacity", "hits"),
    [
        (0, [0, 0, 0, 0, 0, 0]),
        (1, [0, 1, 1, 0, 1, 0]),
        (2, [0, 1, 2, 0, 2, 0]),
        (3, [0, 1, 3, 0, 3, 0]),  # 9 and 7 are used once, and are not admitted
    ],
)
def test_optimum_by_hand(capacity: int, hits: list[int]) -> None:
    assert Optimum(find_segments(trace_of(BY_HAND))).hits(capacity).tolist() == hits


@given(prompts, st.integers(0, 12))
@example([[0, 0], [0, 1], [0, 0]], 2)
@example([[], [0], [], [0]], 1)
def test_lru_by_distance_is_lru(prompts: Prompts, capacity: int) -> None:
    trace = trace_of(prompts)
    if not trace.num_references:
        return
    segments = find_segments(trace)
    hits, stored = lru_hits(prompts, capacity)
    found = Replayer(trace, segments).hits("lru", capacity)
    assert found.found.tolist() == hits
    assert found.num_stored == stored


@settings(max_examples=30)
@given(few_prompts, st.integers(0, 3))
def test_optimum_is_what_no_cache_can_pass(prompts: Prompts, capacity: int) -> None:
    segments = find_segments(trace_of(prompts))
    assert Optimum(segments).hits(capacity).sum() == most_hits(prompts, capacity)


@given(prompts, st.integers(0, 12))
def test_optimum_is_never_below_lru_and_grows_with_the_size(
    prompts: Prompts, capacity: int
) -> None:
    trace = trace_of(prompts)
    segments = find_segments(trace)
    replayer = Replayer(trace, segments)
    best = replayer.hits("opt", capacity).found
    assert best.sum() >= replayer.hits("lru", capacity).found.sum()
    assert replayer.hits("opt", capacity + 1).found.sum() >= best.sum()
    assert replayer.hits("opt", 10_000).found.tolist() == segments.num_reused.tolist()


@native
@given(prompts, st.integers(1, 12))
def test_lru_asked_request_by_request_finds_the_same(prompts: Prompts, capacity: int) -> None:
    trace = trace_of(prompts)
    replayer = Replayer(trace, find_segments(trace))
    asked, known = replayer.asked("lru", capacity), replayer.hits("lru", capacity)
    assert asked.found.tolist() == known.found.tolist()
    assert asked.num_stored == known.num_stored


@native
@pytest.mark.parametrize("policy", ASKED)
def test_every_policy_finds_what_fits(policy: str) -> None:
    trace = trace_of(BY_HAND)
    told: list[tuple[int, int]] = []
    replayer = Replayer(trace, find_segments(trace), lambda done, of: told.append((done, of)))
    found = replayer.hits(policy, 6)
    assert found.found.tolist() == [0, 1, 3, 0, 3, 0]
    assert found.num_stored == 6
    assert told == [(0, len(BY_HAND))]
    assert not replayer.hits(policy, 0).found.any()


def test_without_the_core_no_policy_is_asked_unless_somebody_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.tools.replay.policies.NATIVE", True)
    assert usual_policies() == ("runs", "lru", "opt")
    monkeypatch.setattr("kvtier.tools.replay.policies.NATIVE", False)
    assert usual_policies() == ("lru", "opt")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("fifo",), "policies: 'fifo' is unknown; use some of lru"),
        (("opt",), "policies: name each once, and one that a cache can run"),
        (("lru", "lru"), "policies: name each once"),
    ],
)
def test_policies_that_cant_be_replayed_are_told(names: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_policies(names)
