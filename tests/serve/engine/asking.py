"""Run prompts and compare logits, for tests of KV reuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvtier.core.types import DEVICE, LoadPolicy
from kvtier.serve.engine import Completion, Engine, EngineConfig, SamplingParams

from .conftest import SMALL

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, keep_logits=True)


def ask(
    engine: Engine, prompt: list[int], params: SamplingParams = GREEDY, **given: Any
) -> Completion:
    """Return the answer when all copies have ended."""
    completion = engine.submit(prompt, params, **given).result(60)
    assert not completion.error
    assert engine.drain()
    return completion


def same(one: Completion, another: Completion) -> bool:
    assert one.logits is not None
    assert another.logits is not None
    return np.array_equal(one.logits, another.logits)


def restarted(
    config: EngineConfig, prompt: list[int], then: EngineConfig | None = None
) -> tuple[Completion, Completion]:
    """Return the answers of an engine and of its successor, with other settings if ``then``."""
    answers = []
    for settings in (config, then or config):
        with Engine(settings) as engine:
            answers.append(ask(engine, prompt))
    return answers[0], answers[1]


def leave_below_the_device(engine: Engine) -> None:
    """Evict all KV from the device, and overwrite the pool, so that stale KV is noticed."""
    assert engine.drain()
    engine.clear_tier(DEVICE)
    pool: Any = engine.cache._tiers[DEVICE]
    engine.call(lambda: pool.memory.owner.fill_(0.25))


def random_prompt(seed: int, num_tokens: int, shared: int = 0) -> list[int]:
    """Return a prompt whose first ``shared`` tokens are those of seed 0."""
    made = torch.randint(3, 1000, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    tokens: list[int] = made.tolist()
    return random_prompt(0, shared) + tokens[shared:] if shared else tokens


def always_loading(model: str, **changes: Any) -> EngineConfig:
    """Return settings that always load cached KV."""
    cache = replace(SMALL.cache, load_policy=LoadPolicy.ALWAYS)
    given: dict[str, Any] = {"cache": cache, "threads": 1, "max_model_tokens": 700} | changes
    return replace(SMALL, model=model, **given)


def cold(model: str, *prompts: list[int], params: SamplingParams = GREEDY) -> list[Completion]:
    """Return the answers without a cache."""
    with Engine(always_loading(model, prefix_cache=False)) as engine:
        found = [ask(engine, each, params) for each in prompts]
    assert not any(each.num_cached_tokens for each in found)
    return found
