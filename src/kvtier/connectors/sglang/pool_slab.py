"""One pool's pages on disk: where they lie in memory, and the slab that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvtier.connectors.common.opening import open_disk, open_store
from kvtier.connectors.common.slab_calls import SlabCalls, SlabReads
from kvtier.connectors.sglang.identity import StorageConfig, folder_of, is_replicated
from kvtier.connectors.sglang.pages import Pages
from kvtier.connectors.sglang.rank_metrics import told_metrics
from kvtier.connectors.sglang.settings import StorageSettings
from kvtier.index.policies.replayed import LRU
from kvtier.layout import opaque
from kvtier.telemetry import Metrics
from kvtier.tiers import StorageTier
from kvtier.tiers.disk import DiskReader, goes_direct


class PoolSlab(NamedTuple):
    """One pool: where its pages lie in memory, and calls to the slab that keeps them."""

    pages: Pages
    calls: SlabCalls | SlabReads


def open_slab(
    settings: StorageSettings,
    config: StorageConfig,
    name: str,
    pages: Pages,
    capacity_bytes: int,
    digest: Callable[[], bytes],
    replica: int = 0,
    policy: str = LRU,
) -> PoolSlab:
    """Open the slab of a rank's pool, or read that of the rank that writes for all.

    Raises ``ConfigError`` for settings that can't be used, and for a slab that somebody else has; a
    disk that can't be read is left alone, and SGLang serves without it.

    policy: says what leaves first; all but LRU are told of requests.
    """
    group, metrics = opaque(pages.num_bytes), told_metrics(config, name)
    if settings.stores:
        (location,) = settings.stores
        store = open_store(location, group, capacity_bytes, pages.memory)
        return PoolSlab(pages, _calls(settings, store, pages, digest, metrics, policy))
    options = settings.disk_options(folder_of(config, name, replica), capacity_bytes)
    if is_replicated(config, name) and config.tp_rank > 0:
        return PoolSlab(pages, SlabReads(DiskReader(options, group), digest))
    disk = open_disk(options, group, pages.memory if goes_direct(pages.sizes) else None)
    return PoolSlab(pages, _calls(settings, disk, pages, digest, metrics, policy))


def _calls(
    settings: StorageSettings,
    tier: StorageTier,
    pages: Pages,
    digest: Callable[[], bytes],
    metrics: Metrics,
    policy: str,
) -> SlabCalls:
    return SlabCalls(
        tier,
        pages.sizes.tolist(),
        digest,
        hold_s=settings.hold_s,
        block_tokens=pages.page_size,
        always_loads=settings.always_loads,
        policy=policy,
        bytes_per_day=settings.bytes_per_day,
        metrics=metrics,
    )
