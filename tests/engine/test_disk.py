"""The disk tier under the engine: after a restart prompts come from disk, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.engine import Completion, Engine, EngineConfig, SamplingParams
from kvtier.errors import ConfigError
from kvtier.types import DEVICE, DISK, HOST

from .conftest import SMALL, changed

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, keep_logits=True)


def with_disk(folder: Path, model: str = "random-gqa", **settings: object) -> EngineConfig:
    cache = replace(SMALL.cache, disk_path=str(folder), disk_capacity="8MiB", **settings)  # type: ignore[arg-type]
    return replace(SMALL, model=model, cache=cache)


def ask(engine: Engine, prompt: list[int]) -> Completion:
    completion = engine.submit(prompt, GREEDY).result(60)
    assert engine.drain()
    return completion


def same(one: Completion, another: Completion) -> bool:
    assert one.logits is not None
    assert another.logits is not None
    return np.array_equal(one.logits, another.logits)


@pytest.fixture
def prompt(text: str) -> list[int]:
    with Engine(changed()) as engine:
        return engine.tokenizer.encode(text)[:300]


@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_after_a_restart_prompts_come_from_disk(
    tmp_path: Path, prompt: list[int], model: str
) -> None:
    with Engine(with_disk(tmp_path / "slab", model)) as engine:
        cold = ask(engine, prompt)
    with Engine(with_disk(tmp_path / "slab", model)) as engine:
        warm, again = ask(engine, prompt), ask(engine, prompt)
    assert cold.num_cached_tokens == 0
    assert warm.hit_tokens == {DISK: 288}
    assert again.hit_tokens == {DEVICE: 288}
    assert same(cold, warm)
    assert same(cold, again)


def test_a_prompt_may_come_from_three_tiers(tmp_path: Path, prompt: list[int]) -> None:
    with Engine(with_disk(tmp_path / "slab")) as engine:
        cold = ask(engine, prompt)
    with Engine(with_disk(tmp_path / "slab")) as engine:
        ask(engine, prompt[:200])
        engine.clear_tier(DEVICE)
        ask(engine, prompt[:100])
        warm = ask(engine, prompt)
    assert warm.hit_tokens == {DEVICE: 96, HOST: 96, DISK: 96}
    assert same(cold, warm)


def test_damage_on_disk_is_recomputed(tmp_path: Path, prompt: list[int]) -> None:
    with Engine(with_disk(tmp_path / "slab")) as engine:
        cold = ask(engine, prompt)
        block_bytes = engine.info.bytes_per_block
    slab = tmp_path / "slab" / "data.slab"
    with slab.open("r+b") as file:
        file.seek(7 * -(-block_bytes // 4096) * 4096 + 100)
        file.write(b"x")
    with Engine(with_disk(tmp_path / "slab")) as engine:
        warm = ask(engine, prompt)
        assert sum(warm.hit_tokens.values()) == 96, "whole chunks before the damaged block"
        assert same(cold, warm)
        engine.clear_tier(DEVICE)
        engine.clear_tier(HOST)
        assert ask(engine, prompt).hit_tokens == {DISK: 288}, "what was recomputed is stored again"


def test_a_disk_needs_a_host_tier(tmp_path: Path) -> None:
    config = with_disk(tmp_path / "slab", host_capacity=0)
    with pytest.raises(ConfigError, match="host_capacity"):
        Engine(config)
