"""Tiers over a Valkey server."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.core.types import BlockKey
from kvtier.tiers import StorageTier
from tests.kit.servers import ValkeyServer
from tests.tiers.remote.store_tests import Place, open_store


def open_tier(port: int, prefix: str, num_blocks: int = 64, **options: Any) -> StorageTier:
    return open_store(f"valkey://127.0.0.1:{port}", num_blocks, prefix=f"{prefix}:", **options)


class ValkeyPlace(Place):
    """A server. port: of the server, or of a proxy before it."""

    @pytest.fixture(autouse=True)
    def _server(self, server: ValkeyServer) -> None:
        self.server, self.port = server, server.port

    def open_tier(
        self, place: str, num_blocks: int = 64, *shape: Any, **options: Any
    ) -> StorageTier:
        url = f"valkey://127.0.0.1:{self.port}"
        return open_store(url, num_blocks, *shape, prefix=f"{place}:", **options)

    def value(self, place: str, key: BlockKey) -> bytes:
        value = self.server.tell(b"GET", f"{place}:".encode() + key)
        assert isinstance(value, bytes)
        return value

    def replace(self, place: str, key: BlockKey, content: bytes) -> None:
        self.server.tell(b"SET", f"{place}:".encode() + key, content)
