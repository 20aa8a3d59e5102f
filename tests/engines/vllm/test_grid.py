"""A hit equals a miss, bit for bit, in a real vLLM with the setting ``grid``.

KVTIER_PROMPTS: how many prompts of about 3,500 tokens, in the test of all tiers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.connectors.vllm.shared.fronts import OFFLOADING
from kvtier.connectors.vllm.shared.grid import SCHEDULER
from tests.engines.vllm.engines import (
    BLOCK,
    Answer,
    Connects,
    are_close,
    connector,
    count,
    engine,
    loaded,
    one_by_one,
    prompt,
    run,
)
from tests.engines.vllm.shapes import SHAPES, options_of, save_random

CELL = 4 * BLOCK
NUM_CELLS = 6
"""Whole cells of a prompt behind which one more token is computed."""
NUM = int(os.environ.get("KVTIER_PROMPTS", "20"))
# One of them ends with a cell: its last one is computed again.
PROMPTS = [prompt(seed, 3584 - 9 * seed) for seed in range(NUM)]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def front(connects: Connects) -> Connects:
    if connects is connector and OFFLOADING.contract.differences():
        pytest.skip("this vLLM's OffloadingConnector is another one")
    return connects


@contextmanager
def on_grid(
    connects: Connects,
    cell: int = CELL,
    options: Mapping[str, Any] = {},
    **settings: object,
) -> Iterator[Any]:
    """Run a vLLM.

    Args:
        connects: configures its connector.
        cell: tokens of one; 0 for no grid.
        options: further ones of vLLM.
        settings: further ones of kvtier.
    """
    config = connects(host_capacity="512MiB", lookup_deadline_s=10, grid=cell, **settings)
    scheduler: dict[str, Any] = {"scheduler_cls": SCHEDULER} if cell else {}
    sizes: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 16}
    with engine(config, **sizes, **scheduler, **options) as llm:
        yield llm


def bits(found: list[tuple[int, Answer]], num_cached: int) -> list[Answer]:
    """Return the answers; each prompt must have had so many tokens in a cache."""
    assert [cached for cached, _ in found] == [num_cached] * len(found)
    return [answer for _, answer in found]


def wait_until_stored(llm: Any, tier: str) -> None:
    """Take steps until a tier has all whole cells."""
    for _ in range(300):
        one_by_one(llm, [prompt(1000, 3)])
        if count("vllm:kvtier_used_chunks", tier=tier) >= NUM_CELLS * NUM:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{tier} never had all blocks")


def test_hit_has_the_bits_of_a_miss(front: Connects) -> None:
    with on_grid(front) as llm:
        cold = bits(one_by_one(llm, PROMPTS[:2]), 0)
        assert bits(one_by_one(llm, PROMPTS[:2]), NUM_CELLS * CELL) == cold
        assert llm.reset_prefix_cache()
        before = loaded("host")
        assert bits(one_by_one(llm, PROMPTS[:2]), NUM_CELLS * CELL) == cold
        assert loaded("host") - before == 2 * NUM_CELLS


@pytest.mark.parametrize("shape", ["gemma3", "gpt-oss", "llama4"])
def test_hit_in_windows_has_the_bits_of_a_miss(front: Connects, shape: str, tmp_path: Path) -> None:
    """One prompt leaves another one inside a cell, so vLLM looks for a shorter hit."""
    save_random(SHAPES[shape], tmp_path / "model")
    options = {"model": tmp_path / "model", **options_of(shape)}
    first = PROMPTS[0]["prompt_token_ids"]
    turns = [PROMPTS[0], {"prompt_token_ids": first[: 3 * CELL - 70] + first[:500]}]
    with on_grid(front, options=options) as llm:
        cold = bits(one_by_one(llm, turns[:1]), 0)
        assert bits(one_by_one(llm, turns[:1]), NUM_CELLS * CELL) == cold
        left = bits(one_by_one(llm, turns[1:]), 2 * CELL)
        before = loaded("host")
        assert llm.reset_prefix_cache()
        assert bits(one_by_one(llm, turns[:1]), NUM_CELLS * CELL) == cold
        assert llm.reset_prefix_cache()
        ((cached, again),) = one_by_one(llm, turns[1:])
        # Pages of its third cell pass to others behind a window, maybe while they are stored.
        assert cached in (2 * CELL, 3 * CELL)
        assert [again] == left
        assert loaded("host") > before
    with on_grid(front, options=options) as llm:
        assert bits(one_by_one(llm, turns[1:]), 0) == left


def test_hit_without_a_grid_has_other_bits(front: Connects) -> None:
    with on_grid(front, cell=0) as llm:
        ((_, cold),) = one_by_one(llm, PROMPTS[1:2])
        ((cached, hit),) = one_by_one(llm, PROMPTS[1:2])
    assert cached > 0
    assert are_close(hit, cold)
    assert hit != cold


def test_next_turn_of_a_conversation_has_the_bits_of_a_miss(front: Connects) -> None:
    """An answer that crosses the end of a cell is computed again, as a part of the next prompt."""
    with on_grid(front, offload_prompt_only=False) as llm:
        first = prompt(7, CELL + CELL - 3)
        ((_, (answer, _)),) = one_by_one(llm, [first])
        more = prompt(8, 700)["prompt_token_ids"]
        turn = {"prompt_token_ids": [*first["prompt_token_ids"], *answer, *more]}
        hit = bits(one_by_one(llm, [turn]), CELL)
    with on_grid(front) as llm:
        assert bits(one_by_one(llm, [turn]), 0) == hit


def test_hits_from_all_tiers_have_the_bits_of_misses(
    front: Connects, tmp_path: Path, valkey: str
) -> None:
    disk: dict[str, Any] = {"disk_path": str(tmp_path / "slab"), "disk_capacity": "1GiB"}
    with on_grid(front, **disk, storage=valkey) as llm:
        cold, device = [], []
        for each in PROMPTS:
            cold += bits(one_by_one(llm, [each]), 0)
            device += bits(one_by_one(llm, [each]), NUM_CELLS * CELL)
        assert device == cold
        assert llm.reset_prefix_cache()
        assert bits(one_by_one(llm, PROMPTS), NUM_CELLS * CELL) == cold
        for tier in ("disk", "valkey"):
            wait_until_stored(llm, tier)
    store: dict[str, Any] = {"storage": valkey}
    for settings, tier in ((disk, "disk"), (store, "valkey")):
        with on_grid(front, **settings) as llm:
            before = loaded(tier)
            assert bits(one_by_one(llm, PROMPTS), NUM_CELLS * CELL) == cold, tier
            assert loaded(tier) - before == NUM * NUM_CELLS


def test_among_others_a_hit_is_a_miss_up_to_rounding(front: Connects) -> None:
    """vLLM on the CPU has no batch invariance, so equal bits are not promised."""
    others = [prompt(100 + number, 60 + 50 * number) for number in range(8)]
    with on_grid(front) as llm:
        cold = run(llm, PROMPTS[1], *others)[0]
        hit = run(llm, PROMPTS[1], *others)[0]
        assert (cold[0], hit[0]) == (0, NUM_CELLS * CELL)
        assert are_close(cold[1], hit[1])
