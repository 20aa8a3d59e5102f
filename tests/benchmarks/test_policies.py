"""The policy benchmark: what it reads from traces, and what it makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import policies, traces
from benchmarks.traces import Trace


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a file has, a line each."""
    given: list[object] = []
    monkeypatch.setattr(traces, "_lines", lambda _: map(json.dumps, given))
    return given


def test_requests_of_the_chat_service_come_in_order(lines: list[object]) -> None:
    lines += [
        {"timestamp": 2000, "hash_ids": [1, 2, 9]},
        {"timestamp": 500, "hash_ids": [1, 2]},
    ]
    trace = traces.conversation(Path())
    assert trace.times == [0.5, 2.0]
    assert [chain.tolist() for chain in trace.chains] == [[1, 2], [1, 2, 9]]
    assert (trace.num_refs, trace.num_unique) == (5, 3)


def session(name: str, *requests: tuple[float, object, int, list[int]]) -> dict[str, object]:
    """Of blocks of 64 tokens, eight of which are one; two of these are tools and system prompt."""
    rows = [[at, 0, 0, agent, keep, runs, 0, 0] for at, agent, keep, runs in requests]
    return {
        "id": name,
        "block_size": 64,
        "tool_tokens": 1000,
        "system_tokens": 24,
        "requests": rows,
    }


def test_sessions_share_their_tools_and_continue_themselves(lines: list[object]) -> None:
    lines += [
        session("a", (0.0, 0, 0, [0, 32]), (60.0, 0, 16, [100, 24]), (90.0, "sub", 0, [0, 16])),
        session("b", (0.0, 0, 0, [0, 32]), (5.0, 0, 32, [])),
        session("c", (0.0, 0, 0, [0, 7])),
    ]
    trace = traces.agentic(Path(), 3, 0.0, 1)
    assert trace.times == [0.0, 0.0, 5.0, 60.0, 90.0]
    first, second, again, longer, sub = [chain.tolist() for chain in trace.chains]
    assert first[:2] == second[:2] == again[:2] == longer[:2]
    assert len(set(first[2:]) | set(second[2:])) == 4
    assert again in (first, second)
    assert len(longer) == 5
    assert len(set(longer) - set(first) - set(second)) == 3
    assert not set(sub) & set(first[:2]), "a sub-agent has tools of its own"
    assert trace.name == "agentic, 3 sessions"


def row_of(monkeypatch: pytest.MonkeyPatch, policy: str) -> policies.Row:
    chains = [np.array(chain, np.uint64) for chain in ([0, 1, 2], [3, 4], [0, 1, 5], [3, 4])]
    trace = Trace("conversation", [0.0, 1.0, 2.0, 3.0], chains)
    monkeypatch.setattr(policies, "_replayed", [(trace, None)])
    return policies.measure(0, policy, 1.0)


@pytest.mark.parametrize("policy", policies.CONTESTANTS)
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
    judged = {str(each["column"]): (each["value"], each["met"]) for each in policies.targets(rows)}
    assert judged == {
        "conversation, 1 %": (11.0, True),
        "conversation, 2 %": (15.0, False),
        "below LRU, points": (0.2, True),
        "blocks per s": (3_000_000, True),
    }


def test_without_traces_it_says_so_and_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policies.main(["--traces", str(tmp_path / "nowhere")])
    assert "left out, no traces in" in capsys.readouterr().err
