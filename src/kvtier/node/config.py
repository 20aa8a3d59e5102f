"""Configuration of a node."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.core.config import NodeCacheConfig, check_storage, parse_size, setting
from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import check_socket, user_path

DEFAULT_SOCKET = Path("/run/kvtier/node.sock")
SHARED_MEMORY = Path("/dev/shm")
DEFAULT_TENANT = "default"
"""Tenant of engines that name none."""
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*(-[A-Za-z0-9._]+)*")
MAX_TENANT_LETTERS = 64
MAX_NAMED = 8
"""Most tenants that one message names."""


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """Bounds of one tenant's host memory and of its slabs, in bytes.

    Below its floor nothing is taken from a tenant for others, and above its ceiling it gets nothing
    more. Memory is given in whole segments: a floor is rounded up to them, a ceiling down. Slabs
    keep their size: bounds that change count for new ones.
    """

    host_floor: int = 0
    host_ceiling: int | None = None
    disk_floor: int = 0
    disk_ceiling: int | None = None

    def floor_segments(self, segment_bytes: int) -> int:
        """Return the number of segments that are reserved for the tenant."""
        return -(-self.host_floor // segment_bytes)

    def ceiling_segments(self, segment_bytes: int) -> int | None:
        """Return the most segments that the tenant may have; None for no bound."""
        return None if self.host_ceiling is None else self.host_ceiling // segment_bytes

    def check(self, tenant: str) -> None:
        """Raise ``ConfigError`` for a floor above its ceiling. tenant: for the message."""
        bounds = (self.host_floor, self.host_ceiling), (self.disk_floor, self.disk_ceiling)
        for floor, ceiling in bounds:
            if ceiling is not None and floor > ceiling:
                raise ConfigError(
                    f"quota: tenant {tenant!r} has a floor of {floor} bytes, which is above the "
                    f"ceiling of {ceiling}; lower it"
                )


def check_tenant(name: str) -> None:
    """Raise ``ConfigError`` for a name that can't be a part of a file's name."""
    if len(name) > MAX_TENANT_LETTERS or not TENANT.fullmatch(name):
        raise ConfigError(
            f"tenant: {name[:MAX_TENANT_LETTERS]!r} is no name; use at most {MAX_TENANT_LETTERS} "
            "letters, digits, dots, underscores and single dashes"
        )


Bounds = tuple[int, int | None]
"""Floor and ceiling."""
NO_CEILING = "none"
"""Text of a ceiling that is to be removed."""


def split_bounds(text: str) -> tuple[str, str | None, str | None]:
    """Return the tenant, the floor and the ceiling of "team-a=10GiB:40GiB".

    Either may be missing, which is None. Raises ``ConfigError``.
    """
    tenant, equals, bounds = text.partition("=")
    floor, _, ceiling = map(str.strip, bounds.partition(":"))
    if not equals or not (floor or ceiling):
        raise ConfigError(
            f'quota: {text!r} names no bounds; write "team-a=10GiB:40GiB" for a floor and a ceiling'
        )
    check_tenant(tenant)
    return tenant, floor or None, ceiling or None


def change_bounds(bounds: Bounds, floor: str | None, ceiling: str | None) -> Bounds:
    """Return bounds with another floor, or ceiling. What is None stays as it is.

    ceiling: ``NO_CEILING`` for none. Raises ``ConfigError`` for text that is no size.
    """
    lowest, highest = bounds
    if floor is not None:
        lowest = parse_size(floor, "quota")
    if ceiling is not None:
        highest = None if ceiling == NO_CEILING else parse_size(ceiling, "quota")
    return lowest, highest


def parse_quotas(host: Iterable[str], disk: Iterable[str] = ()) -> dict[str, TenantQuota]:
    """Return the quotas by tenant. host, disk: bounds of each, as texts of ``split_bounds``."""
    of_host, of_disk = _all_bounds(host), _all_bounds(disk)
    quotas = {
        tenant: TenantQuota(*of_host.get(tenant, (0, None)), *of_disk.get(tenant, (0, None)))
        for tenant in of_host | of_disk
    }
    for tenant, quota in quotas.items():
        quota.check(tenant)
    return quotas


def _all_bounds(texts: Iterable[str]) -> dict[str, Bounds]:
    found: dict[str, Bounds] = {}
    for tenant, floor, ceiling in map(split_bounds, texts):
        if tenant in found:
            raise ConfigError(f"quota: {tenant!r} is named twice; give it one quota")
        found[tenant] = change_bounds((0, None), floor, ceiling)
    return found


def parse_tenant_users(texts: Iterable[str]) -> dict[str, frozenset[int]]:
    """Return the users of several "team-a=1000,1001" by tenant. Raises ``ConfigError``."""
    tenants: dict[str, frozenset[int]] = {}
    for text in texts:
        tenant, _, users = text.partition("=")
        check_tenant(tenant)
        if tenant in tenants or not all(user.strip().isdecimal() for user in users.split(",")):
            raise ConfigError(
                f"tenant_users: {text!r} names no users, or a tenant twice; see --help"
            )
        tenants[tenant] = frozenset(map(int, users.split(",")))
    return tenants


@dataclass(frozen=True, slots=True)
class EventsAddress:
    """Addresses at which the events of one model are published, and replayed; "" for no replay."""

    endpoint: str
    replay: str = ""
    topic: str = ""


def parse_events(texts: Iterable[str]) -> dict[str, EventsAddress]:
    """Return the addresses by model, from several "model=tcp://host:5557,tcp://host:5558,topic".

    All but the first address may be missing; without a model in front it is "". Raises
    ``ConfigError``.
    """
    found: dict[str, EventsAddress] = {}
    for text in texts:
        addresses = re.search(r"(^|=)([a-z]+://.*)", text)
        parts = addresses[2].split(",", 2) if addresses else []
        model = text[: addresses.start()] if addresses else ""
        if not parts or model in found:
            raise ConfigError(
                f"events: {text!r} has no address, or a model that has one; write "
                '"my-model=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558" for events and their replay'
            )
        found[model] = EventsAddress(*parts)
    return found


def check_quotas(
    quotas: Mapping[str, TenantQuota], num_segments: int, segment_bytes: int, disk_bytes: int | None
) -> None:
    """Raise ``ConfigError`` for quotas that can't be kept.

    num_segments, segment_bytes: of the memory. disk_bytes: of all slabs; None if they are not
    bounded.
    """
    floors: dict[str, int] = {}
    for tenant, quota in quotas.items():
        quota.check(tenant)
        floor, ceiling = quota.floor_segments(segment_bytes), quota.ceiling_segments(segment_bytes)
        floors[tenant] = floor
        if ceiling == 0 and quota.host_ceiling:
            raise ConfigError(
                f"quota: tenant {tenant!r} has a ceiling of {quota.host_ceiling} bytes, which is "
                f"below one segment of {segment_bytes}, so it would get no memory; raise it, lower "
                "segment_capacity, or write 0"
            )
        if ceiling is not None and floor > ceiling:
            raise ConfigError(
                f"quota: tenant {tenant!r} has a floor of {quota.host_floor} bytes and a ceiling "
                f"of {quota.host_ceiling}: in segments of {segment_bytes} bytes that is {floor} "
                f"and {ceiling}; give whole segments, or lower segment_capacity"
            )
    if sum(floors.values()) > num_segments:
        largest = sorted(filter(floors.get, floors), key=floors.__getitem__, reverse=True)
        named = ", ".join(f"{tenant} {floors[tenant]}" for tenant in largest[:MAX_NAMED])
        others = ", ..." if len(largest) > MAX_NAMED else ""
        raise ConfigError(
            f"quota: the floors add up to {sum(floors.values())} segments of {segment_bytes} bytes "
            f"({named}{others}), and host_capacity has {num_segments}; lower them, or "
            "segment_capacity"
        )
    on_disk = sum(quota.disk_floor for quota in quotas.values())
    if on_disk and disk_bytes is None:
        raise ConfigError("disk_quota: a floor on disk needs disk_total; set it")
    if disk_bytes is not None and on_disk > disk_bytes:
        raise ConfigError(
            f"disk_quota: the floors add up to {on_disk} bytes, and disk_total is {disk_bytes}; "
            "lower them"
        )


@dataclass(frozen=True)
class NodeConfig(NodeCacheConfig):
    """Settings of ``kvtier node``. Every model has a slab of ``disk_capacity``."""

    socket: Path = setting(DEFAULT_SOCKET, "Path of the Unix socket that engines connect to.")
    memory_path: Path | None = setting(
        None, "Directory in memory for the shared memory.", shown="one below /dev/shm"
    )
    control_port: int | None = setting(
        None,
        "TCP port of 127.0.0.1 for /metrics, /health and /status; 0 for any. Changes are made over "
        "the control socket only.",
        shown="none",
    )
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)
    """Quotas of tenants at the start; they may be changed while the node runs."""
    tenant_users: Mapping[str, Collection[int]] = field(default_factory=dict)
    """By tenant, the users (uids) that may name it. The node's own user and root may name every
    tenant, others only those that list them. Everybody may name the default tenant, unless it is
    listed here."""

    events: Mapping[str, EventsAddress] = field(default_factory=dict)
    """By model, or tenant and model as in "team-a/model", where events are published; "" is for the
    first model that engines bring and that has none of its own."""

    def __post_init__(self) -> None:
        # Imported here, since help shows these settings without numpy and the native core.
        from kvtier.index.policies.replayed import POLICIES
        from kvtier.tiers.remote.warm_start import warm_start_of

        object.__setattr__(self, "socket", user_path(self.socket))
        for path in self.socket, self.control_socket:
            check_socket(path, "socket")
        if self.memory_path is not None:
            object.__setattr__(self, "memory_path", user_path(self.memory_path))
        if self.disk_path:
            object.__setattr__(self, "disk_path", str(user_path(self.disk_path)))
        if self.eviction_policy not in POLICIES:
            raise ConfigError(
                f"eviction_policy: {self.eviction_policy!r} is unknown; use one of "
                f"{', '.join(POLICIES)}"
            )
        if self.control_port is not None and not 0 <= self.control_port <= 65535:
            raise ConfigError(f"control_port: {self.control_port} is no TCP port; use 0 to 65535")
        for name in ("disk_capacity", "storage_capacity"):
            parse_size(getattr(self, name), name)
        check_storage(self.stores)
        warm_start_of(self.stores, self.warm_start)
        check_quotas(
            self.quotas,
            self.host_bytes // self.segment_bytes,
            self.segment_bytes,
            self.disk_bytes,
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return parse_size(self.host_capacity, "host_capacity")

    @property
    def disk_bytes(self) -> int | None:
        """Most bytes of all slabs; None for no bound."""
        return parse_size(self.disk_total, "disk_total") if self.disk_total else None

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment, in whole pages."""
        num_bytes = parse_size(self.segment_capacity, "segment_capacity")
        if num_bytes < 1 or num_bytes % mmap.PAGESIZE:
            raise ConfigError(
                f"segment_capacity: {num_bytes} bytes are no whole pages; give a multiple of "
                f"{mmap.PAGESIZE}"
            )
        return num_bytes

    @property
    def directory(self) -> Path:
        """Directory of the arena."""
        if self.memory_path is not None:
            return self.memory_path
        name = str(self.socket.absolute()).strip("/").replace("/", "-")
        return SHARED_MEMORY / f"kvtier-{name}"

    def admits(self, tenant: str, uid: int) -> bool:
        """Return whether processes of a user may name a tenant."""
        if uid in (0, os.geteuid()):
            return True
        users = self.tenant_users.get(tenant)
        return tenant == DEFAULT_TENANT if users is None else uid in users

    @property
    def control_socket(self) -> Path:
        """Path of the control API's socket."""
        return control_socket(self.socket)


def control_socket(socket: Path) -> Path:
    """Return the path of the control API's socket, beside the one for engines."""
    path = user_path(socket)
    return path.with_name(f"{path.stem}.control{path.suffix}")
