"""A prompt whose front is computed while its end is loaded gets the same answer, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.plan.explain import COMPUTED
from kvtier.serve.engine import Completion, Engine, EngineConfig
from kvtier.serve.engine.request import RequestHandle
from kvtier.tiers.wrappers import ThrottledTier
from scripts.model_coverage import save

from .asking import GREEDY, ask, same
from .conftest import SMALL

pytestmark = pytest.mark.engine

Make = Callable[[EngineConfig], Engine]


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    cache = replace(SMALL.cache, disk_path=str(folder / "slab"), disk_capacity="16MiB")
    cache = replace(cache, **changes.pop("cache", {}))
    return replace(SMALL, cache=cache, **{"threads": 1, "max_model_tokens": 700, **changes})


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute whatever is not being read yet, at any cost."""
    monkeypatch.setattr("kvtier.plan.planner.WORTH_IT", float("inf"))
    monkeypatch.setattr("kvtier.plan.planner.WORTH_S", -float("inf"))
    monkeypatch.setattr("kvtier.cache.tokens.is_computed_sooner", lambda compute_s, load_s: True)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Return an event without which no read ends."""
    event = Event()
    get = ThrottledTier.get

    def held(tier: ThrottledTier, *given: Any) -> Any:
        assert event.wait(60)
        return get(tier, *given)

    monkeypatch.setattr(ThrottledTier, "get", held)
    return event


def on_disk(
    make: Make, config: EngineConfig, *prompts: list[int]
) -> tuple[Engine, list[Completion]]:
    """Return an engine that has the KV of prompts on its disk only, and their answers."""
    with Engine(config) as engine:
        cold = [ask(engine, prompt) for prompt in prompts]
    cache = replace(config.cache, disk_bytes_per_s="1GB")  # so that it is throttled
    return make(replace(config, cache=cache)), cold


def until_claimed(engine: Engine, handle: RequestHandle, num_chunks: int) -> None:
    """Wait until so many chunks of a prompt were computed while it is loaded."""

    def is_so() -> bool:
        lease = handle._request.lease
        return lease is not None and len(lease.claimed) >= num_chunks

    for _ in range(6000):
        if engine.call(is_so):
            return
        time.sleep(0.01)
    raise AssertionError("its chunks are not computed")


def check_nothing_leaked(engine: Engine) -> None:
    assert engine.drain()
    engine.call(engine.cache.check_invariants)
    for tier in (DEVICE, HOST):
        engine.clear_tier(tier)
    assert engine.call(lambda: {t: engine.cache.used_slots()[t] for t in (DEVICE, HOST)}) == {
        DEVICE: 0,
        HOST: 0,
    }


@pytest.mark.parametrize("model", ["random-gqa", "random-mla", "doge"])
def test_answers_are_the_same(
    make: Make, tmp_path: Path, prompt: list[int], read: Event, model: str
) -> None:
    if not model.startswith("random"):
        save(model, model, tmp_path / "model")
        model = str(tmp_path / "model")
    engine, (cold,) = on_disk(make, config_of(tmp_path, model=model), prompt)
    handle = engine.submit(prompt, GREEDY, explain=True)
    read.set()
    warm = handle.result(60)
    assert same(cold, warm)
    assert 0 < warm.num_cached_tokens <= 288
    assert warm.hit_tokens == {DISK: warm.num_cached_tokens}
    assert warm.explanation is not None
    assert warm.explanation.num_reused == warm.num_cached_tokens
    assert sum(part.end - part.first for part in warm.explanation.parts) == len(prompt)
    again = ask(engine, prompt)
    assert again.hit_tokens == {DEVICE: 288}
    assert same(cold, again)
    check_nothing_leaked(engine)


def test_the_engine_computes_while_the_disk_hangs(
    make: Make, tmp_path: Path, prompt: list[int], read: Event
) -> None:
    engine, (cold,) = on_disk(make, config_of(tmp_path), prompt)
    handle = engine.submit(prompt, GREEDY, explain=True)
    until_claimed(engine, handle, 8)
    assert not handle.done
    read.set()
    warm = handle.result(60)
    assert warm.hit_tokens == {DISK: 32}
    assert same(cold, warm)
    assert warm.explanation is not None
    assert [(part.source, part.end) for part in warm.explanation.parts] == [
        (COMPUTED, 256),
        (DISK, 288),
        (COMPUTED, 300),
    ]
    assert any("overlap" in note for note in warm.explanation.notes)
    check_nothing_leaked(engine)


@pytest.mark.parametrize("name", ["gemma3_text", "lfm2"])
def test_models_with_states_load_first(
    make: Make, tmp_path: Path, prompt: list[int], read: Event, name: str
) -> None:
    """They have no state to continue from where computing meets the load."""
    save(name, name, tmp_path / "model")
    config = config_of(tmp_path, model=str(tmp_path / "model"))
    engine, (cold,) = on_disk(make, config, prompt)
    read.set()
    warm = ask(engine, prompt)
    assert same(cold, warm)
    assert warm.hit_tokens == {DISK: 288}


@pytest.mark.parametrize(
    "changed",
    [{"meet_loads": False}, {"cache": {"load_policy": LoadPolicy.ALWAYS}}],
    ids=["off", "always"],
)
def test_everything_is_loaded_where_it_is_turned_off(
    make: Make, tmp_path: Path, prompt: list[int], read: Event, changed: dict[str, Any]
) -> None:
    engine, (cold,) = on_disk(make, config_of(tmp_path, **changed), prompt)
    read.set()
    warm = ask(engine, prompt)
    assert same(cold, warm)
    assert warm.hit_tokens == {DISK: 288}


def test_requests_that_meet_others_load_first(
    make: Make, tmp_path: Path, prompt: list[int], read: Event
) -> None:
    """Only the first of two requests computes; the other shares a part of its prefix."""
    longer = prompt[:200] + prompt[:100]
    engine, cold = on_disk(make, config_of(tmp_path), prompt, longer)
    handles = [engine.submit(each, GREEDY, explain=True) for each in (prompt, longer)]
    read.set()
    warm = [handle.result(60) for handle in handles]
    for one, another in zip(cold, warm, strict=True):
        assert np.array_equal(one.logits[0], another.logits[0]), "later ones are decoded together"
    again = [ask(engine, each) for each in (prompt, longer)]
    assert all(map(same, cold, again))
    check_nothing_leaked(engine)


def test_a_client_may_leave_between_two_chunks(
    make: Make, tmp_path: Path, prompt: list[int], read: Event
) -> None:
    engine, (cold,) = on_disk(make, config_of(tmp_path), prompt)
    handle = engine.submit(prompt, GREEDY)
    handle.abort()
    assert handle.result(60).finish_reason == "abort"
    read.set()
    assert same(cold, ask(engine, prompt))
    check_nothing_leaked(engine)


def test_a_disk_that_fails_halfway_costs_no_answer(
    make: Make, tmp_path: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (cold,) = on_disk(make, config_of(tmp_path), prompt)
    get, begun = ThrottledTier.get, list[int]()

    def failing(tier: ThrottledTier, *given: Any) -> Any:
        begun.append(1)
        if len(begun) > 1:
            raise OSError("the disk is gone")
        return get(tier, *given)

    monkeypatch.setattr(ThrottledTier, "get", failing)
    warm = ask(engine, prompt)
    assert same(cold, warm)
    assert len(begun) > 1
    monkeypatch.setattr(ThrottledTier, "get", get)
    check_nothing_leaked(engine)


def test_a_chunk_that_cannot_be_computed_fails_its_request_only(
    make: Make, tmp_path: Path, prompt: list[int], read: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (cold,) = on_disk(make, config_of(tmp_path), prompt)
    runner = type(engine._runner)
    compute = runner.prefill_tail

    def failing(self: Any, tokens: list[int], span: Any, keep: int, gate: Any = None) -> Any:
        if span.start == 32:
            raise RuntimeError("out of memory")
        return compute(self, tokens, span, keep, gate)

    monkeypatch.setattr(runner, "prefill_tail", failing)
    failed = engine.submit(prompt, GREEDY).result(60)
    assert failed.finish_reason == "error"
    assert "out of memory" in failed.error
    monkeypatch.setattr(runner, "prefill_tail", compute)
    read.set()
    assert same(cold, ask(engine, prompt))
    check_nothing_leaked(engine)


def test_an_audit_computes_a_chunk_that_was_loaded(
    make: Make, tmp_path: Path, prompt: list[int], read: Event
) -> None:
    engine, (cold,) = on_disk(make, config_of(tmp_path, audit=1), prompt)
    handle = engine.submit(prompt, GREEDY, explain=True)
    until_claimed(engine, handle, 8)
    read.set()
    warm = handle.result(60)
    assert same(cold, warm)
    assert warm.explanation is not None
    (note,) = (note for note in warm.explanation.notes if "again" in note)
    assert note == "tokens 256-287 were computed again and compared: equal"
