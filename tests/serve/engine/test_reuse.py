"""Warm and cold runs are equal to the last bit, whichever tier or request the prefix came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.core.types import DEVICE, HOST, WritePolicy
from kvtier.layout import part_view
from kvtier.serve.engine import Engine, EngineConfig

from .asking import GREEDY, ask, same
from .conftest import changed

pytestmark = pytest.mark.engine

MODELS = ("random-gqa", "random-llama", "random-mla", "kvtier-tiny")

Make = Callable[[EngineConfig], Engine]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_prefix_made_by_another_request_gives_equal_logits(
    make: Make, text: str, model: str, tier: str
) -> None:
    engine = make(changed(model=model, device_capacity="32MiB", host="64MiB"))
    tokens = engine.tokenizer.encode(text)
    for start in (0, 3000, 6000):
        prompt = tokens[start : start + 301]
        sibling = prompt[:250] + tokens[start + 900 : start + 1000]
        cold = ask(engine, prompt, salt=f"cold {start}")
        assert cold.num_cached_tokens == 0
        ask(engine, sibling)
        assert engine.drain()
        if tier == HOST:
            engine.clear_tier(DEVICE)
        warm = ask(engine, prompt)
        assert warm.hit_tokens == {tier: 224}  # 250 tokens are shared: seven cells of 32
        assert warm.num_cached_tokens == 224
        assert same(cold, warm)
        assert cold.token_ids == warm.token_ids


@pytest.mark.parametrize("model", MODELS)
def test_one_changed_value_is_noticed(make: Make, text: str, model: str) -> None:
    """Negative control of the tests above: logits depend on every reused block."""
    engine = make(changed(model=model, device_capacity="32MiB", host=0))
    prompt = engine.tokenizer.encode(text)[:301]
    cold = ask(engine, prompt)

    def change_one_value() -> None:
        pool: Any = engine.cache._tiers[DEVICE]
        view = pool.memory.owner.view(-1)
        flat = np.frombuffer(view.numpy(), np.uint8)
        keys = part_view(flat, pool.layout, 0)
        slot = int(np.flatnonzero(keys.any(axis=(1, 2, 3, 4)))[5])
        np.frombuffer(keys[slot, 0, 3, 0].data, np.float32)[...] += 0.5

    engine.call(change_one_value)
    warm = ask(engine, prompt)
    assert warm.num_cached_tokens == 288
    assert not same(cold, warm)


def test_decoding_after_reuse_equals_transformers_own_attention(make: Make, text: str) -> None:
    """The paged attention computes what transformers' own computes, up to rounding."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvtier.serve.engine.model_names import BUILTIN

    engine = make(changed(model="kvtier-tiny", device_capacity="32MiB"))
    prompt = engine.tokenizer.encode(text)[:200]
    ours = ask(engine, prompt)
    model = AutoModelForCausalLM.from_pretrained(BUILTIN / "kvtier-tiny", dtype=torch.float32)
    tokens = torch.tensor([prompt + list(ours.token_ids)])
    with torch.inference_mode():
        theirs = model(tokens).logits[0, len(prompt) - 1 : -1].numpy()
    assert ours.logits is not None
    np.testing.assert_allclose(ours.logits, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_every_write_policy_serves_from_host_what_left_the_device(
    make: Make, text: str, policy: WritePolicy
) -> None:
    engine = make(changed(policy=policy))
    tokens = engine.tokenizer.encode(text)
    prompt = tokens[:200]
    cold = ask(engine, prompt)
    again = ask(engine, prompt)
    assert engine.drain()
    engine.clear_tier(DEVICE)
    warm = ask(engine, prompt)
    assert warm.hit_tokens == {HOST: 192}
    assert same(cold, again)
    assert same(cold, warm)


def test_salts_share_nothing(make: Make, text: str) -> None:
    engine = make(changed())
    prompt = engine.tokenizer.encode(text)[:200]
    ask(engine, prompt, salt="a")
    assert ask(engine, prompt, salt="b").num_cached_tokens == 0
    assert ask(engine, prompt, salt="a").num_cached_tokens == 192


def test_cache_off_reuses_nothing_and_answers_alike(make: Make, text: str) -> None:
    on, off = make(changed()), make(changed(prefix_cache=False, host=0))
    prompt = on.tokenizer.encode(text)[:200]
    first, second = ask(off, prompt), ask(off, prompt)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert same(first, ask(on, prompt))
    assert off.cache.used_slots() == {DEVICE: 0}


def test_requests_in_line_share_a_prefix_computed_meanwhile(make: Make, text: str) -> None:
    """Among requests submitted together, only the first computes the shared prefix."""
    engine = make(changed())
    tokens = engine.tokenizer.encode(text)
    prompts = [tokens[:256] + tokens[1000 + 40 * i : 1040 + 40 * i] for i in range(6)]
    handles = [engine.submit(prompt, GREEDY) for prompt in prompts]
    cached = [handle.result(60).num_cached_tokens for handle in handles]
    assert cached == [0, 256, 256, 256, 256, 256]
