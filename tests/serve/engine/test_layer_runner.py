"""A hybrid model in the engine: prompts continue from snapshots, exactly and at any length."""

from __future__ import annotations

import gc

import pytest
import torch

from kvtier.connectors.transformers.cache_layers import CacheLayers
from kvtier.serve.engine import Engine, SamplingParams
from kvtier.serve.engine.self_check import examine
from scripts.model_coverage import save

from .asking import GREEDY, always_loading, ask, cold, random_prompt, same
from .conftest import SMALL

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

CHUNK = SMALL.chunk_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "lfm2"
    save("lfm2", "lfm2", folder)
    return str(folder)


def test_a_conversation_and_its_forks_are_continued_from_snapshots(model: str) -> None:
    first = random_prompt(0, 5 * CHUNK + 5)
    turn = random_prompt(1, 8 * CHUNK, shared=5 * CHUNK + 5)
    forks = [random_prompt(seed, 6 * CHUNK, shared=3 * CHUNK + 7) for seed in (2, 3)]
    asked = [first, turn, first, *forks]
    expected = cold(model, first, turn, *forks)
    expected.insert(2, expected[0])
    with Engine(always_loading(model)) as engine:
        for tier in ("device", "host"):
            found = [ask(engine, each) for each in asked]
            assert all(map(same, found, expected))
            if tier == "device":
                reused = [0, 5, 5, 0, 3]  # the first fork branches off where there is no snapshot
                assert [each.num_cached_tokens for each in found] == [CHUNK * n for n in reused]
                engine.clear_tier("device")
        assert [each.num_cached_tokens // CHUNK for each in found] == [5, 7, 5, 5, 5]
        assert found[0].hit_tokens == {"host": 5 * CHUNK}


def test_requests_at_once_answer_as_alone_and_leave_nothing(model: str) -> None:
    prompts = [random_prompt(seed, 4 * CHUNK + 9 * seed, shared=2 * CHUNK) for seed in range(6)]
    expected = cold(model, *prompts)
    with Engine(always_loading(model)) as engine:
        for _ in range(2):
            handles = [engine.submit(each, GREEDY) for each in prompts]
            handles[2].abort()
            found = [handle.result(60) for handle in handles]
            del found[2]
            assert all(map(same, found, [*expected[:2], *expected[3:]]))
        assert engine.drain()
        gc.disable()  # caches of ended requests must be freed without the collector
        try:
            engine.submit(prompts[0], GREEDY).result(60)
            assert engine.drain()
            assert len(engine._runner._caches) == 0  # type: ignore[attr-defined]
        finally:
            gc.enable()


def test_a_wrong_state_changes_the_answer(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = random_prompt(0, 5 * CHUNK + 5)
    (expected,) = cold(model, first)
    with Engine(always_loading(model)) as engine:
        assert same(ask(engine, first), expected)
        restore = CacheLayers.restore_states

        def wrong(self: CacheLayers, cache: object, blocks: torch.Tensor, slots: object) -> None:
            restore(self, cache, torch.zeros_like(blocks), slots)  # type: ignore[arg-type]

        monkeypatch.setattr(CacheLayers, "restore_states", wrong)
        found = ask(engine, first)
        assert found.num_cached_tokens == 5 * CHUNK
        assert not same(found, expected)


def test_every_logit_of_a_prompt_can_be_asked_for(model: str) -> None:
    tokens = random_prompt(0, 2 * CHUNK + 5)
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    with Engine(always_loading(model)) as engine:
        ask(engine, tokens)
        found = engine.submit(tokens, params).result(60)
        assert len(found.prompt_tokens) == len(tokens)
        assert found.num_cached_tokens == 0
        told = engine.submit(tokens, GREEDY, explain=True).result(60).explanation
        assert told is not None
        assert told.num_reused == 2 * CHUNK


def test_doctor_tells_the_size_of_a_snapshot(model: str) -> None:
    found = {each.topic: each for each in examine(model, "cpu")}
    assert found["served"].note.startswith("by the layers runner")
    assert found["KV of a token"].found == "0.2 KiB"  # a layer of K and V, 2 heads of 16 floats
    assert found["snapshot of the state"].found == "2.2 KiB"  # 3 layers of 64 channels, 3 floats
