"""What a user may set in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from kvtier.config import parse_size
from kvtier.errors import ConfigError
from kvtier.types import Durability, LoadPolicy

VLLMS_OWN = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
    }
)
"""Settings of the OffloadingConnector itself."""
RENAMED = {"host": "host_capacity", "disk": "disk_path", "load": "load_policy"}
"""Settings that had a name of their own here."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Ours, by the names that ``CacheConfig`` has for them. Sizes are of all ranks together,
    and may be written "8GiB"."""

    host_capacity: str | int = "4GiB"
    """Host DRAM for KV."""
    disk_path: str = ""
    """Directory for a slab per rank; "" for no disk tier."""
    disk_capacity: str | int = 0
    """Room on the disk, reserved at the start. Wanted where ``disk_path`` is given."""
    disk_durability: str = "process"
    """What a block on the disk survives: ``process`` or ``power``."""
    disk_bytes_per_day: str | int = 0
    """What may be written in a day, for disks that wear; 0 for no limit."""
    disk_bytes_per_s: str | int = 0
    """What is read, and what is written, in a second, of all ranks together; 0 for no limit. For
    disks that others need, too."""
    load_policy: str = "auto"
    """When KV is loaded: ``auto``, where that is faster than computing it, or ``always``."""
    namespace: str = ""
    """KV on disk is shared only under the same name: for what kvtier can't know of, such as weights
    that are in no file."""

    def __post_init__(self) -> None:
        if self.host_bytes < 1:
            raise ConfigError(
                f'host_capacity: {self.host_capacity!r} is no room at all; write "8GiB"'
            )
        if bool(self.disk_path) != bool(self.disk_bytes):
            raise ConfigError(
                f"disk_path: {self.disk_path!r} with disk_capacity: {self.disk_capacity!r}; give "
                'both, a directory and how much of it to use, like "200GiB"'
            )
        for name, kind in (("disk_durability", Durability), ("load_policy", LoadPolicy)):
            if getattr(self, name) not in list(kind):
                raise ConfigError(
                    f"{name}: {getattr(self, name)!r} is unknown; use one of {', '.join(kind)}"
                )

    @property
    def host_bytes(self) -> int:
        return parse_size(self.host_capacity, "host_capacity")

    @property
    def disk_bytes(self) -> int:
        return parse_size(self.disk_capacity, "disk_capacity") if self.disk_capacity else 0

    @property
    def bytes_per_day(self) -> int:
        return self._limit("disk_bytes_per_day")

    @property
    def bytes_per_s(self) -> int:
        return self._limit("disk_bytes_per_s")

    def _limit(self, name: str) -> int:
        limit: str | int = getattr(self, name)
        return parse_size(limit, name) if limit else 0

    @classmethod
    def read(cls, extra_config: Mapping[str, object]) -> Settings:
        """Raises ``ConfigError`` for a key that nobody knows, or a value that can't be read."""
        known = {field.name: field.type for field in fields(cls)}
        for key in extra_config:
            if key in RENAMED:
                raise ConfigError(f"kv_connector_extra_config: {key} is called {RENAMED[key]}")
            if key not in known and key not in VLLMS_OWN:
                near = get_close_matches(key, sorted({*known, *VLLMS_OWN}), 1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
                )
                raise ConfigError(
                    f"kv_connector_extra_config: no setting is called {key!r}; {hint}"
                )
        given = {key: value for key, value in extra_config.items() if key in known}
        for key, value in given.items():
            if "int" in str(known[key]):
                if not isinstance(value, str | int) or isinstance(value, bool):
                    raise ConfigError(f'{key}: {value!r} is no size; write for instance "8GiB"')
            elif not isinstance(value, str):
                raise ConfigError(f"{key}: {value!r} is no text; write it in quotes")
        return cls(**given)  # type: ignore[arg-type]
