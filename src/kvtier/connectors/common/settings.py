"""Settings from an engine's plug-in option, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from types import NoneType
from typing import ClassVar, Self

from kvtier.config import CodingConfig, check_storage, node_location, parse_size
from kvtier.errors import ConfigError
from kvtier.index.policies.replayed import POLICIES, RUNS
from kvtier.recording import LEAST_BYTES
from kvtier.system.user_paths import check_socket, user_path
from kvtier.tiers.disk import DiskOptions
from kvtier.tiers.row import check_stores, refuse_lossy, storage_names
from kvtier.types import Durability, LoadPolicy, Verify

CHOICES: Mapping[str, type[StrEnum]] = {
    "disk_durability": Durability,
    "disk_verify": Verify,
    "load_policy": LoadPolicy,
}
KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "float": (int, float),
    "int": (int,),
    "str": (str,),
    "str | None": (str, NoneType),
    "str | int": (str, int),
    "str | list[str]": (str, list),
}
HINTS = {
    "bool": "use true or false",
    "float": "write a number",
    "int": "write a number",
    "str": "write it in quotes",
    "str | None": "write it in quotes",
    "str | int": 'write for instance "200GiB", or bytes',
    "disk_path": "name a folder, or a list of folders",
    "node": "name a socket",
    "record": "name a file",
    "storage": 'write a URL such as "valkey://host", or a list of them',
}
"""Advice for an error message, by type of a value or name of a setting."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Settings that all connectors have. Names are the same everywhere in kvtier.

    Sizes are for all ranks on this machine together, and may be written "200GiB".

    Attributes:
        option: the engine's option that holds the settings.
        own: keys in it that the engine reads itself.
    """

    option: ClassVar[str]
    own: ClassVar[frozenset[str]] = frozenset()

    disk_path: str | list[str] = ""
    """Folder for a slab per rank, or folders on several disks, over which each block is striped;
    "" for no disk."""
    disk_capacity: str | int = 0
    """Space on the disk, reserved at the start and never exceeded."""
    disk_durability: str = "process"
    """Failures that a block on disk survives: ``process`` (a crash of the process), or ``power``
    (also a power failure)."""
    disk_verify: str = "always"
    """Checksum verification of reads: ``always``, ``sampled`` or ``off``."""
    disk_bytes_per_day: str | int = 0
    """Most bytes written per day, to limit SSD wear; 0 for no limit."""
    encryption_key: str = field(default="", repr=False)  # a command may have a password in it
    """Source of the keys with which KV on disk and in stores is encrypted: "file:/path", "env:NAME"
    or "command:program arguments"; "" for the value of ``KVTIER_ENCRYPTION_KEY`` in the
    environment, if there is one. The first key encrypts, the others decrypt."""
    load_policy: str = "auto"
    """When KV is loaded: ``auto`` (if that is faster than computing it), or ``always``."""
    namespace: str = ""
    """Name that must be equal for KV in storage to be shared. It covers what kvtier can't detect,
    such as weights that are in no file."""
    record: str = ""
    """File to which requests are recorded for ``kvtier replay``, as salted hashes, lengths and
    times; "" for none."""
    record_max_bytes: str | int = "1GiB"
    """Most bytes of the recording; the oldest requests are deleted."""

    def __post_init__(self) -> None:
        for name, kind in CHOICES.items():
            if getattr(self, name) not in list(kind):
                raise self.wrong(
                    f"{name} can't be {getattr(self, name)!r}; use one of {', '.join(kind)}"
                )
        if bool(self.disk_path) != bool(self.disk_bytes):
            raise self.wrong(
                f"disk_path: {self.disk_path!r} with disk_capacity: {self.disk_capacity!r}; give "
                'both, a folder and how much of it to use, like "200GiB"'
            )
        if self.bytes_per_day < 0:
            raise self.wrong(f"disk_bytes_per_day: {self.disk_bytes_per_day!r} is below 0")
        if self.record_bytes < LEAST_BYTES:
            raise self.wrong(f"record_max_bytes: {self.record_max_bytes!r} is below 1 MiB")

    @classmethod
    def wrong(cls, sentence: str) -> ConfigError:
        """Return a ``ConfigError`` that names the engine's option."""
        return ConfigError(f"{cls.option}: {sentence}")

    def size(self, name: str) -> int:
        """Return the bytes of the setting ``name``."""
        given: str | int = getattr(self, name)
        return parse_size(given, f"{self.option}: {name}") if given else 0

    def disk_options(
        self, subfolder: str = "", capacity_bytes: int = 0, rank: int = 0, num_ranks: int = 1
    ) -> DiskOptions:
        """Return the options of the disk tier.

        Args:
            subfolder: folder below each path.
            capacity_bytes: capacity of this slab; 0 for the whole ``disk_capacity``.
            rank: this rank, among those that share a block.
            num_ranks: number of these ranks.
        """
        paths = [self.disk_path] if isinstance(self.disk_path, str) else self.disk_path
        first, *more = (user_path(each) / subfolder for each in paths)
        return DiskOptions(
            first,
            capacity_bytes or self.disk_bytes,
            tuple(more),
            durability=Durability(self.disk_durability),
            verify=Verify(self.disk_verify),
            rank=rank,
            num_ranks=num_ranks,
            encryption_key=self.encryption_key,
        )

    @property
    def disk_bytes(self) -> int:
        return self.size("disk_capacity")

    @property
    def bytes_per_day(self) -> int:
        return self.size("disk_bytes_per_day")

    @property
    def record_bytes(self) -> int:
        return self.size("record_max_bytes")

    @property
    def always_loads(self) -> bool:
        return self.load_policy == LoadPolicy.ALWAYS

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Return the settings in ``given``.

        Raises ``ConfigError`` for an unknown key, or a value that can't be read.
        """
        known = {each.name: str(each.type) for each in fields(cls)}
        for key in given:
            if key not in known and key not in cls.own:
                near = get_close_matches(key, sorted({*known, *cls.own}), 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise cls.wrong(f"no setting is called {key!r}; {hint}")

        def hint_of(key: str) -> str:
            return HINTS.get(key) or HINTS[known[key]]

        ours = {key: value for key, value in given.items() if key in known}
        for key, value in ours.items():
            is_bool = isinstance(value, bool)
            if not isinstance(value, KINDS[known[key]]) or is_bool != (known[key] == "bool"):
                raise cls.wrong(f"{key} can't be {value!r}; {hint_of(key)}")
            if isinstance(value, list) and not (value and all(map(_is_text, value))):
                raise cls.wrong(f"{key} can't be {value!r}; {hint_of(key)}")
        return cls(**ours)  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(frozen=True, slots=True)
class StoreSettings(ConnectorSettings):
    """Settings of connectors with shared stores and an eviction policy."""

    storage: str | list[str] = field(default="", repr=False)  # a password may be in it
    """Stores that other servers may share, fastest first: URLs such as "valkey://host"."""
    codec: str = "none"
    """Codec of new blocks in stores: ``none``, ``lossless`` (fewer bytes, the same bits), ``auto``
    (``lossless`` for a store that is slow enough to gain by it), or a plug-in of
    ``kvtier.codecs``."""
    storage_capacity: str | int = "1TiB"
    """Capacity of the index of each store: bytes of blocks known at a time."""
    storage_shards: int = 0
    """Shards that a block in stores is cut into by KV heads, so that engines of all tensor parallel
    sizes that divide this number share them; 0 for one per rank, which only engines of the same
    size share."""
    node: str = ""
    """Socket of a node (``kvtier node run``), whose memory, disk and stores the engines of this
    machine share; "" for none. Then there is neither ``disk_path`` nor ``storage`` here."""
    node_tenant: str = ""
    """Tenant whose quota counts in the node. Engines of different tenants share nothing."""
    eviction_policy: str = RUNS
    """Eviction policy: ``runs`` learns which blocks are reused; ``lru`` evicts the least recently
    used; ``arc``, ``s3fifo``, ``lfuda`` and ``sieve`` are published policies. SGLang with several
    pools, and vLLM with KV groups whose blocks have different lengths, use ``lru``."""

    def __post_init__(self) -> None:
        ConnectorSettings.__post_init__(self)
        if self.node and (self.disk_path or self.storage):
            raise self.wrong(
                f"node: {self.node!r} has the disk and the stores; give disk_path and storage to "
                "kvtier node, and not to the engine"
            )
        if self.eviction_policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise self.wrong(
                f"eviction_policy can't be {self.eviction_policy!r}; use one of {known}"
            )
        try:
            check_storage(self._storage)
            if self.node:
                check_socket(self.node, "node")
            storage_names(self.stores, bool(self.disk_path))
            check_stores(self.stores)
            refuse_lossy(self.coding, self.stores)
        except ConfigError as error:
            raise self.wrong(str(error)) from None
        if self.stores and not self.store_bytes:
            raise self.wrong(
                f'storage_capacity: {self.storage_capacity!r} is no room at all; write "1TiB"'
            )
        if self.storage_shards < 0:
            raise self.wrong(f"storage_shards: {self.storage_shards} is below 0")
        if self.storage_shards and not self.rank_stores:
            raise self.wrong(
                "storage_shards is for blocks in a store, and there is no storage here"
            )

    @property
    def stores(self) -> list[str]:
        """URLs of the stores, fastest first. A node counts as one."""
        return [node_location(self.node)] if self.node else self._storage

    @property
    def _storage(self) -> list[str]:
        stores = [self.storage] if isinstance(self.storage, str) else self.storage
        return [store for store in stores if store]

    @property
    def coding(self) -> CodingConfig:
        """Codec and keys of what is stored."""
        return CodingConfig(self.codec, self.encryption_key)

    @property
    def rank_stores(self) -> list[str]:
        """URLs of the stores that the ranks use themselves: none beside a node."""
        return [] if self.node else self.stores

    @property
    def store_bytes(self) -> int:
        return self.size("storage_capacity")

    @property
    def has_storage(self) -> bool:
        """Whether there is a disk or a store."""
        return bool(self.disk_path or self.stores)


@dataclass(frozen=True, slots=True)
class HostSettings(StoreSettings):
    """Settings of connectors that keep KV in host memory, too."""

    host_capacity: str | int = "4GiB"
    """Host DRAM for KV."""
    lookup_deadline_s: float = 0.1
    """Longest wait of a request for a store's answer to a look-up; 0 to not wait."""

    def __post_init__(self) -> None:
        StoreSettings.__post_init__(self)
        if self.host_bytes < 1:
            raise self.wrong(
                f'host_capacity: {self.host_capacity!r} is no room at all; write "8GiB"'
            )
        if self.lookup_deadline_s < 0:
            raise self.wrong(f"lookup_deadline_s: {self.lookup_deadline_s!r} is below 0")

    @property
    def host_bytes(self) -> int:
        return self.size("host_capacity")
