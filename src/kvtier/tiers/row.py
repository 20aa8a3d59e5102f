"""The row of tiers that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvtier.config import CacheConfig, parse_capacity, parse_size
from kvtier.devices import Device
from kvtier.devices.base import Memory
from kvtier.errors import ConfigError
from kvtier.layout import KVGroup
from kvtier.plugins import load_plugin
from kvtier.tiers.arena import ArenaOptions
from kvtier.tiers.base import DeviceTier, MemoryTier
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.direct import Pool
from kvtier.tiers.host import HostTier
from kvtier.tiers.pieces import HOST_KINDS
from kvtier.tiers.storage import StorageSite, StorageTier
from kvtier.tiers.wrappers import ThrottledTier
from kvtier.types import DEVICE, DISK, HOST, Direct

Tiers = Mapping[str, MemoryTier | StorageTier]


def make_tiers(
    config: CacheConfig,
    device: Device,
    pool: DeviceTier,
    storage: Sequence[StorageTier] = (),
    arena: ArenaOptions | None = None,
) -> Tiers:
    """The tiers, fastest first; what can't be made leaves nothing open.

    storage: those that were made elsewhere, in the place of those that ``config`` names.
    """
    if storage:
        _check_names([made.name for made in storage])
    else:
        storage_names(config.storage, bool(config.disk_path))
    tiers: dict[str, MemoryTier | StorageTier] = {DEVICE: pool}
    group = pool.layout.group
    capacity = parse_capacity(config.host_capacity, pool.layout.block_bytes, "host_capacity")
    _check_direct(config, capacity)
    with ExitStack() as undo:
        memory = pool.memory if pool.memory.kind in HOST_KINDS else None
        if capacity:
            tiers[HOST] = host = HostTier(group, capacity, device, arena)
            undo.callback(host.close)
            memory = host.ready_memory
        for made in storage or _storages(config, group, memory, Pool.of(pool, device), undo):
            tiers[made.name] = _throttled(made, config)
        _check_reach(tiers, pool)
        undo.pop_all()
    return tiers


def _storages(
    config: CacheConfig,
    group: KVGroup,
    memory: Memory | None,
    pool: Pool,
    undo: ExitStack,
) -> list[StorageTier]:
    made: list[StorageTier] = []
    if config.disk_path:
        disk = DiskTier(_disk_options(config), group, memory, pool=pool)
        undo.callback(disk.close)
        made.append(disk)
    capacity_bytes = parse_size(config.storage_capacity, "storage_capacity")
    for location in config.storage:
        tier = make_storage(location, group, capacity_bytes, memory)
        undo.callback(tier.close)
        made.append(tier)
    return made


def make_storage(
    location: str, group: KVGroup, capacity_bytes: int, memory: Memory | None
) -> StorageTier:
    """The tier that ``storage="name=plug-in:place"`` asks for.

    memory: that most of its blocks come from and go to.
    """
    name, plugin, rest = _read(location)
    tier = load_plugin("tiers", plugin)(StorageSite(name, rest, group, capacity_bytes, memory))
    if not isinstance(tier, StorageTier):
        raise ConfigError(
            f"storage: {plugin!r} makes a {type(tier).__name__}, no storage tier; see "
            "kvtier.tiers.storage"
        )
    return tier


def _read(location: str) -> tuple[str, str, str]:
    """Name, plug-in and place that "name=plug-in:place" stands for."""
    scheme, _, place = location.partition(":")
    name, _, plugin = scheme.rpartition("=")
    return name or plugin, plugin, place


def storage_names(locations: Sequence[str], has_disk: bool) -> list[str]:
    """Return the names of the configured storage tiers, in order.

    Raises ``ConfigError`` if two have the same.
    """
    names = [DISK] * has_disk + [_read(each)[0] for each in locations]
    _check_names(names)
    return names


def plugins_of(locations: Sequence[str]) -> list[str]:
    """Return the plug-in that each of ``storage`` names."""
    return [_read(each)[1] for each in locations]


def _check_names(names: Sequence[str]) -> None:
    for at, name in enumerate(names):
        if name in (DEVICE, HOST, *names[:at]):
            raise ConfigError(
                f"storage: two tiers are called {name!r}; name one of them, as in "
                f'"other={name}:..."'
            )


def write_limits(config: CacheConfig) -> dict[str, int]:
    """Bytes a day that may be written to a storage tier; those without a limit are not named."""
    bytes_per_day = parse_size(config.disk_bytes_per_day, "disk_bytes_per_day")
    return {DISK: bytes_per_day} if bytes_per_day else {}


def _throttled(tier: StorageTier, config: CacheConfig) -> StorageTier:
    """The disk is no faster than it may be."""
    bytes_per_s = parse_size(config.disk_bytes_per_s, "disk_bytes_per_s")
    return ThrottledTier(tier, bytes_per_s) if bytes_per_s and tier.name == DISK else tier


def _check_reach(tiers: Tiers, pool: DeviceTier) -> None:
    """Without a host tier, storage has to reach the device's memory itself."""
    if HOST in tiers:
        return
    for name, tier in tiers.items():
        if isinstance(tier, StorageTier) and pool.memory.kind not in tier.facts.reaches:
            raise ConfigError(
                f"host_capacity: the {name} tier does not reach {pool.memory.kind} memory, so that "
                'blocks have to go through host memory; give for instance host_capacity="1GiB"'
            )


def _check_direct(config: CacheConfig, host_bytes: int) -> None:
    if config.disk_path and config.disk_direct is Direct.OFF and not host_bytes:
        raise ConfigError(
            "disk_direct: off sends blocks through host memory, and there is none; give for "
            'instance host_capacity="1GiB", or leave disk_direct at auto'
        )


def _disk_options(config: CacheConfig) -> DiskOptions:
    paths = config.disk_path
    first, *others = [paths] if isinstance(paths, str) else paths
    return DiskOptions(
        path=Path(first),
        more_paths=tuple(map(Path, others)),
        capacity_bytes=parse_size(config.disk_capacity, "disk_capacity"),
        durability=config.disk_durability,
        verify=config.disk_verify,
        io=config.disk_io,
        direct=config.disk_direct,
    )
