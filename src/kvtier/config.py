"""Settings, one frozen dataclass per part. Units are in the names, meanings beside the fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from kvtier.errors import ConfigError
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
"""Default tokens per block. Smaller blocks are shared more finely and cost more to keep account of;
the embedded engine shares whole chunks anyway."""

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
    """Bytes of a size such as "4GiB", "512 MiB" or 1048576. field: its name, for the message."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f'{field}: {text} is below 0; write for instance "4GiB"')
        return text
    found = isinstance(text, str) and re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in UNITS:
        raise ConfigError(f'{field}: can\'t read {text!r} as a size; write for instance "4GiB"')
    return int(Fraction(found[1]) * UNITS[found[2].upper()])


def parse_capacity(text: str | int, device_bytes: int, field: str) -> int:
    """Bytes of a capacity: a size ("4GiB"), or a multiple of the device pool ("2x")."""
    if isinstance(text, str) and (found := re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*[xX]\s*", text)):
        return int(Fraction(found[1]) * device_bytes)
    return parse_size(text, field)


def check_storage(locations: Sequence[str]) -> None:
    """Raises ``ConfigError`` where one can't be that of a store."""
    for location in locations:
        if not re.fullmatch(r"([\w.-]+=)?[\w.-]+:.*", location):
            shown = f"{location!r} names" if "@" not in location else "a location names"
            raise ConfigError(f'storage: {shown} no plug-in; write it as "plug-in:location"')


def without_password(location: str) -> str:
    """Return the location of a store without all that may be a password, for people."""
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
"""Settings of ``CacheConfig`` that are one of a few words."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of the cache, apart from the model and the device pool."""

    host_capacity: str | int = 0
    """Host DRAM for blocks: "4GiB", bytes, or "2x" the device pool; 0 for no host tier."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    """When a block of the device tier is stored in the host tier."""
    load_policy: LoadPolicy = LoadPolicy.AUTO
    """When cached blocks are loaded rather than computed."""
    store_after_uses: int = 2
    """Uses before ``write_through_selective`` stores a block."""
    store_batch_bytes: int = 16 << 20
    """Blocks wait until this much can be stored in one copy, or until their request ends."""
    disk_path: str | tuple[str, ...] = ""
    """Directory for blocks on a local disk, found again after a restart; "" for no disk tier.
    Several directories, on a disk each: every block is cut over all of them."""
    disk_capacity: str | int = "10GiB"
    """Disk space for blocks, reserved when the cache is made."""
    disk_durability: Durability = Durability.PROCESS
    """Failures that a stored block survives: the end of the ``process``, or also of ``power``."""
    disk_verify: Verify = Verify.ALWAYS
    """Checksum verification of blocks read from disk: ``always``, ``sampled`` or ``off``."""
    disk_io: IoKind = IoKind.AUTO
    """I/O engine of the disk."""
    disk_direct: Direct = Direct.AUTO
    """Whether blocks on disk go directly to the device tier, past the host tier: ``auto`` where
    there is none, and while it is short of room; ``on`` or ``off``."""
    disk_bytes_per_day: str | int = 0
    """Bytes written to the disk per day at most, for disks that wear; 0 for no limit."""
    disk_bytes_per_s: str | int = 0
    """Bytes read from the disk per second at most, and bytes written; 0 for no limit."""
    storage: tuple[str, ...] = field(default=(), repr=False)  # a password may be in it
    """More storage, beside the disk and behind it: "plug-in:location" each, where ``plug-in`` is
    one of ``kvtier.tiers``; "name=plug-in:location" gives the tier a name of its own."""
    storage_capacity: str | int = "10GiB"
    """Room for blocks in each of ``storage``."""
    archive_after_uses: int = 1
    """Uses before a block is written to storage below the host tier; more spares an SSD's life."""
    load_batch_bytes: int = 8 << 20
    """Bytes read from storage in one piece. While one is read, the one before is copied on."""
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.BEST_EFFORT
    """Whether a request waits for what storage has of it before its turn comes."""
    prefetch_timeout_s: float = 1.0
    """Longest wait with ``timeout``."""
    lookup_deadline_s: float = 0.1
    """Longest wait for a shared store's answer to a look-up. With load policy ``auto`` a request
    never waits longer than computing would take. 0 to not wait."""
    eviction_policy: str = "runs"
    """Eviction policy: a plug-in of ``kvtier.policies``. ``runs`` learns which blocks are reused
    and admits a block only if it is worth more than the one it would evict; ``lru`` evicts the
    least recently used block; ``arc``, ``s3fifo``, ``lfuda`` and ``sieve`` are published
    policies. The device tier always uses ``lru``."""
    client_hints: ClientHints = ClientHints.ON
    """Whether priorities and other hints of clients count. What the engine knows of waiting
    requests always does."""
    demote_deadline_s: float = 1.0
    """A demotion (write_back) that takes longer keeps its blocks on the device for now."""
    load_deadline_s: float = 30.0
    """A load that takes longer counts as failed, and its blocks are recomputed."""
    strict: bool = False
    """Check all invariants after every change. For tests: it costs O(blocks) each time."""

    def __post_init__(self) -> None:
        parse_capacity(self.host_capacity, 0, "host_capacity")
        parse_size(self.disk_capacity, "disk_capacity")
        parse_size(self.disk_bytes_per_day, "disk_bytes_per_day")
        parse_size(self.disk_bytes_per_s, "disk_bytes_per_s")
        parse_size(self.storage_capacity, "storage_capacity")
        check_storage(self.storage)
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
