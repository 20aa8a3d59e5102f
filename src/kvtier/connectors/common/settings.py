"""Settings from an engine's plug-in option, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import NoneType
from typing import ClassVar, Self

from kvtier.core.config import (
    SIZE,
    AuditConfig,
    CodingConfig,
    DiskSafetyConfig,
    HostConfig,
    KeyConfig,
    LoadConfig,
    ModeConfig,
    NodeClientConfig,
    PolicyConfig,
    RequestConfig,
    ShardConfig,
    check_share,
    check_storage,
    choose,
    parse_size,
    setting,
)
from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import check_socket, user_path
from kvtier.core.types import ClientHints, LoadPolicy
from kvtier.index.policies.replayed import POLICIES
from kvtier.observe.recording import LEAST_BYTES
from kvtier.tiers.disk import DiskOptions
from kvtier.tiers.remote.warm_start import warm_start_of
from kvtier.tiers.row import check_stores, refuse_lossy, storage_names

KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "float": (int, float),
    "int": (int,),
    "str | None": (str, NoneType),
    "str | int": (str, int),
    "str | Sequence[str]": (str, list),
}
"""Types of a value in JSON by the type of its field; those of others are text."""
HINTS = {
    "bool": "use true or false",
    "float": "write a number",
    "int": "write a number",
    "str | int": SIZE,
}
"""Advice for an error message by type, for settings that have none of their own."""


@dataclass(frozen=True)
class ConnectorSettings(RequestConfig, LoadConfig, KeyConfig, DiskSafetyConfig):
    """Settings that all connectors have. Names are the same everywhere in kvtier.

    Sizes are for all ranks on this machine together, and may be written "200GiB".

    Attributes:
        option: the engine's option that holds the settings.
        own: keys in it that the engine reads itself.
    """

    option: ClassVar[str]
    own: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        try:
            choose(self)
        except ConfigError as error:
            raise self.wrong(str(error)) from None
        is_default = self.disk_capacity == DiskSafetyConfig.disk_capacity
        if not self.disk_path and self.size("disk_capacity") and not is_default:
            raise self.wrong(
                f"disk_capacity: {self.disk_capacity!r} needs a disk; name a folder in disk_path"
            )
        if self.disk_path and not self.disk_bytes:
            raise self.wrong(
                f'disk_capacity: {self.disk_capacity!r} is no room at all; write "200GiB"'
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
        first, *more = (user_path(path) / subfolder for path in paths)
        return DiskOptions(
            first,
            capacity_bytes or self.disk_bytes,
            tuple(more),
            durability=self.disk_durability,
            verify=self.disk_verify,
            rank=rank,
            num_ranks=num_ranks,
            encryption_key=self.encryption_key,
        )

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk tier; 0 for none, whatever ``disk_capacity`` is."""
        return self.size("disk_capacity") if self.disk_path else 0

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
        known = {field.name: field for field in fields(cls)}
        for key in given:
            if key not in known and key not in cls.own:
                near = get_close_matches(key, sorted({*known, *cls.own}), 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise cls.wrong(f"no setting is called {key!r}; {hint}")

        ours = {key: value for key, value in given.items() if key in known}
        for key, value in ours.items():
            kind = str(known[key].type)
            is_right = isinstance(value, KINDS.get(kind, (str,)))
            is_right &= isinstance(value, bool) == (kind == "bool")
            if isinstance(value, list):
                is_right &= bool(value) and all(isinstance(each, str) and each for each in value)
            if not is_right:
                advice = known[key].metadata.get("advice") or HINTS.get(kind, "write it in quotes")
                raise cls.wrong(f"{key} can't be {value!r}; {advice}")
        return cls(**ours)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StoreSettings(
    ConnectorSettings,
    AuditConfig,
    ModeConfig,
    ShardConfig,
    PolicyConfig,
    CodingConfig,
    NodeClientConfig,
):
    """Settings of connectors with shared stores, an eviction policy, and audits of hits."""

    client_hints: ClientHints = setting(
        ClientHints.ON, "Whether hints in requests count: on or off."
    )

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
            check_share(self.audit)
            check_storage(self.stores)
            if self.node:
                check_socket(self.node, "node")
            storage_names(self.locations, bool(self.disk_path))
            check_stores(self.locations)
            refuse_lossy(self.coding, self.stores)
            warm_start_of(self.stores, self.warm_start)
        except ConfigError as error:
            raise self.wrong(str(error)) from None
        if self.locations and not self.store_bytes:
            raise self.wrong(
                f'storage_capacity: {self.storage_capacity!r} is no room at all; write "1TiB"'
            )
        if self.storage_shards < 0:
            raise self.wrong(f"storage_shards: {self.storage_shards} is below 0")
        if self.storage_shards and not self.stores:
            raise self.wrong(
                "storage_shards is for blocks in a store, and there is no storage here"
            )

    @property
    def store_bytes(self) -> int:
        return self.size("storage_capacity")

    @property
    def has_storage(self) -> bool:
        """Whether there is a disk or a store."""
        return bool(self.disk_path or self.locations)


@dataclass(frozen=True)
class HostSettings(StoreSettings, HostConfig):
    """Settings of connectors that keep KV in host memory, too."""

    host_capacity: str | int = setting(
        "4GiB", "Host DRAM for KV, of all ranks together.", advice=SIZE
    )

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
