"""Construction of the tiers that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlencode

from kvtier.config import CacheConfig, parse_capacity, parse_size
from kvtier.devices import Device
from kvtier.devices.base import Memory
from kvtier.errors import ConfigError, install_command
from kvtier.layout import KVGroup
from kvtier.system.plugins import find_plugin, load_plugin
from kvtier.tiers.arena import ArenaOptions
from kvtier.tiers.base import DeviceTier, MemoryTier
from kvtier.tiers.codecs import CodingOptions
from kvtier.tiers.codecs.encryption import names_key
from kvtier.tiers.codecs.opening import NONE, check_coding, is_lossy
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.disk.direct import Pool
from kvtier.tiers.disk.opening import check_folders
from kvtier.tiers.host import HostTier, check_host_capacity
from kvtier.tiers.pieces import HOST_KINDS
from kvtier.tiers.storage import StorageSite, StorageTier
from kvtier.tiers.wrappers import ThrottledTier
from kvtier.types import DEVICE, DISK, HOST, Direct

CODED: Final = frozenset({"valkey", "valkeys", "redis", "rediss", "s3", "mooncake", "nixl"})
"""Plug-ins with the options ``codec`` and ``encryption_key``."""
PACKAGES: Final = {"s3": "obstore", "mooncake": "mooncake", "nixl": "nixl"}
"""Packages that plug-ins need. The extras have the names of the plug-ins."""
NODE: Final = "node"
"""The plug-in of a node, which encrypts what it stores by its own settings."""

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


def check_tiers(config: CacheConfig, device_bytes: int) -> None:
    """Raise ``ConfigError`` for tiers that are impossible whatever the shape of the blocks is.

    For callers that load a model before they make the tiers.

    device_bytes: size of the device pool.
    """
    storage_names(config.storage, bool(config.disk_path))
    for plugin in plugins_of(config.storage):
        find_plugin("tiers", plugin)
        package = PACKAGES.get(plugin)
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"storage: {plugin}: needs the package {package}; install it: "
                f"{install_command(plugin)}"
            )
    coding = CodingOptions(config.codec, config.encryption_key)
    if config.disk_path or config.storage:
        check_coding(coding)
    coded_locations(config.storage, coding)
    host_bytes = parse_capacity(config.host_capacity, device_bytes, "host_capacity")
    check_host_capacity(host_bytes)
    _check_direct(config, host_bytes)
    if config.disk_path:
        check_folders(_disk_options(config))


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
    coding = CodingOptions(config.codec, config.encryption_key)
    for location in coded_locations(config.storage, coding):
        tier = make_storage(location, group, capacity_bytes, memory)
        undo.callback(tier.close)
        made.append(tier)
    return made


def make_storage(
    location: str, group: KVGroup, capacity_bytes: int, memory: Memory | None
) -> StorageTier:
    """Make the tier that ``storage="name=plug-in:place"`` asks for.

    Args:
        location: text of the form "name=plug-in:place".
        group: shape of the blocks.
        capacity_bytes: capacity of the tier.
        memory: host memory that most blocks are read into and written from, if any.

    Raises:
        ConfigError: the plug-in makes something other than a storage tier.
    """
    name, plugin, rest = _read(location)
    tier = load_plugin("tiers", plugin)(StorageSite(name, rest, group, capacity_bytes, memory))
    if not isinstance(tier, StorageTier):
        raise ConfigError(
            f"storage: {plugin!r} makes a {type(tier).__name__}, not a storage tier; see "
            "kvtier.tiers.storage"
        )
    return tier


def coded_locations(locations: Sequence[str], coding: CodingOptions) -> list[str]:
    """Return the locations with the options of ``coding`` that they don't have themselves.

    A node encrypts what it stores by its own settings, and a plug-in has none of these options.

    Raises ``ConfigError`` for a plug-in that would store blocks as they are though a key is given.
    """
    made = []
    for location in locations:
        plugin = _read(location)[1]
        head, _, query = location.partition("?")
        named = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
        if plugin in CODED:
            given = {"codec": coding.codec, "encryption_key": coding.encryption_key}
            if coding.codec == NONE:
                del given["codec"]
            more = {name: text for name, text in given.items() if text and name not in named}
            options = [*filter(None, [query]), *filter(None, [urlencode(more)])]
            location = "?".join([head, *filter(None, ["&".join(options)])])
        elif plugin == "disk" and coding.encryption_key:
            raise ConfigError(
                "storage: disk has no option for encryption_key; give the key of a second disk as "
                "KVTIER_ENCRYPTION_KEY in the environment"
            )
        elif plugin not in ("disk", NODE) and names_key(coding.encryption_key):
            raise ConfigError(
                f"storage: {plugin} does not encrypt, and encryption_key is given; use a store of "
                "kvtier's own, or leave the key out"
            )
        made.append(location)
    return made


def lossy_codecs(config: CacheConfig) -> str:
    """Return the lossy codecs of the configured stores, for ``Namespace.codec``; "" for none."""
    coding = CodingOptions(config.codec, config.encryption_key)
    return ",".join(_lossy(coded_locations(config.storage, coding)))


def refuse_lossy(locations: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a store with a lossy codec: the shape of the KV is not known here.

    locations: result of ``coded_locations``.
    """
    if found := _lossy(locations):
        raise ConfigError(
            f"codec: {found[0]} needs to know the layers and heads of the KV, as the embedded "
            "engine does (kvtier serve); here KV is pages of bytes: use codec=lossless"
        )


def _lossy(locations: Sequence[str]) -> list[str]:
    """Return the lossy codecs of some stores, sorted, without repetitions."""
    found = set()
    for location in locations:
        if _read(location)[1] in CODED:
            options = dict(parse_qsl(location.partition("?")[2]))
            found.add(options.get("codec", NONE))
    return sorted(name for name in found if is_lossy(name))


def _read(location: str) -> tuple[str, str, str]:
    """Split "name=plug-in:place" into name, plug-in and place."""
    scheme, _, place = location.partition(":")
    name, _, plugin = scheme.rpartition("=")
    return name or plugin, plugin, place


def storage_names(locations: Sequence[str], has_disk: bool) -> list[str]:
    """Return the names of the configured storage tiers, in order.

    Raises ``ConfigError`` if two names are the same.
    """
    names = [DISK] * has_disk + [_read(each)[0] for each in locations]
    _check_names(names)
    return names


def plugins_of(locations: Sequence[str]) -> list[str]:
    """Return the name of the plug-in of each storage location."""
    return [_read(each)[1] for each in locations]


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
