"""Construction of the tiers that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvtier.core.config import DEFAULT_CODING, CacheConfig, CodingConfig, parse_capacity, parse_size
from kvtier.core.errors import ConfigError, install_command
from kvtier.core.system.plugins import load_plugin
from kvtier.core.types import DEVICE, DISK, HOST, Direct
from kvtier.devices import Device
from kvtier.devices.base import Memory
from kvtier.layout import KVGroup
from kvtier.tiers.base import DeviceTier, MemoryTier
from kvtier.tiers.codecs.opening import check_coding, is_lossy
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.direct import Pool
from kvtier.tiers.disk.opening import check_folders
from kvtier.tiers.memory.arena import ArenaOptions
from kvtier.tiers.memory.host import HostTier, check_host_capacity
from kvtier.tiers.pieces import HOST_KINDS
from kvtier.tiers.remote.bucket.opening import PACK_FILE
from kvtier.tiers.remote.location import StorePlugin
from kvtier.tiers.storage import StorageSite, StorageTier
from kvtier.tiers.wrappers import ThrottledTier
from kvtier.tiers.wrappers.coded import open_coded

BUCKETS: Final = ("s3", "gs", "az")
STORES: Final = frozenset(
    {"valkey", "valkeys", "redis", "rediss", *BUCKETS, "dir", PACK_FILE, "mooncake", "nixl"}
)
"""Plug-ins of kvtier's own for stores."""
PACKAGES: Final = {**dict.fromkeys(BUCKETS, "obstore"), "mooncake": "mooncake", "nixl": "nixl"}
"""Packages that plug-ins need. The extras have the names of the plug-ins."""
NODE: Final = "node"
"""The plug-in of a node, which encodes what it stores by its own settings."""
CODE_THEMSELVES: Final = STORES | {DISK, NODE}
"""Plug-ins that encode blocks themselves: their formats name the codec and the key of a block, so
that a look-up finds only what can be read. Tiers of all others are wrapped in a ``CodedTier``."""

Tiers = Mapping[str, MemoryTier | StorageTier]


def make_tiers(
    config: CacheConfig,
    device: Device,
    pool: DeviceTier,
    storage: Sequence[StorageTier] = (),
    arena: ArenaOptions | None = None,
) -> Tiers:
    """Make the configured tiers, fastest first. If one fails, close those that were made.

    Args:
        config: configuration of the cache.
        device: the accelerator.
        pool: the device tier.
        storage: ready storage tiers, used instead of those that ``config`` names.
        arena: options of the host tier's memory.

    Returns:
        The tiers by name.

    Raises:
        ConfigError: the configuration is not possible.
    """
    if storage:
        _check_names([made.name for made in storage])
    else:
        storage_names(config.locations, bool(config.disk_path))
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


def check_tiers(config: CacheConfig, device_bytes: int) -> None:
    """Raise ``ConfigError`` for tiers that are impossible whatever the shape of the blocks is.

    For callers that load a model before they make the tiers. No store is reached.

    device_bytes: size of the device pool.
    """
    storage_names(config.locations, bool(config.disk_path))
    check_stores(config.locations)
    for plugin in map(_plugin, config.stores):
        package = PACKAGES.get(plugin)
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"storage: {plugin}: needs the package {package}; install it: "
                f"{install_command(plugin)}"
            )
    if config.disk_path or config.stores:
        check_coding(config.coding)
    host_bytes = parse_capacity(config.host_capacity, device_bytes, "host_capacity")
    check_host_capacity(host_bytes)
    _check_direct(config, host_bytes)
    if config.disk_path:
        check_folders(_disk_options(config))


def check_stores(locations: Sequence[str]) -> None:
    """Raise ``ConfigError`` for an unknown plug-in, and for a store's URL that can't be used.

    No store is reached, and no client of one is needed.
    """
    for location in locations:
        _, plugin, rest = split_storage(location)
        if isinstance(make := load_plugin("tiers", plugin), StorePlugin):
            make.read(rest)


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
    for location in config.locations:
        tier = make_storage(
            location,
            group,
            capacity_bytes,
            memory,
            config.coding,
            config.node_tenant,
            config.engine_name,
        )
        undo.callback(tier.close)
        made.append(tier)
    return made


def make_storage(
    location: str,
    group: KVGroup,
    capacity_bytes: int,
    memory: Memory | None,
    coding: CodingConfig = DEFAULT_CODING,
    tenant: str = "",
    title: str = "",
) -> StorageTier:
    """Make the tier that ``storage="name=plug-in:place"`` asks for.

    Args:
        location: text of the form "name=plug-in:place".
        group: shape of the blocks.
        capacity_bytes: capacity of the tier.
        memory: host memory that most blocks are read into and written from, if any.
        coding: codec and keys. A node has its own.
        tenant: tenant in a node.
        title: name of the engine for display in a node.

    Raises:
        ConfigError: the plug-in makes something other than a storage tier.
    """
    name, plugin, rest = split_storage(location)
    site = StorageSite(name, rest, group, capacity_bytes, memory, coding, tenant, title=title)
    make = load_plugin("tiers", plugin)
    tier = make(site) if plugin in CODE_THEMSELVES else open_coded(make, site)
    if not isinstance(tier, StorageTier):
        raise ConfigError(
            f"storage: {plugin!r} makes a {type(tier).__name__}, not a storage tier; see "
            "kvtier.tiers.storage"
        )
    return tier


def lossy_codec(coding: CodingConfig, locations: Sequence[str]) -> str:
    """Return the codec of the stores if it is lossy, for ``Namespace.codec``; else ""."""
    is_used = any(plugin not in (DISK, NODE) for plugin in map(_plugin, locations))
    return coding.codec if is_used and is_lossy(coding.codec) else ""


def refuse_lossy(coding: CodingConfig, locations: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a lossy codec of stores: the shape of the KV is not known here."""
    if found := lossy_codec(coding, locations):
        raise ConfigError(
            f"codec: {found} needs to know the layers and heads of the KV, as the embedded "
            "engine does (kvtier serve); here KV is pages of bytes: use codec=lossless"
        )


def split_storage(location: str) -> tuple[str, str, str]:
    """Return name, plug-in and place of "name=plug-in:place"."""
    scheme, _, place = location.partition(":")
    name, _, plugin = scheme.rpartition("=")
    return name or plugin, plugin, place


def takes_writes(location: str) -> bool:
    """Return whether blocks are written to the tier at a location."""
    return _plugin(location) != PACK_FILE


def undeletable(locations: Sequence[str]) -> list[str]:
    """Return a sentence for each tier whose blocks are found again after a restart."""
    return [
        f"{split_storage(location)[0]}: is only read, and may have blocks that are found again "
        "after a restart; start without it, or make it again"
        for location in locations
        if not takes_writes(location)
    ]


def _plugin(location: str) -> str:
    return split_storage(location)[1]


def storage_names(locations: Sequence[str], has_disk: bool) -> list[str]:
    """Return the names of the configured storage tiers, in order.

    Raises ``ConfigError`` if two names are the same.
    """
    names = [DISK] * has_disk + [split_storage(location)[0] for location in locations]
    _check_names(names)
    return names


def _check_names(names: Sequence[str]) -> None:
    for at, name in enumerate(names):
        if name in (DEVICE, HOST, *names[:at]):
            raise ConfigError(
                f"storage: two tiers are called {name!r}; name one of them, as in "
                f'"other={name}:..."'
            )


def write_limits(config: CacheConfig) -> dict[str, int]:
    """Return the daily write limit in bytes of each storage tier that has one."""
    bytes_per_day = parse_size(config.disk_bytes_per_day, "disk_bytes_per_day")
    return {DISK: bytes_per_day} if bytes_per_day else {}


def _throttled(tier: StorageTier, config: CacheConfig) -> StorageTier:
    """Wrap the disk tier in a ``ThrottledTier`` if its bandwidth is limited."""
    bytes_per_s = parse_size(config.disk_bytes_per_s, "disk_bytes_per_s")
    return ThrottledTier(tier, bytes_per_s) if bytes_per_s and tier.name == DISK else tier


def _check_reach(tiers: Tiers, pool: DeviceTier) -> None:
    """Raise ``ConfigError`` if there is no host tier, and storage cannot reach device memory."""
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
        encryption_key=config.encryption_key,
    )
