"""A burst of prompts over a disk of 0.5 MB/s: no request waits for the disk."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.serve.engine import Engine, SamplingParams
from tests.cache.tokens.harness import count

from .conftest import SMALL

pytestmark = pytest.mark.engine

NUM_PROMPTS, PROMPT_TOKENS = 60, 300
GREEDY = SamplingParams(max_tokens=2, ignore_eos=True)


def lose_the_device(engine: Engine) -> None:
    """Evict all blocks from the device once host memory has them; the disk does not yet."""
    for _ in range(1000):
        engine.call(lambda: engine.cache.clear(DEVICE))
        if not engine.call(lambda: engine.cache.used_slots()[DEVICE]):
            return
        time.sleep(0.01)
    raise AssertionError("stores to host memory hang")


@pytest.mark.slow
def test_burst_over_a_slow_disk_leaves_host_memory_to_others_and_nobody_waits(
    tmp_path: Path, text: str
) -> None:
    """Host memory fits nine of 60 prompts, of 0.4 MiB each; the disk would take 50 s."""
    cache = replace(
        SMALL.cache,
        host_capacity="4MiB",
        disk_path=str(tmp_path / "slab"),
        disk_capacity="128MiB",
        disk_bytes_per_s="500kB",
        load_policy=LoadPolicy.ALWAYS,
        eviction_policy="lru",  # a learned policy does not admit prompts that are never repeated
    )
    with Engine(replace(SMALL, cache=cache)) as engine:
        tokens = engine.tokenizer.encode(text)
        prompts = [tokens[PROMPT_TOKENS * n :][:PROMPT_TOKENS] for n in range(NUM_PROMPTS)]
        answers = [engine.submit(prompt, GREEDY) for prompt in prompts]
        assert [answer.result(120).error for answer in answers] == [""] * NUM_PROMPTS
        lose_the_device(engine)
        last = engine.submit(prompts[-1], GREEDY).result(120)
        assert last.hit_tokens == {HOST: 288}, "the burst's own blocks have no room in host memory"
        metrics = engine.call(lambda: engine.cache.metrics)
        assert count(metrics, "kvtier_refused_blocks_total", tier=HOST) == 0
        assert count(metrics, "kvtier_late_loads_total") == 0
        unwritten = count(metrics, "kvtier_unwritten_blocks_total", tier=DISK)
        assert unwritten > 0, "the disk keeps up: this test says nothing"
