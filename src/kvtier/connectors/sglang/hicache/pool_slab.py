"""Pages of one pool: their addresses in memory, and the slab or store that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvtier.connectors.common.blocking_calls import BlockingCalls, SlabReads
from kvtier.connectors.common.opening import open_disk, open_store
from kvtier.connectors.sglang.shared.identity import StorageConfig, folder_of, is_replicated
from kvtier.connectors.sglang.shared.pages import Pages
from kvtier.connectors.sglang.shared.rank_metrics import pool_metrics
from kvtier.connectors.sglang.shared.settings import StorageSettings
from kvtier.index.policies.replayed import LRU
from kvtier.layout import opaque
from kvtier.observe import Metrics
from kvtier.tiers import StorageTier
from kvtier.tiers.disk import DiskReader, goes_direct
from kvtier.tiers.wrappers import Shards


class PoolSlab(NamedTuple):
    """One pool: addresses of its pages in memory, and calls to the slab that keeps them."""

    pages: Pages
    calls: BlockingCalls | SlabReads


def open_slab(
    settings: StorageSettings,
    config: StorageConfig,
    name: str,
    pages: Pages,
    capacity_bytes: int,
    digest: Callable[[], bytes],
    replica: int = 0,
    policy: str = LRU,
    shards: Shards | None = None,
) -> PoolSlab:
    """Open the slab of a rank's pool, or a reader of the slab of the rank that writes for all.

    A disk that can't be read is not used, and SGLang serves without it.

    Args:
        settings: settings of the back end.
        config: this rank.
        name: name of the pool.
        pages: addresses of the pool's pages.
        capacity_bytes: capacity for this pool on this rank.
        digest: return the namespace of the pool's pages; b"" while it is unknown.
        replica: number of this engine among its replicas.
        policy: eviction policy.
        shards: that this rank has of a page in a store; None for the whole page.

    Raises:
        ConfigError: settings can't be used, or another process has opened the slab.
    """
    group, metrics = opaque(pages.num_bytes), pool_metrics(config, name)
    if settings.locations:
        (location,) = settings.locations
        store = open_store(location, settings, group, capacity_bytes, pages.memory, shards)
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
) -> BlockingCalls:
    return BlockingCalls(
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
