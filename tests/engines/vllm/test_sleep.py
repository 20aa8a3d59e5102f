"""A real vLLM that sleeps or is paused keeps KV outside the device, unless its weights change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engines import BLOCK, engine, one_by_one, prompt, with_disk

PROMPTS = [prompt(1100 + seed, 6 * BLOCK + 50) for seed in range(2)]
LATER = [prompt(1200, 6 * BLOCK + 50)]


def _cached(llm: Any, prompts: list[Any]) -> list[int]:
    return [cached for cached, _ in one_by_one(llm, prompts)]


def _sleep(llm: Any, level: int) -> None:
    llm.sleep(level=level)
    llm.wake_up()


@pytest.mark.timeout(900)
def test_sleep_keeps_kv_until_weights_change(tmp_path: Path) -> None:
    with engine(with_disk(tmp_path)) as llm:
        cold = one_by_one(llm, PROMPTS)
        _sleep(llm, 1)
        found = one_by_one(llm, PROMPTS)
        assert [cached for cached, _ in found] == [6 * BLOCK] * 2
        assert [answer[0] for _, answer in found] == [answer[0] for _, answer in cold]
        assert _cached(llm, LATER) == [0]
        one_by_one(llm, LATER)  # steps, in which what is still in line is written
    with engine(with_disk(tmp_path)) as llm:
        assert _cached(llm, PROMPTS + LATER) == [6 * BLOCK] * 3, "from disk, after a restart"
        _sleep(llm, 1)
        llm.collective_rpc("reload_weights")
        assert _cached(llm, PROMPTS) == [0, 0], "other weights after a pause"
        _sleep(llm, 1)
        assert _cached(llm, PROMPTS) == [6 * BLOCK] * 2, "of the weights that are there now"
        llm.collective_rpc("reload_weights")
        _sleep(llm, 1)
        assert _cached(llm, PROMPTS) == [0, 0], "other weights before a pause"
        _sleep(llm, 1)
        assert _cached(llm, PROMPTS) == [6 * BLOCK] * 2
        _sleep(llm, 2)
        assert _cached(llm, PROMPTS) == [0, 0], "a sleep that gives its weights up"
        assert llm.reset_prefix_cache(reset_connector=True)
        assert _cached(llm, PROMPTS) == [0, 0], "a reset that somebody asks for"
