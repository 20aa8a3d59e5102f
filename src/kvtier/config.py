"""Settings, one frozen dataclass per part. Units are in the names, meanings beside the fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from kvtier.errors import ConfigError
from kvtier.system.user_paths import check_socket
from kvtier.types import (
    ClientHints,
    Direct,
    Durability,
    IoKind,
    LoadPolicy,
    PrefetchPolicy,
    Verify,
    WritePolicy,
)

BLOCK_SIZE = 64
"""Default tokens per block. Smaller blocks are shared more finely and cost more bookkeeping. The
embedded engine shares whole chunks anyway."""

CHUNK_TOKENS = 128
"""Default prefill grid of the embedded engine: on average half of it is computed again."""

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def parse_size(text: str | int, field: str) -> int:
    """Return the bytes of a size such as "4GiB", "512 MiB" or 1048576.

    field: name of the setting, for the error message.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f'{field}: {text} is below 0; write for instance "4GiB"')
        return text
    found = isinstance(text, str) and re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in UNITS:
        raise ConfigError(f'{field}: can\'t read {text!r} as a size; write for instance "4GiB"')
    return int(Fraction(found[1]) * UNITS[found[2].upper()])


def parse_capacity(text: str | int, device_bytes: int, field: str) -> int:
    """Return the bytes of a capacity: a size ("4GiB"), or a multiple of the device pool ("2x").

    Args:
        text: the capacity.
        device_bytes: size of the device pool.
        field: name of the setting, for the error message.
    """
    if isinstance(text, str) and (found := re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*[xX]\s*", text)):
        return int(Fraction(found[1]) * device_bytes)
    return parse_size(text, field)


@dataclass(frozen=True, slots=True)
class CodingConfig:
    """Codec and keys of what is stored."""

    codec: str = "none"
    encryption_key: str = field(default="", repr=False)  # a command may have a password in it


DEFAULT_CODING = CodingConfig()


def check_storage(locations: Sequence[str]) -> None:
    """Raise ``ConfigError`` if a location has not the form "plug-in:location"."""
    for location in locations:
        found = re.fullmatch(r"([\w.-]+=)?([\w.-]+):(.*)", location)
        if found is not None and found[2] == "node":
            raise ConfigError(
                "storage: a node is no store; give its socket as the setting node, and the tenant "
                "as node_tenant (--node and --node-tenant on the command line)"
            )
        if found is None:
            shown = f"{location!r} names" if "@" not in location else "a location names"
            raise ConfigError(f'storage: {shown} no plug-in; write it as "plug-in:location"')


def node_location(socket: str) -> str:
    """Return the location of the storage tier in a node, by the path of its socket."""
    return f"node:{socket}"


def without_password(location: str) -> str:
    """Return the location of a store without its password, for messages."""
    return re.sub(r"//.*@", "//", location, flags=re.DOTALL)


CHOICES: dict[str, type[StrEnum]] = {
    "write_policy": WritePolicy,
    "load_policy": LoadPolicy,
    "prefetch_policy": PrefetchPolicy,
    "client_hints": ClientHints,
    "disk_durability": Durability,
    "disk_verify": Verify,
    "disk_io": IoKind,
    "disk_direct": Direct,
}
"""Settings of ``CacheConfig`` that take one of a few values."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of the cache, apart from the model and the device pool."""

    host_capacity: str | int = 0
    """Host DRAM for blocks: "4GiB", bytes, or "2x" the device pool; 0 for no host tier."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    """When a block of the device tier is stored in the host tier: on commit
    (``write_through``), after several uses (``write_through_selective``), or on eviction
    (``write_back``)."""
    load_policy: LoadPolicy = LoadPolicy.AUTO
    """When cached blocks are loaded rather than recomputed: ``auto`` if loading is predicted to be
    faster, or ``always``."""
    store_after_uses: int = 2
    """Uses before ``write_through_selective`` stores a block."""
    store_batch_bytes: int = 16 << 20
    """Blocks wait until this many bytes can be stored in one copy, or until their request ends."""
    disk_path: str | tuple[str, ...] = ""
    """Directory for blocks on a local disk; they survive a restart. "" for no disk tier. With
    several directories, one per disk, every block is striped over all of them."""
    disk_capacity: str | int = "10GiB"
    """Disk space for blocks, reserved when the cache is made."""
    disk_durability: Durability = Durability.PROCESS
    """Failures that a stored block survives: ``process`` (a crash of the process), or ``power``
    (also a power failure)."""
    disk_verify: Verify = Verify.ALWAYS
    """Checksum verification of blocks read from disk: ``always``, ``sampled`` or ``off``."""
    disk_io: IoKind = IoKind.AUTO
    """I/O engine of the disk: ``uring``, ``preadv``, or ``auto``."""
    disk_direct: Direct = Direct.AUTO
    """Whether blocks on disk are read directly into the device tier, past the host tier: ``on``,
    ``off``, or ``auto`` (if there is no host tier, or while it is short of free slots)."""
    disk_bytes_per_day: str | int = 0
    """Most bytes written to the disk per day, to limit SSD wear; 0 for no limit."""
    disk_bytes_per_s: str | int = 0
    """Most bytes per second read from the disk, and most bytes per second written to it; 0 for no
    limit."""
    storage: tuple[str, ...] = field(default=(), repr=False)  # a password may be in it
    """More storage tiers, behind the disk: "plug-in:location" each, where ``plug-in`` is
    an entry point of ``kvtier.tiers``. "name=plug-in:location" names the tier."""
    codec: str = "none"
    """Codec of new blocks in ``storage``: ``none``, ``lossless`` (fewer bytes, the same bits),
    ``auto`` (``lossless`` for a store that is slow enough to gain by it), ``fp8`` or ``int8`` (a
    byte per element: lossy, under names of its own, and for the embedded engine only), or a plug-in
    of ``kvtier.codecs``."""
    encryption_key: str = field(default="", repr=False)  # a command may have a password in it
    """Source of the keys with which blocks on disk and in ``storage`` are encrypted: "file:/path",
    "env:NAME" or "command:program arguments"; "" for the value of ``KVTIER_ENCRYPTION_KEY`` in the
    environment, if there is one. The first key encrypts, the others decrypt."""
    storage_capacity: str | int = "10GiB"
    """Capacity for blocks in each of ``storage``."""
    node: str = ""
    """Socket of a node (``kvtier node run``), whose memory, disk and stores the engines of this
    machine share; "" for none. It is one more storage tier, in front of ``storage``."""
    node_tenant: str = ""
    """Tenant whose quota counts in the node; "" for the default one. Engines of different tenants
    share nothing."""
    archive_after_uses: int = 1
    """Uses before a block is written to storage below the host tier. A larger number reduces SSD
    wear."""
    load_batch_bytes: int = 8 << 20
    """Bytes read from storage in one piece. While a piece is read, the one before is copied to the
    device."""
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.BEST_EFFORT
    """Whether a queued request is scheduled before its blocks have been read from storage:
    ``best_effort``, ``wait_complete`` or ``timeout``."""
    prefetch_timeout_s: float = 1.0
    """Longest wait with prefetch policy ``timeout``."""
    lookup_deadline_s: float = 0.1
    """Longest wait for a shared store's answer to a look-up; 0 to not wait. With load policy
    ``auto`` a request never waits longer than computing would take."""
    eviction_policy: str = "runs"
    """Eviction policy: a plug-in of ``kvtier.policies``. ``runs`` learns which blocks are reused
    and admits a block only if it is worth more than the one it would evict; ``lru`` evicts the
    least recently used block; ``arc``, ``s3fifo``, ``lfuda`` and ``sieve`` are published
    policies. The device tier always uses ``lru``."""
    client_hints: ClientHints = ClientHints.ON
    """Whether priorities and other hints of clients are used. What the engine reports about queued
    requests is always used."""
    demote_deadline_s: float = 1.0
    """Longest wait for a demotion (``write_back``). After it, the blocks stay on the device for
    now."""
    load_deadline_s: float = 30.0
    """Longest duration of a load. After it, the load counts as failed, and its blocks are
    recomputed."""
    strict: bool = False
    """Check all invariants after every change, at a cost of O(blocks) each time. For tests."""

    def __post_init__(self) -> None:
        parse_capacity(self.host_capacity, 0, "host_capacity")
        parse_size(self.disk_capacity, "disk_capacity")
        parse_size(self.disk_bytes_per_day, "disk_bytes_per_day")
        parse_size(self.disk_bytes_per_s, "disk_bytes_per_s")
        parse_size(self.storage_capacity, "storage_capacity")
        check_storage(self.storage)
        if self.node:
            check_socket(self.node, "node")
        for name, kind in CHOICES.items():
            value = getattr(self, name)
            if value not in list(kind):
                raise ConfigError(f"{name}: {value!r} is unknown; use one of {', '.join(kind)}")
            # A file or a command line gives a string; what compares members needs the member.
            object.__setattr__(self, name, kind(value))
        for name in ("store_after_uses", "archive_after_uses", "load_batch_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        for name in ("store_batch_bytes", "lookup_deadline_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 0")
        for name in ("load_deadline_s", "demote_deadline_s", "prefetch_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")

    @property
    def coding(self) -> CodingConfig:
        """Codec and keys of what is stored."""
        return CodingConfig(self.codec, self.encryption_key)

    @property
    def locations(self) -> tuple[str, ...]:
        """Locations of the storage tiers behind the disk, fastest first. A node counts as one."""
        return (node_location(self.node), *self.storage) if self.node else self.storage
