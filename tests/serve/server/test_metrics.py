"""/metrics and /health, as operators see them."""

from __future__ import annotations

import httpx
import pytest

from kvtier.observe import specs
from kvtier.serve.engine import Engine

from .conftest import MODEL, Running, running
from .raw import samples

pytestmark = pytest.mark.engine


def test_requests_and_tokens_are_counted(engine: Engine, prefix: str) -> None:
    with running(engine) as made, made.client() as client:
        for _ in range(2):
            client.completions.create(
                model=MODEL, prompt=prefix, max_tokens=3, extra_body={"cache_salt": "metrics"}
            )
        chat = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=2, stream=True
        )
        assert list(chat)
        httpx.post(f"{made.url}/v1/completions", json={})
        httpx.get(f"{made.url}/some/path")
        found = samples(made)
    requests = "kvtier_server_requests_total"
    assert found[requests, "completions", "200"] == 2
    assert found[requests, "completions", "400"] == 1
    assert found[requests, "chat", "200"] == 1
    assert found[requests, "other", "404"] == 1
    assert found["kvtier_server_ttft_seconds_count", "completions"] == 2
    assert found["kvtier_server_e2e_seconds_count", "completions"] == 2
    assert found["kvtier_server_e2e_seconds_count", "chat"] == 1
    ttft = found["kvtier_server_ttft_seconds_sum", "completions"]
    assert 0 < ttft <= found["kvtier_server_e2e_seconds_sum", "completions"]
    num_prompt = len(engine.tokenizer.encode(prefix))
    assert found["kvtier_server_prompt_tokens_total",] >= 2 * num_prompt
    assert found["kvtier_server_cached_tokens_total",] == (num_prompt - 1) // 128 * 128
    assert 3 <= found["kvtier_server_completion_tokens_total",] <= 8
    assert found["kvtier_server_running",] == found["kvtier_server_waiting",] == 0


def test_the_caches_metrics_are_there_too(served: Running) -> None:
    names = {name for name, *_ in samples(served)}
    for spec in (*specs.SERVER, *specs.CACHE):
        if not spec.labels:
            ending = "_count" if spec.kind == "histogram" else ""
            assert spec.name + ending in names
    assert ("kvtier_slots", "device") in samples(served)
    assert samples(served)["kvtier_slot_bytes", "device"] > 0


def test_health_names_the_model(served: Running) -> None:
    answer = httpx.get(f"{served.url}/health")
    assert answer.json() == {"status": "ok", "model": MODEL, "running": 0, "waiting": 0}


def test_the_api_describes_itself(served: Running) -> None:
    described = httpx.get(f"{served.url}/openapi.json").json()
    assert "/v1/chat/completions" in described["paths"]
    assert "prompt" in described["components"]["schemas"]["CompletionRequest"]["properties"]
