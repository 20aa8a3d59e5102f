"""Requests of a server, recorded and replayed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from kvtier.observe.recording import Chains
from kvtier.serve.engine import Engine
from kvtier.serve.server.config import ServerConfig
from kvtier.tools.replay.segments import find_segments
from kvtier.tools.replay.traces import ReadOptions, read_traces
from tests.kit.cli import kvtier, refused
from tests.kit.waiting import wait_until

from .conftest import MODEL, cached, running
from .raw import metrics_of

pytestmark = pytest.mark.engine


def test_requests_are_recorded_and_replayed(engine: Engine, prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    prompts = [(f"{prefix}# one", "a"), (f"{prefix}# two", "a"), (f"{prefix}# one", "b")]
    usages = []
    with running(engine, ServerConfig(record=str(path))) as made, made.client() as client:
        for prompt, salt in prompts:
            answer = client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=3, n=2, extra_body={"cache_salt": salt}
            )
            usages.append(answer.usage)
        streamed = client.completions.create(
            model=MODEL, prompt=["x", prompts[0][0]], max_tokens=2, stream=True
        )
        assert list(streamed)
        assert httpx.post(f"{made.url}/v1/completions", json={"model": "other"}).status_code == 400
    trace = read_traces([path], ReadOptions(Chains(b"s" * 32, 64)))
    assert trace.num_requests == 5
    assert trace.block_tokens == engine.info.block_size
    for at, usage in enumerate(usages):
        assert usage is not None
        assert trace.input_tokens[at] == usage.prompt_tokens
        assert trace.output_tokens[at] == usage.completion_tokens
    segments = find_segments(trace)
    shared = segments.num_reused
    same = len(engine.tokenizer.encode(prefix)) // trace.block_tokens
    # Another tenant shares no blocks, nor does a request without a salt.
    assert shared.tolist() == [0, pytest.approx(same, abs=1), 0, 0, 0]
    # The engine reuses only whole chunks of the blocks that the recording counts as shared.
    assert 0 < cached(usages[1]) <= shared[1] * trace.block_tokens
    assert prefix.split()[1].encode() not in path.read_bytes()


def test_a_clock_that_is_set_moves_no_request(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, right = tmp_path / "trace", time.time
    with running(engine, ServerConfig(record=str(path))) as made, made.client() as client:
        for step_s in (0, 90_000, -90_000):
            monkeypatch.setattr(time, "time", lambda step_s=step_s: right() + step_s)
            client.completions.create(model=MODEL, prompt="x " * 100, max_tokens=1)
        monkeypatch.undo()
    trace = read_traces([path], ReadOptions(Chains(b"s" * 32, 64)))
    assert trace.num_requests == 3
    assert trace.window_s < 600


def test_what_is_recorded_is_counted(engine: Engine, tmp_path: Path) -> None:
    config = ServerConfig(record=str(tmp_path / "trace"))
    with running(engine, config) as made, made.client() as client:
        client.completions.create(model=MODEL, prompt="x", max_tokens=1)
        written = 'kvtier_server_recorded_requests_total{outcome="written"} 1.0'
        wait_until(lambda: written in metrics_of(made), "it is counted")


def test_a_replay_of_a_recording_says_what_it_can(
    engine: Engine, prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    with running(engine, ServerConfig(record=str(path))) as made, made.client() as client:
        for _ in range(3):
            client.completions.create(model=MODEL, prompt=prefix, max_tokens=1)
    result = kvtier("replay", str(path), "--no-report", "--json", "-", "--sizes", "1GiB")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["trace"]["requests"] == 3
    assert found["infinite"]["hit_ratio"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["recommendation"]["text"].startswith("Too small to tell: 2 of its requests")


def test_what_cant_be_recorded_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear\n")
    for value, sentence in (
        (tmp_path / "letter", "letter is there and is no recording"),
        (tmp_path, "can't write"),
        (tmp_path / "typo" / "trace", "typo; make it first"),
    ):
        assert sentence in refused("serve", "--port", "0", "--record", str(value))
