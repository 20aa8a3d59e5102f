"""One of SGLang's device pools, and the tiers that keep its pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.connectors.sglang.device_pools import DevicePool
from kvtier.connectors.sglang.identity import StorageConfig, folder_of, pool_facts
from kvtier.connectors.sglang.ranks import replica_of
from kvtier.connectors.sglang.room import room, slot_bytes
from kvtier.connectors.sglang.settings import LinkerSettings
from kvtier.connectors.shared.names import Names
from kvtier.connectors.shared.opening import open_disk
from kvtier.connectors.shared.pool_cache import PoolCache
from kvtier.devices import Device
from kvtier.layout import opaque
from kvtier.tiers import HostTier
from kvtier.transfer import TransferEngine


@dataclass(frozen=True, slots=True)
class Linked:
    """pool: SGLang's. cache: what is kept of it."""

    pool: DevicePool
    cache: PoolCache


def link(
    pools: Sequence[DevicePool],
    settings: LinkerSettings,
    config: StorageConfig,
    options: object,
    names: Names,
    device: Device,
    engine: TransferEngine,
) -> Mapping[str, Linked]:
    """Host memory for each pool, and a slab where the settings name a disk, by the pool's name.

    options: SGLang's ``ServerArgs``. engine: copies for ``device``. Raises ``ConfigError`` for room
    that can't be had.
    """
    page_bytes = {pool.name: pool.page_bytes for pool in pools}
    in_host = room("host_capacity", settings.host_bytes, config, options, page_bytes)
    on_disk = {}
    if settings.disk_path:
        on_disk = room("disk_capacity", settings.disk_bytes, config, options, page_bytes)
    linked = {}
    for pool in pools:
        group = opaque(slot_bytes(pool.page_bytes))
        host = HostTier(group, in_host[pool.name], device)
        storages = []
        if on_disk:
            folder = f"{folder_of(config, pool.name, replica_of())}-linked"
            slab = settings.disk_options(folder, on_disk[pool.name])
            storages.append(open_disk(slab, group, host.ready_memory))
        cache = PoolCache(
            pool.paged(group.bytes_per_block),
            pool.ends,
            host,
            storages,
            engine,
            names.digest_of_part(pool_facts(config, pool.name, pool.source, pool.shapes)),
            settings.bytes_per_day,
        )
        linked[pool.name] = Linked(pool, cache)
    return linked
