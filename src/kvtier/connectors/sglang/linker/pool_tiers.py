"""One of SGLang's device pools, and the tiers that keep its pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from kvtier.cache.block_cache import BlockCache
from kvtier.cache.transfer import TransferEngine
from kvtier.connectors.common.names import BlockNames
from kvtier.connectors.common.opening import open_disk, open_store
from kvtier.connectors.common.pool_copies import PoolCopies, open_cache
from kvtier.connectors.sglang.shared.capacity import room, slot_bytes
from kvtier.connectors.sglang.shared.device_pools import DevicePool
from kvtier.connectors.sglang.shared.identity import folder_of, pool_facts
from kvtier.connectors.sglang.shared.rank_metrics import pool_metrics
from kvtier.connectors.sglang.shared.ranks import RankConfig, replica_of
from kvtier.connectors.sglang.shared.settings import LinkerSettings
from kvtier.connectors.sglang.shared.shards import device_shards, num_kv_heads, refuse_several
from kvtier.devices import Device
from kvtier.layout import opaque
from kvtier.tiers import HostTier, StorageTier


@dataclass(frozen=True, slots=True)
class PoolTiers:
    """One of SGLang's device pools with the tiers that keep its pages.

    pool: SGLang's pool. cache: cache of its pages. copies: between the two.
    """

    pool: DevicePool
    cache: BlockCache
    copies: PoolCopies


def link(
    pools: Sequence[DevicePool],
    settings: LinkerSettings,
    config: RankConfig,
    options: object,
    names: BlockNames,
    device: Device,
    engine: TransferEngine,
    policy: str,
) -> Mapping[str, PoolTiers]:
    """Return the tiers of each pool by name: host memory, a slab if configured, and stores.

    Args:
        pools: SGLang's device pools.
        settings: settings of the linker.
        config: this rank.
        options: SGLang's ``ServerArgs``.
        names: names of pages in storage.
        device: the pools' device.
        engine: copies for ``device``.
        policy: eviction policy.

    Raises:
        ConfigError: a capacity can't be allocated, or pages can't be cut into shards.
    """
    page_bytes = {pool.name: pool.page_bytes for pool in pools}
    num_shards = settings.storage_shards
    if num_shards:
        refuse_several(list(page_bytes))
    in_host = room("host_capacity", settings.host_bytes, config, options, page_bytes)
    on_disk = {}
    if settings.disk_path:
        on_disk = room("disk_capacity", settings.disk_bytes, config, options, page_bytes)
    in_stores = {}
    if settings.locations:
        in_stores = room("storage_capacity", settings.store_bytes, config, options, page_bytes)
    linked = {}
    for pool in pools:
        group = opaque(slot_bytes(pool.page_bytes))
        shards = None
        if num_shards:
            num_heads = num_kv_heads(options, pool.has_latents)
            shards = device_shards(num_shards, num_heads, config, pool, group.bytes_per_block)
        host = HostTier(group, in_host[pool.name], device)
        storages: list[StorageTier] = []
        if on_disk:
            folder = f"{folder_of(config, pool.name, replica_of())}-linked"
            if num_shards:  # the keys of its pages do not say which heads it has
                folder += f"-{blake3(_facts(config, pool)).hexdigest()[:16]}"
            slab = settings.disk_options(folder, on_disk[pool.name])
            storages.append(open_disk(slab, group, host.ready_memory))
        for location in settings.locations:
            capacity = in_stores[pool.name]
            store = open_store(location, settings, group, capacity, host.ready_memory, shards)
            storages.append(store)
        cache = open_cache(
            host,
            storages,
            names.digest_of_part(_facts(config, pool, num_shards > 0)),
            settings.bytes_per_day,
            settings.lookup_deadline_s,
            policy,
            pool_metrics(config, pool.name),
        )
        paged = pool.paged(group.bytes_per_block)
        copies = PoolCopies(cache, paged, pool.ends, host, engine)
        linked[pool.name] = PoolTiers(pool, cache, copies)
    return linked


def _facts(config: RankConfig, pool: DevicePool, any_size: bool = False) -> bytes:
    """Return the facts that identify a pool's pages.

    KV that is equal on all ranks has the same names on all, so a store keeps it once.

    any_size: see ``pool_facts``.
    """
    as_named = replace(config, is_mla_model=pool.has_latents)
    return pool_facts(as_named, pool.name, pool.source, pool.shapes, any_size)
