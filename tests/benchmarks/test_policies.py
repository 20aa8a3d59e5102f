"""The policy benchmark: what it reads from traces, and what it makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.policies import groups, hit_ratios, traces
from benchmarks.policies.tiers import BLOCK_BYTES, TierReplay
from benchmarks.policies.traces import Trace
from kvtier.cache.ladder.write_queues import LEAST_CHANCE
from kvtier.core.types import DISK
from kvtier.index.native_key_index import NativeKeyIndex
from tests.index.policies.traffic import Requests, scan_flood, tenants


def test_requests_of_the_chat_service_come_in_order(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    rows = [
        {"timestamp": at, "input_length": 1500, "output_length": 5, "hash_ids": ids}
        for at, ids in ((2000, [1, 2, 9]), (500, [1, 2, 3]))
    ]
    path = tmp_path / "mooncake" / "conversation_trace.jsonl.zst"  # packed or not, it is read
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = traces.conversation(tmp_path)
    assert trace.times == [0.0, 1.5]
    first, second = [chain.tolist() for chain in trace.chains]
    assert first[:2] == second[:2]
    assert (trace.num_refs, trace.num_unique) == (6, 4)


def test_sessions_count_in_larger_blocks(tmp_path: Path) -> None:
    (tmp_path / "agentic").mkdir()
    session = {
        "id": "a",
        "block_size": 64,
        "tool_tokens": 1000,
        "system_tokens": 24,
        "requests": [[0.0, 2048, 1, 0, 0, [0, 32], 0, 0], [9.0, 448, 1, "sub", 0, [0, 7], 0, 0]],
    }
    path = tmp_path / "agentic" / "agentic_sessions.jsonl.zst"
    path.write_text(json.dumps(session))
    trace = traces.agentic(tmp_path, None, 1.0, 1)
    assert [len(chain) for chain in trace.chains] == [4], "less than a block is no request"
    assert trace.name == "agentic, all sessions"


def test_folder_without_traces_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="can't be read"):
        traces.conversation(tmp_path)


def row_of(monkeypatch: pytest.MonkeyPatch, policy: str) -> hit_ratios.Row:
    chains = [np.array(chain, np.uint64) for chain in ([0, 1, 2], [3, 4], [0, 1, 5], [3, 4])]
    trace = Trace("conversation", [0.0, 1.0, 2.0, 3.0], chains)
    monkeypatch.setattr(hit_ratios, "_replayed", [(trace, None)])
    return hit_ratios.measure(0, policy, 1.0)


@pytest.mark.parametrize("policy", hit_ratios.CONTESTANTS)
def test_a_row_counts_hits_and_the_time_they_save(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    row = row_of(monkeypatch, policy)
    assert row.capacity_blocks == 6
    assert row.hit_ratio == 0.4
    assert row.stored == 0.6
    # Two prompts of three blocks, two of two; hits of two blocks, twice.
    two, three = 2 + 2 / 64, 3 + 4.5 / 64
    assert row.saved == pytest.approx(2 * two / (2 * three + 2 * two))


def test_targets_are_judged_by_column_and_against_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, lru = row_of(monkeypatch, "runs"), row_of(monkeypatch, "lru")
    rows = [
        replace(ours, share=0.01, hit_ratio=0.11, refs_per_s=5e6),
        replace(lru, share=0.01, hit_ratio=0.112),
        replace(ours, share=0.02, hit_ratio=0.15, refs_per_s=3e6),
    ]
    judged = {
        str(target["column"]): (target["value"], target["met"])
        for target in hit_ratios.targets(rows)
    }
    assert judged == {
        "conversation, 1 %": (11.0, True),
        "conversation, 2 %": (15.0, False),
        "below LRU, points": (0.2, True),
        "blocks per s": (3_000_000, True),
    }


def test_without_traces_it_says_so_and_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hit_ratios.main(["--traces", str(tmp_path / "nowhere")])
    assert "left out, no traces in" in capsys.readouterr().err


def replayed(
    trace: Trace, policy: str, host: int, disk: int, **more: Any
) -> tuple[TierReplay, int]:
    replay = TierReplay(policy, host, disk, **more)
    hits = sum(map(replay.request, trace.chains, trace.times))
    replay.check_invariants()
    return replay, hits


@pytest.mark.parametrize("policy", [hit_ratios.OURS, hit_ratios.LRU])
def test_of_two_tiers_it_counts_what_is_found_and_written(policy: str) -> None:
    prompts = [np.arange(at, at + 3, dtype=np.uint64) for at in (0, 10, 20)]
    trace = Trace("made", list(range(12)), [prompts[at % 3] for at in range(12)])
    replay, hits = replayed(trace, policy, 3, 9)
    assert hits == 27, "all but the first three requests"
    assert replay.num_from_host == 0, "it has room for one of three prompts"
    assert replay.num_stored == 9
    assert replay.num_in_host == 36


def some(make: Callable[[np.random.Generator], Requests], num_requests: int) -> Trace:
    times, chains = zip(*islice(make(np.random.default_rng(1)), num_requests), strict=True)
    return Trace(make.__name__, list(times), list(chains))


@pytest.mark.slow
def test_what_host_memory_does_not_want_comes_to_the_disk() -> None:
    """Host memory has room for five of twenty prompts that come back."""
    trace = some(scan_flood, 3000)
    _, hits = replayed(trace, hit_ratios.OURS, 100, 800)
    assert replayed(trace, hit_ratios.LRU, 100, 800)[1] == 0
    assert hits > 0.15 * trace.num_refs, "prompts that come back are a fifth"


@pytest.mark.slow
def test_the_disk_is_written_for_what_will_be_used() -> None:
    trace = some(tenants, 3000)
    ours, hits = replayed(trace, hit_ratios.OURS, 100, 800)
    lru, lru_hits = replayed(trace, hit_ratios.LRU, 100, 800)
    assert hits > lru_hits
    assert ours.num_stored < 0.75 * lru.num_stored


def lets_first_comers_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit under a write limit whatever a full disk without a limit admits."""
    admit = NativeKeyIndex.admit_keys

    def admit_keys(
        self: NativeKeyIndex, keys: Sequence[bytes], tier: str, free: int, _: float = 0.0
    ) -> Sequence[bytes]:
        is_full_disk = tier == DISK and len(keys) > free
        return admit(self, keys, tier, free, LEAST_CHANCE if is_full_disk else 0.0)

    monkeypatch.setattr(NativeKeyIndex, "admit_keys", admit_keys)


def half_written(trace: Trace, num_days: float) -> tuple[TierReplay, int, float]:
    """Replay with half the writes of a replay without a limit; the last value is the limit.

    num_days: days that the trace is stretched to, of which one hour's writes can be saved up.
    """
    first_s, last_s = trace.times[0], trace.times[-1]
    factor = num_days * 86_400 / (last_s - first_s)
    trace = replace(trace, times=[(at_s - first_s) * factor for at_s in trace.times])
    free, _ = replayed(trace, hit_ratios.OURS, 100, 400)
    limit = 0.5 * free.num_stored
    budget = int(limit / num_days * BLOCK_BYTES)
    replay, hits = replayed(trace, hit_ratios.OURS, 100, 400, bytes_per_day=budget)
    return replay, hits, limit


@pytest.mark.slow
def test_where_less_may_be_written_it_is_what_will_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = some(tenants, 1500)
    ours, hits, limit = half_written(trace, 1.0)
    lets_first_comers_write(monkeypatch)
    first_come, first_hits, _ = half_written(trace, 1.0)
    assert max(ours.num_stored, first_come.num_stored) <= limit * 25 / 24 + 100
    assert first_hits < hits


@pytest.mark.slow
def test_what_may_be_written_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget may be saved up for as long as the trace lasts."""
    trace = some(tenants, 1500)
    ours, _, _ = half_written(trace, 1 / 24)
    lets_first_comers_write(monkeypatch)
    first_come, _, _ = half_written(trace, 1 / 24)
    assert 0.85 * first_come.num_stored < ours.num_stored < first_come.num_stored


@pytest.mark.parametrize("policy", groups.POLICIES)
def test_a_hit_ends_where_every_group_has_what_it_needs(policy: str) -> None:
    """A cut is every 4,096 tokens, eight blocks of the trace."""
    prompt = np.arange(20, dtype=np.uint64)
    replay = groups.GroupReplay(groups.MODELS["states, windows of 128"], policy, 100)
    for now_s in (0.0, 1.0, 2.0):
        replay.request(prompt[: 20 if now_s else 12], now_s)
    replay.check_invariants()
    assert replay.num_hits == 4096 + 8192


@pytest.mark.parametrize("policy", groups.POLICIES)
def test_a_hit_in_pools_ends_where_the_side_pool_has_its_pages(policy: str) -> None:
    prompt = np.arange(20, dtype=np.uint64)
    replay = groups.PoolReplay(2, policy, 100)
    replay.request(prompt[:9], 0.0)
    replay.request(prompt, 1.0)
    replay.request(np.array([0, 1, 2, 3, 50, 51], np.uint64), 2.0)
    replay.check_invariants()
    assert replay.num_hits == 8 * 512, "it has no pages where the third prompt leaves the others"


@pytest.mark.parametrize("policy", groups.POLICIES)
@pytest.mark.parametrize("model", groups.ENGINES)
def test_a_hit_in_the_engine_ends_at_a_chunk_of_which_it_has_all(policy: str, model: str) -> None:
    prompt = np.arange(20, dtype=np.uint64)
    replay = groups.EngineReplay(groups.ENGINES[model], policy, 200)
    for now_s, num_blocks in enumerate((9, 20, 20)):  # the last block is not whole
        replay.request(prompt[:num_blocks], now_s)
    replay.check_invariants()
    assert replay.num_hits == (8 + 18) * 512


@pytest.mark.slow
@pytest.mark.parametrize("model", groups.ENGINES)
def test_the_engine_keeps_states_with_the_prompts_that_are_worth_it(model: str) -> None:
    trace, hits = some(tenants, 1000), []
    for policy in groups.POLICIES:
        replay = groups.EngineReplay(groups.ENGINES[model], policy, 300)
        for keys, now_s in zip(trace.chains, trace.times, strict=True):
            replay.request(keys, now_s)
        replay.check_invariants()
        hits.append(replay.num_hits)
    assert hits[0] > 1.05 * hits[1], "more than LRU"


def test_gains_are_judged_over_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace("made", [0.0, 1.0], [np.arange(8, dtype=np.uint64)] * 2)
    monkeypatch.setattr(groups, "_replayed", [trace])
    rows = groups.measure(0, "windows of 128", 1.0)
    assert [row.hit_ratio for row in rows] == [0.5, 0.5]
    rows += [replace(rows[0], hit_ratio=0.6), replace(rows[1], hit_ratio=0.602)]
    worst, mean = groups.targets(rows)
    assert (worst["value"], worst["met"], mean["met"]) == (0.2, True, False)
