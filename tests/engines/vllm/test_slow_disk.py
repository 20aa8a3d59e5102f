"""A disk of 8 MB/s below a real vLLM: a burst of prompts delays no request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm.engines import BLOCK, count, engine, one_by_one, prompt, run, with_disk

PROMPTS = [prompt(seed, 6 * BLOCK + 50) for seed in range(60)]


@pytest.mark.timeout(600)
def test_burst_over_a_slow_disk_leaves_host_memory_to_others_and_nobody_waits(
    tmp_path: Path,
) -> None:
    """Host memory has room for seven of 60 prompts, of 4.5 MiB each."""
    slow = {"host_capacity": "32MiB", "disk_capacity": "300MiB", "disk_bytes_per_s": "8MB"}
    names = "impatient_requests", "not_demoted_chunks"
    with engine(with_disk(tmp_path, **slow)) as llm:
        before = {name: count(f"vllm:kvtier_{name}_total") for name in names}
        loaded = count("vllm:kvtier_loaded_chunks_total", tier="host")
        cold = run(llm, *PROMPTS)
        assert llm.reset_prefix_cache()
        warm = one_by_one(llm, PROMPTS[-3:])
        assert [num for num, _ in warm] == [6 * BLOCK] * 3, "the burst's own end is not in memory"
        first = [answer[0][0] for _, answer in warm]
        assert first == [answer[0][0] for _, answer in cold[-3:]]
        assert count("vllm:kvtier_loaded_chunks_total", tier="host") - loaded == 18
        new = {name: count(f"vllm:kvtier_{name}_total") - before[name] for name in names}
    assert new["impatient_requests"] == 0, "somebody waited for the disk"
    assert new["not_demoted_chunks"] > 0, "the disk keeps up: this test says nothing"
