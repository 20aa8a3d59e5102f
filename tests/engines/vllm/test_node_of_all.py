"""vLLM, SGLang and ``kvtier serve`` with different models over one node at the same time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.core.types import HOST
from tests.engines.sglang.models import make_mla
from tests.engines.sglang.servers import PAGE, REPOSITORY, linker, prompt, server
from tests.engines.vllm.engines import BLOCK, connector, engine, one_by_one
from tests.kit.nodes import NodeProcess, running
from tests.serve.server.program import program

SGLANG = REPOSITORY / ".peers/sglang-server/bin/python"
OURS = REPOSITORY / ".venv/bin/python"
NUM_TOKENS = 4 * BLOCK + 44
PROMPTS = [prompt(seed, NUM_TOKENS) for seed in range(2)]
SERVED = ("random-gqa", "--block-size=64")
PATIENCE_S = 120.0

Found = tuple[int, Any]
"""Cached tokens of a prompt, and the answer with its log-probabilities."""


def _until_stored(node: NodeProcess, num_rooms: int) -> None:
    """Wait until no room of the node gets further blocks."""
    end_s = time.monotonic() + PATIENCE_S
    before: list[int] = []
    while time.monotonic() < end_s:
        rooms = node.control.get("/status")["rooms"]
        now = [(room["used_bytes"] or {}).get(HOST, 0) for room in rooms]
        if len(now) == num_rooms and all(now) and now == before:
            return
        before = now
        time.sleep(2)
    pytest.fail(f"the rooms have {before} bytes")


def _of_vllm(llm: Any) -> list[Found]:
    return one_by_one(llm, [{"prompt_token_ids": each} for each in PROMPTS])


def _of_ours(url: str) -> list[Found]:
    found = []
    for each in PROMPTS:
        body = {"model": "random-gqa", "prompt": each, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json={**body, "logprobs": 3}, timeout=120)
        told = answer.raise_for_status().json()
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        found.append((cached, told["choices"][0]["logprobs"]))
    return found


@pytest.mark.timeout(1800)
def test_each_engine_loads_what_one_of_its_kind_has_computed(tmp_path: Path) -> None:
    for python in (SGLANG, OURS):
        if not python.exists():
            pytest.skip(f"{python} is missing: make setup peers-sglang-server")
    model = make_mla(tmp_path / "mla")
    with running(tmp_path, segments=256) as node:
        over: Any = {"node": str(node.socket), "lookup_deadline_s": 5}
        options: Any = {"model": model, "python": str(SGLANG)}
        ours = (*SERVED, f"--node={node.socket}")
        config = connector(node=str(node.socket), node_deadline_s=1.0)
        with (
            engine(config) as llm,
            server(tmp_path / "first", *linker(None, **over), **options) as sglang,
            program(*ours, python=str(OURS)) as (_, url),
        ):
            assert [cached for cached, _ in _of_vllm(llm)] == [0, 0]
            assert [cached for cached, _ in _of_ours(url)] == [0, 0]
            assert [sglang.ask(each).num_cached for each in PROMPTS] == [0, 0]
            warm = _of_vllm(llm), _of_ours(url), [sglang.ask(each) for each in PROMPTS]
            _until_stored(node, num_rooms=3)
        with (
            engine(config) as llm,
            server(tmp_path / "second", *linker(None, **over), **options) as sglang,
            program(*ours, python=str(OURS)) as (_, url),
        ):
            assert _of_vllm(llm) == warm[0]
            loaded, expected = _of_ours(url), warm[1]
            assert all(cached > 0 for cached, _ in loaded), "the planner may compute the end"
            assert [answer for _, answer in loaded] == [answer for _, answer in expected]
            found = [sglang.ask(each) for each in PROMPTS]
            assert [each.num_cached for each in found] == [NUM_TOKENS // PAGE * PAGE] * 2
            assert [each.logprobs for each in found] == [each.logprobs for each in warm[2]]
