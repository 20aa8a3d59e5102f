"""A real vLLM whose KV is compressed and encrypted in storage: the same bits after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("zstandard")
pytest.importorskip("cryptography")

from tests.engines.vllm.engines import (
    BLOCK,
    Answers,
    Connects,
    engine,
    loaded,
    one_by_one,
    prompt,
)
from tests.engines.vllm.test_shared_store import until_stored
from tests.kit.servers import ValkeyServer

PROMPTS = [prompt(seed, 6 * BLOCK + 50) for seed in range(3)]
NUM_BLOCKS = 6 * len(PROMPTS)


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("0a" * 32)
    return f"file:{path}"


@pytest.mark.timeout(600)
def test_encrypted_disk_gives_the_same_bits_after_a_restart(
    alone: Answers, tmp_path: Path, key: str, connects: Connects
) -> None:
    slab = tmp_path / "slab"
    sizes = {"host_capacity": "256MiB", "disk_path": str(slab), "disk_capacity": "256MiB"}
    config = connects(**sizes, encryption_key=key)
    with engine(config) as llm:
        assert one_by_one(llm, PROMPTS) == alone["cold"]
    (superblock,) = slab.rglob("superblock")
    assert b" encrypted" in superblock.read_bytes()
    with engine(config) as llm:
        before = loaded("disk")
        assert one_by_one(llm, PROMPTS) == alone["warm"]
        assert loaded("disk") - before == NUM_BLOCKS


@pytest.mark.timeout(600)
def test_compressed_and_encrypted_store_gives_the_same_bits_after_a_restart(
    alone: Answers,
    tmp_path: Path,
    key: str,
    connects: Connects,
    server: ValkeyServer,
    valkey: str,
) -> None:
    settings = {
        "host_capacity": "256MiB",
        "storage": valkey,
        "lookup_deadline_s": 5,
        "codec": "lossless",
        "encryption_key": key,
    }
    config = connects(**settings)
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
    with engine(connects(**{**settings, "encryption_key": f"file:{other}"})) as llm:
        before = loaded("valkey")
        assert one_by_one(llm, PROMPTS) == alone["cold"]
        assert loaded("valkey") == before, "blocks of another key are misses"
