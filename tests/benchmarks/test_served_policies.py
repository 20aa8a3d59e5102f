"""Part of a trace as prompts, and the comparison of two policies."""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.policies.served import Measurement, hits_by_tier, written_to_disk
from benchmarks.policies.trace_prompts import Prompts, part_of
from benchmarks.policies.traces import Trace


def trace() -> Trace:
    """A hundred conversations of two turns, which share a system prompt of two blocks."""
    rng = np.random.default_rng(1)
    chains = []
    for _ in range(100):
        own = rng.integers(1 << 32, 1 << 62, 6, dtype=np.uint64)
        first = np.concatenate([np.array([1, 2], np.uint64), own[:3]])
        chains += [first, np.concatenate([first, own[3:]])]
    return Trace("made", list(range(len(chains))), chains)


def test_a_part_has_whole_conversations() -> None:
    part = part_of(trace(), 0.3, most_blocks=8, block_tokens=4)
    assert 20 <= len(part.chains) <= 100
    assert len(part.chains) % 2 == 0
    for first, second in zip(part.chains[::2], part.chains[1::2], strict=True):
        assert (first == second[:5]).all()


def test_long_prompts_are_left_out() -> None:
    part = part_of(trace(), 1.0, most_blocks=5, block_tokens=4)
    assert part.longest == 5
    assert len(part.chains) == 100


def test_equal_blocks_are_equal_tokens() -> None:
    part = part_of(trace(), 1.0, most_blocks=8, block_tokens=4)
    first, second, third = (part.tokens(number) for number in range(3))
    assert len(first) == 4 * 5 + 1
    assert second[:20] == first[:20]
    assert third[:8] == first[:8]
    assert third[8:20] != first[8:20]


def test_twice_as_fast_is_said_with_its_interval() -> None:
    one = Measurement(Prompts([], 4), argparse.Namespace(engine="kvtier", seed=1))
    lru = [100.0 + number % 7 for number in range(500)]
    one.ttft_ms = {"lru": lru, "runs": [each / 2 for each in lru]}
    found = one.compared()
    assert found.mean[1] <= found.mean[0] <= found.mean[2]
    assert abs(found.mean[0] - 0.5) < 1e-9
    assert abs(found.p90[0] - 0.5) < 1e-9


def test_hits_and_writes_of_both_engines() -> None:
    text = 'kvtier_hit_blocks_total{tier="host"} 7.0\nkvtier_hit_blocks_total{tier="disk"} 2.0\n'
    text += 'kvtier_copied_bytes_total{dst="disk",src="host"} 9.0\n'
    assert hits_by_tier(text, "kvtier") == {"host": 7.0, "disk": 2.0}
    assert written_to_disk(text, "kvtier") == 9.0
    text = 'vllm:kvtier_loaded_chunks_total{engine="0",tier="host"} 7.0\n'
    text += 'vllm:kvtier_moved_bytes_total{engine="0",src="host",dst="disk"} 9.0\n'
    assert hits_by_tier(text, "vllm") == {"host": 7.0}
    assert written_to_disk(text, "vllm") == 9.0
