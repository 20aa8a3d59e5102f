"""The embedded engine and attached models on the accelerator of this machine, if it has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams
from scripts.model_coverage import save
from tests.connectors.transformers.models import (
    CHUNK,
    answer,
    are_equal,
    on_grid,
    prompt,
    small_model,
)
from tests.kit.nodes import running

from .asking import ask, same
from .conftest import SMALL

FOUND = torch.accelerator.current_accelerator(check_available=True)
KIND = FOUND.type if FOUND else "none"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(FOUND is None, reason="torch finds no accelerator on this machine"),
]
FIRST = SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True)
MODELS = ("random-gqa", "random-llama", "random-mla", "kvtier-tiny")


def on_accelerator(model: str, dtype: str = "auto", **cache: object) -> EngineConfig:
    """Return ``SMALL`` on the accelerator, loading all cached KV."""
    settings = replace(SMALL.cache, load_policy=LoadPolicy.ALWAYS, **cache)  # type: ignore[arg-type]
    return replace(SMALL, model=model, device=KIND, dtype=dtype, cache=settings)


def some_prompt(engine: Engine) -> list[int]:
    return engine.tokenizer.encode(Path(__file__).read_text())[:301]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_each_tier_gives_the_logits_of_a_cold_run(tmp_path: Path, model: str, dtype: str) -> None:
    config = on_accelerator(model, dtype, disk_path=str(tmp_path / "slab"), disk_capacity="64MiB")
    with Engine(config) as engine:
        tokens = some_prompt(engine)
        cold, warm = ask(engine, tokens), ask(engine, tokens)
        engine.clear_tier(DEVICE)
        loaded = ask(engine, tokens)
    with Engine(config) as engine:
        restarted = ask(engine, tokens)
    assert cold.num_cached_tokens == 0
    assert [each.hit_tokens for each in (warm, loaded, restarted)] == [
        {tier: 288} for tier in (DEVICE, HOST, DISK)
    ]
    for each in (warm, loaded, restarted):
        assert same(cold, each)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_windows_give_the_logits_of_a_cold_run(tmp_path: Path, name: str, dtype: str) -> None:
    save(name, name, tmp_path / "model")
    disk = {"disk_path": str(tmp_path / "slab"), "disk_capacity": "64MiB"}
    config = on_accelerator(str(tmp_path / "model"), dtype, **disk)
    with Engine(config) as engine:
        tokens = some_prompt(engine)
        cold, warm = ask(engine, tokens), ask(engine, tokens)
        engine.clear_tier(DEVICE)
        loaded = ask(engine, tokens)
    with Engine(config) as engine:
        restarted = ask(engine, tokens)
    for each, tier in ((warm, DEVICE), (loaded, HOST), (restarted, DISK)):
        assert each.hit_tokens == {tier: 288}
        assert same(cold, each)


@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_direct_reads_give_the_logits_of_a_cold_run(tmp_path: Path, model: str) -> None:
    config = on_accelerator(
        model,
        host_capacity=0,
        disk_path=str(tmp_path / "slab"),
        disk_capacity="64MiB",
        disk_verify="sampled",
    )
    with Engine(config) as engine:
        tokens = some_prompt(engine)
        cold = ask(engine, tokens)
        engine.clear_tier(DEVICE)
        warm = ask(engine, tokens)
        print(*engine.cache.findings(), sep="\n")
    assert warm.hit_tokens == {DISK: 288}
    assert same(cold, warm)


@pytest.mark.parametrize("model", ["random-gqa", "random-mla"])
def test_engines_over_a_node_give_the_same_logits(tmp_path: Path, model: str) -> None:
    with running(tmp_path, segments=64) as node:
        config = on_accelerator(model, node=str(node.socket), lookup_deadline_s=5.0)
        with Engine(config) as one, Engine(config) as other:
            tokens = some_prompt(one)
            cold = ask(one, tokens)
            warm = ask(other, tokens)
    assert warm.hit_tokens == {"node": 288}
    assert same(cold, warm)


def test_many_prompts_at_a_time_get_equal_logits_from_host() -> None:
    with Engine(on_accelerator("random-gqa", host_capacity="64MiB")) as engine:
        text = engine.tokenizer.encode(Path(__file__).read_text())
        prompts = [text[first : first + 200] for first in range(0, 640, 20)]
        runs = []
        for _ in range(2):
            engine.clear_tier(DEVICE)
            futures = [engine.submit(each, FIRST) for each in prompts]
            runs.append([future.result(120) for future in futures])
            assert engine.drain()
    cold, warm = runs
    assert sum(each.hit_tokens.get(HOST, 0) for each in warm) == 32 * 192
    assert all(map(same, cold, warm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attached_model_answers_as_on_its_grid(tmp_path: Path, dtype: torch.dtype) -> None:
    model = small_model().to(KIND, dtype)
    prompts = [prompt(seed, 90 + seed, shared=50).to(KIND) for seed in range(4)]
    expected = [on_grid(model, ids) for ids in prompts]
    with kvtier.attach(model, host_capacity="1MiB", chunk_tokens=CHUNK) as cache:
        for _ in range(2):
            assert all(map(are_equal, [answer(model, ids) for ids in prompts], expected))
        assert cache.stats().num_reused_tokens > 4 * 80
