"""The policy benchmark: what it reads from traces, and what it makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policies import hit_ratios, traces
from benchmarks.policies.host_and_disk import TIERS, WAYS, PairRow, measure_pair, pair_targets
from benchmarks.policies.traces import Trace
from benchmarks.policies.write_budget import (
    BUDGETED,
    FIRST_COME,
    BudgetRow,
    Limit,
    budget_tables,
    budget_targets,
    measure_budget,
)
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
        str(each["column"]): (each["value"], each["met"]) for each in hit_ratios.targets(rows)
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


@pytest.mark.parametrize("through", WAYS)
@pytest.mark.parametrize("policy", [hit_ratios.OURS, hit_ratios.LRU])
def test_of_two_tiers_it_counts_what_is_found_and_written(policy: str, through: str) -> None:
    prompts = [np.arange(at, at + 3, dtype=np.uint64) for at in (0, 10, 20)]
    trace = Trace("made", list(range(12)), [prompts[at % 3] for at in range(12)])
    row = measure_pair(trace, None, policy, through, (3 / 9, 1.0))
    assert row.hit_ratio == 0.75
    assert row.from_host == 0.0, "it has room for one of three prompts"
    assert row.to_disk == 0.25
    assert row.to_host == 1.0


def some(make: Callable[[np.random.Generator], Requests], num_requests: int) -> Trace:
    times, chains = zip(*islice(make(np.random.default_rng(1)), num_requests), strict=True)
    return Trace(make.__name__, list(times), list(chains))


def both_policies(trace: Trace) -> tuple[PairRow, PairRow]:
    shares = 100 / trace.num_unique, 800 / trace.num_unique
    ours, lru = (
        measure_pair(trace, None, name, TIERS, shares) for name in (hit_ratios.OURS, hit_ratios.LRU)
    )
    return ours, lru


@pytest.mark.slow
def test_what_host_memory_does_not_want_comes_to_the_disk() -> None:
    """Host memory has room for five of twenty prompts that come back."""
    trace = some(scan_flood, 3000)
    ours, lru = both_policies(trace)
    assert lru.hit_ratio == 0.0
    assert ours.hit_ratio > 0.15, "prompts that come back are a fifth"


@pytest.mark.slow
def test_the_disk_is_written_for_what_will_be_used() -> None:
    ours, lru = both_policies(some(tenants, 3000))
    assert ours.hit_ratio > lru.hit_ratio
    assert ours.to_disk < 0.75 * lru.to_disk


def test_a_pair_is_judged_against_lru_and_each_alone() -> None:
    alone = PairRow("made", None, WAYS[0], "runs", 0.01, 0.1, 0.3, 0.12, 0.2, 0.7)
    ours = replace(alone, through=TIERS, from_host=0.1, to_disk=0.5)
    lru = replace(ours, policy="lru", hit_ratio=0.28, to_disk=0.8)
    judged = {str(each["column"]): each["met"] for each in pair_targets([alone, ours, lru])}
    assert judged == {
        "made: hits, points above LRU": True,
        "made: from host, points below alone": False,
        "made: written, of LRU's": True,
    }


def with_budgets(trace: Trace, bucket: float) -> list[BudgetRow]:
    """Without a limit, and with half of what is written then, as the tiers are and first come."""
    shares = 100 / trace.num_unique, 400 / trace.num_unique
    free = measure_budget(trace, None, TIERS, shares)
    limit = Limit(0.5, bucket, free.num_written)
    return [free, *(measure_budget(trace, None, each, shares, limit) for each in BUDGETED)]


@pytest.mark.slow
def test_where_less_may_be_written_it_is_what_will_be_used() -> None:
    free, ours, first_come = rows = with_budgets(some(tenants, 1500), 1 / 24)
    most = 0.5 * (1 + 1 / 24) * free.num_written
    assert max(ours.num_written, first_come.num_written) <= most + 100
    assert first_come.through == FIRST_COME
    assert first_come.hit_ratio < ours.hit_ratio
    [judged] = budget_targets(rows)
    assert judged["met"]
    [table] = budget_tables(rows)
    assert table.row_count == 3


@pytest.mark.slow
def test_what_may_be_written_is() -> None:
    """A budget may be saved up for as long as the trace lasts."""
    _, ours, first_come = with_budgets(some(tenants, 1500), 1.0)
    assert 0.85 * first_come.num_written < ours.num_written < first_come.num_written
