"""The policy benchmark: what it reads from traces, and what it makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import policies, traces
from benchmarks.traces import Trace


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
