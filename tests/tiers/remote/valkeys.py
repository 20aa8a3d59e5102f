"""Tiers over a Valkey server."""

from __future__ import annotations

from kvtier.core.system.plugins import load_plugin
from kvtier.testing.storage_suite import GROUP
from kvtier.tiers import StorageSite, StorageTier


def open_tier(port: int, prefix: str, num_blocks: int = 64, **options: object) -> StorageTier:
    given = "".join(f"&{name}={value}" for name, value in options.items())
    rest = f"//127.0.0.1:{port}?prefix={prefix}:{given}"
    site = StorageSite("valkey", rest, GROUP, num_blocks * GROUP.bytes_per_block)
    made = load_plugin("tiers", "valkey")(site)
    assert isinstance(made, StorageTier)
    return made
