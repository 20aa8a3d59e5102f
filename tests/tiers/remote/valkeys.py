"""Tiers over a Valkey server, and the server itself."""

from __future__ import annotations

import time

from kvtier.system.plugins import load_plugin
from kvtier.testing.storage_suite import GROUP
from kvtier.tiers import StorageSite, StorageTier
from kvtier.tiers.remote.valkey.resp import RespConnection, command
from tests.servers import ValkeyServer


def tell(server: ValkeyServer, *words: bytes) -> object:
    """Ask the server itself."""
    line = RespConnection("127.0.0.1", server.port, None, time.monotonic() + 10)
    line.send([command(*words)])
    answer = line.reply()
    line.close()
    return answer


def open_tier(port: int, prefix: str, num_blocks: int = 64, **options: object) -> StorageTier:
    given = "".join(f"&{name}={value}" for name, value in options.items())
    rest = f"//127.0.0.1:{port}?prefix={prefix}:{given}"
    site = StorageSite("valkey", rest, GROUP, num_blocks * GROUP.bytes_per_block)
    made = load_plugin("tiers", "valkey")(site)
    assert isinstance(made, StorageTier)
    return made
