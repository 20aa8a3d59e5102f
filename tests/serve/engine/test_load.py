"""Many requests at once over tiny tiers: no leaks, and the answers of an engine without cache."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvtier.core.types import DEVICE, WritePolicy
from kvtier.serve.engine import Completion, Engine, EngineConfig, SamplingParams

from .conftest import changed

pytestmark = pytest.mark.engine

Make = Callable[[EngineConfig], Engine]


def requests(tokens: list[int], count: int, seed: int) -> list[list[int]]:
    """Return prompts with shared beginnings, of 40 to 400 tokens."""
    rng = random.Random(seed)
    roots = [tokens[i * 900 : i * 900 + 500] for i in range(12)]
    prompts = []
    for _ in range(count):
        root = rng.choice(roots)
        tail = rng.randrange(len(tokens) - 60)
        prompts.append(root[: rng.randrange(20, 350)] + tokens[tail : tail + rng.randrange(20, 50)])
    return prompts


@pytest.fixture(scope="module")
def plain(text: str) -> list[tuple[list[int], Completion]]:
    """Return prompts, and their answers without a cache."""
    params = SamplingParams(max_tokens=4, keep_logits=True, ignore_eos=True)
    with Engine(changed(prefix_cache=False, host=0, max_running=16)) as engine:
        prompts = requests(engine.tokenizer.encode(text), 120, seed=7)
        handles = [engine.submit(prompt, params) for prompt in prompts]
        return [
            (prompt, handle.result(120)) for prompt, handle in zip(prompts, handles, strict=True)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_many_requests_leak_nothing_and_answer_as_without_cache(
    make: Make, plain: list[tuple[list[int], Completion]], policy: WritePolicy
) -> None:
    """16 in flight. The device holds a few prompts, the host tier fewer blocks than one prompt.

    Prefill runs alone and on the grid, so the first token's logits are equal to the last bit even
    under load. Later tokens are computed in batches that differ from run to run: they agree up to
    rounding.
    """
    engine = make(
        changed(
            device_capacity="1500KiB",
            host="300KiB",
            policy=policy,
            max_running=16,
            max_model_tokens=500,
        )
    )
    params = SamplingParams(max_tokens=4, keep_logits=True, ignore_eos=True)
    handles = [engine.submit(prompt, params) for prompt, _ in plain]
    num_cached = 0
    for handle, (_, theirs) in zip(handles, plain, strict=True):
        ours = handle.result(120)
        assert ours.finish_reason == "length", ours.error
        assert ours.logits is not None
        assert theirs.logits is not None
        assert np.array_equal(ours.logits[0], theirs.logits[0])
        if ours.token_ids[:-1] == theirs.token_ids[:-1]:
            np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
        num_cached += ours.num_cached_tokens
    assert num_cached > 0
    assert engine.drain()
    engine.call(engine.cache.check_invariants)
    engine.clear_tier(DEVICE)
    engine.call(engine.cache.check_invariants)
    used = engine.call(engine.cache.used_slots)
    assert used[DEVICE] == 0


@pytest.mark.slow
def test_aborted_requests_give_everything_back(make: Make, text: str) -> None:
    engine = make(changed(max_running=4))
    prompts = requests(engine.tokenizer.encode(text), 40, seed=3)
    handles = [engine.submit(prompt, SamplingParams(max_tokens=60)) for prompt in prompts]
    for handle in handles[::2]:
        handle.abort()
    reasons = {handle.result(60).finish_reason for handle in handles[::2]}
    assert reasons <= {"abort", "length", "stop"}
    for handle in handles[1::2]:
        assert handle.result(60).finish_reason in ("length", "stop")
    assert engine.drain()
    engine.clear_tier(DEVICE)
    assert engine.call(engine.cache.used_slots)[DEVICE] == 0
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_what_was_computed_before_an_abort_is_reused(text: str) -> None:
    engine = Engine(changed())
    prompt = engine.tokenizer.encode(text)[:450]
    chunk = engine.info.chunk_tokens
    handle = engine.submit(prompt, SamplingParams(max_tokens=2))
    scheduler = engine._scheduler
    engine._take_in(wait=False)
    scheduler.step()
    while scheduler.running[0].num_computed < 3 * chunk:
        scheduler.step()
    handle.abort()
    with engine:
        assert handle.result(60).finish_reason == "abort"
        again = engine.submit(prompt, SamplingParams(max_tokens=2)).result(60)
        assert again.num_cached_tokens == 3 * chunk


def test_close_ends_every_request(make: Make, text: str) -> None:
    engine = make(changed(max_running=2))
    prompts = requests(engine.tokenizer.encode(text), 20, seed=5)
    handles = [engine.submit(prompt, SamplingParams(max_tokens=100)) for prompt in prompts]
    engine.close()
    assert all(handle.result(10).finish_reason in ("abort", "length", "stop") for handle in handles)


def test_a_request_is_counted_once_however_often_it_was_leased(make: Make, text: str) -> None:
    engine = make(changed())
    prompt = engine.tokenizer.encode(text)[:200]
    handles = [engine.submit(prompt, SamplingParams(max_tokens=2)) for _ in range(5)]
    for handle in handles:
        handle.result(60)
    registry = engine.call(engine.cache.update_metrics).registry
    assert registry.get_sample_value("kvtier_requests_total") == 5
    assert registry.get_sample_value("kvtier_hit_blocks_total", {"tier": DEVICE}) == 4 * 12


def test_a_caller_that_raises_ends_its_own_request_only(make: Make, text: str) -> None:
    def refuse(_: object) -> None:
        raise ValueError("not today")

    engine = make(changed())
    prompt = engine.tokenizer.encode(text)[:100]
    broken = engine.submit(prompt, SamplingParams(max_tokens=4), on_token=refuse)
    fine = engine.submit(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    assert broken.result(60).error == "The request failed: not today"
    assert fine.result(60).finish_reason == "length"
    assert engine.drain()
    assert engine.num_waiting == 0
