"""A real vLLM on the CPU with kvtier's own front, from 0.18 on. It needs no ``v1/kv_offload``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm.engines import (
    BLOCK,
    Answer,
    are_close,
    count,
    engine,
    one_by_one,
    own_connector,
    prompt,
    reset,
    run,
)

SIZES: dict[str, object] = {"host_capacity": "256MiB", "disk_capacity": "256MiB"}
BLOCK_BYTES = 5 * 2 * 2 * 64 * 4 * BLOCK
"""Bytes of a block of the built-in model: layers, keys and values, KV heads, head size, float32."""


@pytest.mark.timeout(900)
def test_kv_comes_from_host_and_after_a_restart_from_disk(tmp_path: Path) -> None:
    prompts = [prompt(seed, 3 * BLOCK + 50) for seed in range(2)]
    config = own_connector(disk_path=str(tmp_path), **SIZES)
    with engine(config) as llm:
        assert [cached for cached, _ in one_by_one(llm, prompts)] == [0, 0]
        on_device = one_by_one(llm, prompts)
        assert [cached for cached, _ in on_device] == [3 * BLOCK] * 2
        assert llm.reset_prefix_cache()
        assert one_by_one(llm, prompts) == on_device, "from host memory"
        other = prompt(77, 2 * BLOCK + 50)
        run(llm, other)
        assert llm.reset_prefix_cache(reset_connector=True)
        for expected in (0, 2 * BLOCK):
            assert run(llm, other)[0][0] == expected, "an emptied cache is empty, and fills again"
            assert llm.reset_prefix_cache()
    with engine(config) as llm:
        assert run(llm, other)[0][0] == 0, "nothing is known that was stored before the reset"
        first = one_by_one(llm, prompts)
        assert [cached for cached, _ in first] == [0, 0]

    with engine(config) as llm:
        assert one_by_one(llm, prompts) == on_device, "from disk"
        assert count("vllm:kvtier_loaded_chunks_total", tier="disk") >= 6


@pytest.mark.timeout(900)
def test_prompts_beyond_the_pool_come_back_from_the_host() -> None:
    prompts = [prompt(1000 + seed, 5 * BLOCK + 120) for seed in range(6)]
    with engine(
        own_connector(host_capacity="256MiB"), num_gpu_blocks_override=20, max_model_len=2048
    ) as llm:
        alone = one_by_one(llm, prompts)
        assert llm.reset_prefix_cache()
        again = one_by_one(llm, prompts)
        assert [cached for cached, _ in again] == [5 * BLOCK] * 6, "36 blocks in a pool of 20"
        together = run(llm, *prompts)
        for (_, before), (_, after) in zip(alone, together, strict=True):
            assert list(before[0]) == list(after[0])


@pytest.mark.timeout(900)
def test_requests_preempted_while_they_are_stored_answer_as_if_alone() -> None:
    """Their pages pass to other requests while the copies still read them."""
    prompts = [prompt(3000 + seed, 3 * BLOCK - 3) for seed in range(4)]
    num_slots = 12
    config = own_connector(host_capacity=num_slots * BLOCK_BYTES, eviction_policy="lru")
    config |= {
        "kv_connector": "SlowConnector",
        "kv_connector_module_path": "tests.engines.vllm.faulty_connector",
    }
    with engine(config, num_gpu_blocks_override=13, max_model_len=4 * BLOCK) as llm:
        cold = one_by_one(llm, prompts)
        assert [cached for cached, _ in cold] == [0] * 4
        alone = _answers(cold)
        reset(llm, reset_connector=True)
        before = count("vllm:num_preemptions_total")
        together = run(llm, *prompts)
        assert count("vllm:num_preemptions_total") > before
        assert count("vllm:kvtier_chunks", tier="host") == num_slots
        assert all(are_close(*each) for each in zip(_answers(together), alone, strict=True))
        reset(llm)
        again = one_by_one(llm, prompts)
        assert all(are_close(*each) for each in zip(_answers(again), alone, strict=True))
        others = [prompt(3100 + seed, 2 * BLOCK + 50) for seed in range(num_slots // 2)]
        one_by_one(llm, others)
        reset(llm)
        found = [cached for cached, _ in one_by_one(llm, others)]
        assert found == [2 * BLOCK] * (num_slots // 2), "every slot has one of their blocks"


def _answers(found: list[tuple[int, Answer]]) -> list[Answer]:
    return [answer for _, answer in found]


@pytest.mark.timeout(900)
def test_failed_loads_are_computed() -> None:
    config = own_connector(host_capacity="256MiB")
    config |= {
        "kv_connector": "FaultyConnector",
        "kv_connector_module_path": "tests.engines.vllm.faulty_connector",
    }
    some = prompt(5, 3 * BLOCK + 50)
    with engine(config) as llm:
        ((_, cold),) = run(llm, some)
        assert llm.reset_prefix_cache()
        ((cached, answer),) = run(llm, some)
        assert list(answer[0]) == list(cold[0])
        assert llm.reset_prefix_cache()
        ((cached, answer),) = run(llm, some)
        assert (cached, list(answer[0])) == (3 * BLOCK, list(cold[0])), "stored again, and loaded"
