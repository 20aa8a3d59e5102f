"""Settings: one frozen dataclass per part, and those of the embedded engine's cache.

A part is declared here once. Commands, connectors, the node and the reference are made from the
fields of the parts that they have: names, defaults and meanings are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import Self, TypeVar

from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import check_socket
from kvtier.core.types import (
    CacheMode,
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

SIZE = 'write for instance "200GiB", or bytes'

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


def check_share(audit: object) -> None:
    """Raise ``ConfigError`` unless the setting ``audit`` is a share."""
    if isinstance(audit, bool) or not (isinstance(audit, int | float) and 0 <= audit <= 1):
        raise ConfigError(f"audit: {audit!r} is no share of hits; give a number from 0 to 1")


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


Value = TypeVar("Value")


def setting(
    default: Value,
    meaning: str,
    *,
    shown: str = "",
    advice: str = "",
    is_secret: bool = False,
    panel: str = "",
    option: Mapping[str, object] = MappingProxyType({}),
) -> Value:
    """Return the field of a setting, for commands, connectors, files and the reference at once.

    Args:
        default: its default, everywhere.
        meaning: what it is, with its unit, as help shows it.
        shown: default as help shows it, if that is not the value.
        advice: what to write, for a value of the wrong type.
        is_secret: whether a password may be in it, so that it is not shown.
        panel: part of a command's help in which it stands, if that is not the command's usual one.
        option: more of its option on the command line: "names", bounds, a metavariable.
    """
    metadata = {
        "meaning": meaning,
        "shown": shown,
        "advice": advice,
        "panel": panel,
        "option": option,
    }
    made: Value = field(default=default, repr=not is_secret, metadata=metadata)
    return made


def choose(settings: object) -> None:
    """Replace the texts of settings that take one of a few values by members of their enum.

    A file or a command line gives texts; what compares members needs the member.

    settings: a frozen dataclass. Raises ``ConfigError`` for another value.
    """
    for name, kind in CHOICES.items():
        value = getattr(settings, name, None)
        if value is None:
            continue
        if value not in list(kind):
            raise ConfigError(f"{name} can't be {value!r}; use one of {', '.join(kind)}")
        object.__setattr__(settings, name, kind(value))


def variable_of(name: str) -> str:
    """Return the environment variable of a setting; "" if it has none.

    ``encryption_key`` has none: its variable holds the keys themselves, not where they are.
    """
    return "" if name == "encryption_key" else f"KVTIER_{name.upper()}"


CHOICES: dict[str, type[StrEnum]] = {
    "mode": CacheMode,
    "write_policy": WritePolicy,
    "load_policy": LoadPolicy,
    "prefetch_policy": PrefetchPolicy,
    "client_hints": ClientHints,
    "disk_durability": Durability,
    "disk_verify": Verify,
    "disk_io": IoKind,
    "disk_direct": Direct,
}
"""Settings that take one of a few values."""


@dataclass(frozen=True)
class HostConfig:
    """Settings of host memory, and of requests that wait for it to be filled."""

    host_capacity: str | int = setting(0, 'Host DRAM for KV: "4GiB"; 0 for none.', advice=SIZE)
    lookup_deadline_s: float = setting(
        0.1,
        "Longest wait of a request for a store's answer to a look-up, in seconds; 0 to not wait. "
        "With load policy auto, it never waits longer than computing would take.",
    )


@dataclass(frozen=True)
class DiskConfig:
    """Place and size of the disk tier."""

    disk_path: str | Sequence[str] = setting(
        "",
        "Directory for KV on a local disk; the KV survives a restart. Several directories, one per "
        "disk, stripe every block over all of them.",
        shown="none",
        advice="name a folder, or a list of folders",
    )
    disk_capacity: str | int = setting(
        "10GiB", "Disk space for KV, reserved at the start and never exceeded.", advice=SIZE
    )


@dataclass(frozen=True)
class DiskSafetyConfig(DiskConfig):
    """The disk tier, what its blocks survive, and what it may wear out."""

    disk_durability: Durability = setting(
        Durability.PROCESS,
        "Failures that stored KV survives: process (a crash of the process), or power (also a "
        "power failure).",
    )
    disk_verify: Verify = setting(
        Verify.ALWAYS, "Reads from disk for which the checksum is verified: always, sampled or off."
    )
    disk_bytes_per_day: str | int = setting(
        0, 'Most bytes written per day, to limit SSD wear: "500GiB"; 0 for no limit.', advice=SIZE
    )


@dataclass(frozen=True)
class StoreConfig:
    """Settings of stores."""

    storage: str | Sequence[str] = setting(
        (),
        'Stores for KV that other servers may share, below the disk, fastest first: "valkey://host"'
        ', "s3://bucket/prefix" (also gs:// and az://), "dir:///mnt/shared/kv?capacity=2TiB", or '
        '"plug-in:location" with an entry point of kvtier.tiers. "name=..." names the tier. Give a '
        "password in the environment, not here.",
        shown="none",
        advice='write a URL such as "valkey://host", or a list of them',
        is_secret=True,
    )
    storage_capacity: str | int = setting(
        "1TiB",
        "Bytes of KV in each store that are known at a time, which does not limit the store; of a "
        "plug-in that is not shared, the bytes that it stores.",
        advice=SIZE,
    )
    warm_start: str | int = setting(
        0,
        "Bytes of KV to copy in the background, at the start, from the last store into a directory "
        'of this machine in front of it ("dir:///var/kv?capacity=300GiB"), what was used or '
        'written last first: "200GiB"; 0 for none.',
        advice=SIZE,
    )

    @property
    def stores(self) -> list[str]:
        """Locations of the stores, fastest first."""
        if isinstance(self.storage, str):
            return [self.storage] if self.storage else []
        return [*self.storage]


@dataclass(frozen=True)
class KeyConfig:
    """Keys of what is stored."""

    encryption_key: str = setting(
        "",
        'Keys with which KV on disk and in stores is encrypted: "file:/path", "env:NAME" or '
        '"command:program arguments"; none for no encryption. The first key encrypts, the others '
        "decrypt.",
        shown="KVTIER_ENCRYPTION_KEY in the environment, if set",
        is_secret=True,
    )


@dataclass(frozen=True)
class CodecConfig:
    """Codec of what is stored."""

    codec: str = setting(
        "none",
        "Codec of new KV in stores: none, lossless (fewer bytes, the same bits), auto (lossless "
        "for a store that is slow enough to gain by it), or a plug-in of kvtier.codecs. In the "
        "embedded engine also fp8 or int8: lossy, and under names of their own.",
    )


@dataclass(frozen=True)
class CodingConfig(KeyConfig, CodecConfig):
    """Codec and keys of what is stored."""

    @property
    def coding(self) -> CodingConfig:
        """Codec and keys alone."""
        return CodingConfig(self.codec, self.encryption_key)


DEFAULT_CODING = CodingConfig()


@dataclass(frozen=True)
class NodeClientConfig(StoreConfig):
    """Settings of an engine whose storage may be in a node."""

    node: str = setting(
        "",
        "Socket of a node (kvtier node run), whose memory, disk and stores the engines of this "
        "machine share.",
        shown="none",
        advice="name a socket",
    )
    node_tenant: str = setting(
        "",
        "Tenant whose quota counts in the node. Engines of different tenants share nothing.",
        shown="the default one",
    )
    engine_name: str = setting(
        "",
        "Name of this engine on the node's page and in its metrics, in front of its model and "
        "port.",
        shown="none",
    )

    def titled(self, model: str, port: int | None = None) -> Self:
        """Return the settings with the engine's model and port in its name, as far as known."""
        served = model.rstrip("/").rpartition("/")[2] + (f" on port {port}" if port else "")
        name = ": ".join(filter(None, (self.engine_name, served)))
        return replace(self, engine_name=name)

    @property
    def locations(self) -> list[str]:
        """Locations of the storage tiers behind the disk, fastest first. A node counts as one."""
        return [*([node_location(self.node)] if self.node else []), *self.stores]


@dataclass(frozen=True)
class LoadConfig:
    """When stored KV is used."""

    load_policy: LoadPolicy = setting(
        LoadPolicy.AUTO,
        "When KV is loaded: auto, if that is predicted to be faster than computing it, or always.",
    )


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Share of hits that are verified by computing them again; see ``check_share``."""

    audit: float = setting(
        0.0,
        "Share of hits of which a part is computed again and compared, to find KV that is not what "
        "the model computes now: 0.001 for one in a thousand; 0 for none.",
        advice="write a number from 0 to 1",
        panel="Cache",
    )


@dataclass(frozen=True)
class ModeConfig:
    """Whether an engine loads from the cache and stores into it."""

    mode: CacheMode = setting(
        CacheMode.BOTH,
        "Whether this engine loads KV and stores it: both, save_only (a decode server that gets "
        "its KV by another connector), or load_only.",
    )


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of what stays."""

    eviction_policy: str = setting(
        "runs",
        "Eviction policy below the device: runs learns which KV is reused, and admits only what is "
        "worth more than it would evict; lru evicts the least recently used; arc, s3fifo, lfuda "
        "and sieve are published policies.",
    )


@dataclass(frozen=True)
class RecordConfig:
    """Settings of the recording of requests."""

    record: str = setting(
        "",
        "File to record requests to for kvtier replay: salted hashes, lengths and times, no text "
        "and no token ids.",
        shown="none",
        advice="name a file",
    )
    record_max_bytes: str | int = setting(
        "1GiB", "Most bytes of the recording; the oldest requests are deleted.", advice=SIZE
    )


@dataclass(frozen=True)
class RequestConfig(RecordConfig):
    """Settings of an engine's requests, apart from where their KV lies."""

    namespace: str = setting(
        "",
        "Text that must be equal for KV in storage to be shared. It covers what kvtier can't "
        "detect, such as weights that are in no file.",
        shown="none",
    )


@dataclass(frozen=True)
class ShardConfig:
    """Settings of blocks in stores that engines of other sizes share."""

    storage_shards: int = setting(
        0,
        "Shards that a block in stores is cut into by KV heads, so that engines of all tensor "
        "parallel sizes that divide this number share them; 0 for one per rank, which only engines "
        "of the same size share.",
    )


@dataclass(frozen=True)
class StageConfig(ShardConfig):
    """The same, for pipeline parallelism, too."""

    storage_stages: int = setting(
        0,
        "With storage_shards: runs of layers that shards are cut into as well, so that engines of "
        "all pipeline parallel sizes that divide this number share them; 0 to not cut layers.",
    )


@dataclass(frozen=True)
class NodeCacheConfig(PolicyConfig, CodingConfig, StoreConfig, DiskConfig, HostConfig):
    """Settings of a node's cache."""

    host_capacity: str | int = setting("1GiB", 'Host memory for KV: "512GiB".')
    disk_path: str = setting(
        "", "Directory for KV on a local disk; it survives a restart.", shown="none"
    )
    segment_capacity: str = setting(
        "64MiB",
        "Size of a segment of host memory, which holds blocks of one model; the largest block must "
        "fit.",
    )
    disk_total: str = setting("", "Most disk space of all models together.", shown="no bound")


@dataclass(frozen=True)
class CacheConfig(
    LoadConfig, PolicyConfig, CodingConfig, NodeClientConfig, DiskSafetyConfig, HostConfig
):
    """Settings of the cache, apart from the model and the device pool."""

    write_policy: WritePolicy = setting(
        WritePolicy.WRITE_THROUGH,
        "When blocks of the device tier are stored in the host tier: on commit (write_through), "
        "after several uses (write_through_selective), or on eviction (write_back).",
    )
    store_after_uses: int = setting(2, "Uses before write_through_selective stores a block.")
    store_batch_bytes: int = setting(
        16 << 20,
        "Blocks wait until this many bytes can be stored in one copy, or until their request ends.",
    )
    disk_io: IoKind = setting(IoKind.AUTO, "I/O engine of the disk: uring, preadv, or auto.")
    disk_direct: Direct = setting(
        Direct.AUTO,
        "Whether KV on disk is read directly into the device, past host memory. auto: if there is "
        "no host tier, or while it is short of free slots; into an accelerator only if that was "
        "tried and disk_verify is not always.",
    )
    disk_bytes_per_s: str | int = setting(
        0,
        "Most bytes per second read from the disk, and most bytes per second written to it; 0 for "
        "no limit.",
    )
    archive_after_uses: int = setting(
        1,
        "Uses before a block is written to storage below the host tier. A larger number reduces "
        "SSD wear.",
    )
    load_batch_bytes: int = setting(
        8 << 20,
        "Bytes read from storage in one piece. While a piece is read, the one before is copied to "
        "the device.",
    )
    prefetch_policy: PrefetchPolicy = setting(
        PrefetchPolicy.BEST_EFFORT,
        "Whether a queued request is scheduled before its KV has been read from storage: "
        "best_effort, wait_complete or timeout.",
    )
    prefetch_timeout_s: float = setting(
        1.0, "Longest wait with prefetch policy timeout, in seconds."
    )
    client_hints: ClientHints = setting(
        ClientHints.ON,
        "Whether priorities and other hints of clients are used. What the engine reports about "
        "queued requests is always used.",
    )
    demote_deadline_s: float = setting(
        1.0,
        "Longest wait for a demotion (write_back). After it, the blocks stay on the device for "
        "now.",
    )
    load_deadline_s: float = setting(
        30.0,
        "Longest duration of a load. After it, the load counts as failed, and its blocks are "
        "recomputed.",
    )
    strict: bool = setting(
        False,
        "For tests: check all invariants after every change, at a cost of O(blocks) each time.",
    )

    def __post_init__(self) -> None:
        parse_capacity(self.host_capacity, 0, "host_capacity")
        for name in ("disk_capacity", "disk_bytes_per_day", "disk_bytes_per_s", "storage_capacity"):
            parse_size(getattr(self, name), name)
        check_storage(self.stores)
        if self.node:
            check_socket(self.node, "node")
        choose(self)
        for name in ("store_after_uses", "archive_after_uses", "load_batch_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        for name in ("store_batch_bytes", "lookup_deadline_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 0")
        for name in ("load_deadline_s", "demote_deadline_s", "prefetch_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")
