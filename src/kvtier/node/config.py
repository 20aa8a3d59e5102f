"""Configuration of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.config import parse_size
from kvtier.errors import ConfigError
from kvtier.index.policies.replayed import POLICIES, RUNS

DEFAULT_SOCKET = Path("/run/kvtier/node.sock")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """Bounds of one tenant's host memory and disk, in bytes.

    Below its floor nothing is taken from a tenant for others, and above its ceiling it gets nothing
    more.
    """

    host_floor: int = 0
    host_ceiling: int | None = None

    def __post_init__(self) -> None:
        if self.host_ceiling is not None and self.host_floor > self.host_ceiling:
            raise ConfigError(
                f"quota: a floor of {self.host_floor} bytes is above the ceiling of "
                f"{self.host_ceiling}; lower it"
            )


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Settings of ``kvtier node``.

    Args:
        socket: path of the Unix socket that engines connect to.
        host_capacity: bytes of host memory, as text: "512GiB".
        segment_capacity: bytes of a segment of it. A segment holds blocks of one size.
        memory_path: directory in memory for the arena; by default one below ``/dev/shm`` that is
            named after the socket.
        disk_path: directory of the slabs; "" for none.
        disk_capacity: bytes of each slab; every model has its own.
        storage: URLs of stores.
        storage_capacity: bytes in each store.
        eviction_policy: policy of all tiers.
        lookup_deadline_s: longest wait for a store's answer to a look-up.
        quotas: by tenant.
    """

    socket: Path = DEFAULT_SOCKET
    host_capacity: str = "1GiB"
    segment_capacity: str = "64MiB"
    memory_path: Path | None = None
    disk_path: str = ""
    disk_capacity: str = "10GiB"
    storage: Sequence[str] = field(default=(), repr=False)  # a password may be in it
    storage_capacity: str = "100GiB"
    eviction_policy: str = RUNS
    lookup_deadline_s: float = 0.05
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "socket", Path(self.socket))
        if self.eviction_policy not in POLICIES:
            raise ConfigError(
                f"eviction_policy: {self.eviction_policy!r} is unknown; use one of "
                f"{', '.join(POLICIES)}"
            )
        floors = sum(quota.host_floor for quota in self.quotas.values())
        if floors > self.host_bytes:
            raise ConfigError(
                f"quota: the floors add up to {floors} bytes, and host_capacity is "
                f"{self.host_bytes}; lower them"
            )

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return parse_size(self.host_capacity, "host_capacity")

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment."""
        return parse_size(self.segment_capacity, "segment_capacity")

    @property
    def directory(self) -> Path:
        """Directory of the arena."""
        if self.memory_path is not None:
            return self.memory_path
        name = str(self.socket.absolute()).strip("/").replace("/", "-")
        return SHARED_MEMORY / f"kvtier-{name}"

    def quota(self, tenant: str) -> TenantQuota:
        """Return the quota of a tenant."""
        return self.quotas.get(tenant, TenantQuota())
