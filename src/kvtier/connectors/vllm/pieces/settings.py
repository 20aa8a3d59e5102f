"""What a user may set for ``"type": "kvtier"`` among vLLM's ``secondary_tiers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from kvtier.config import parse_size
from kvtier.errors import ConfigError
from kvtier.tiers.disk import DiskOptions
from kvtier.types import Durability, Verify

VLLMS_OWN = frozenset({"type", "module_path", "backpressure"})
"""Settings of every tier, that vLLM reads."""
EXAMPLE = '{"type": "kvtier", "disk_path": "/nvme/kvtier", "disk_capacity": "200GiB"}'


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Ours, by the names that ``CacheConfig`` has for them. Sizes may be written "200GiB"."""

    disk_path: str | list[str]
    """Folder of the slab; a list of folders on several disks cuts each block over all of them."""
    disk_capacity: str | int
    """Room for KV on disk, reserved at the start and never exceeded."""
    disk_durability: str = "process"
    """What a stored block survives: the end of the "process", or a loss of "power"."""
    disk_verify: str = "always"
    """Which loads compare the checksum: "always", "sampled" or "off"."""
    disk_bytes_per_day: str | int = 0
    """What may be written in a day, for disks that wear; 0 for no limit."""
    namespace: str = ""
    """Blocks are shared only under the same name: for what kvtier can't know of, such as weights
    that are made while loading."""
    enable_kv_events: bool = False
    """Publish what is stored here and what leaves, where vLLM publishes KV events at all."""

    locality: str | None = None
    """vLLM's: whether the disk is "LOCAL" or "REMOTE", for requests that ask for one of them."""

    @classmethod
    def read(cls, config: Mapping[str, object]) -> TierSettings:
        """From vLLM's configuration of the tier. ``ConfigError`` names what can't be used."""
        known = {field.name: field for field in fields(cls)}
        for key in config:
            if key not in known and key not in VLLMS_OWN:
                near = get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"secondary tier kvtier: no setting is called {key!r}; {hint}")
        wanted = ("disk_path", "disk_capacity")
        missing = next((name for name in wanted if name not in config), None)
        if missing is not None:
            raise ConfigError(f"secondary tier kvtier: {missing} is missing; write {EXAMPLE}")
        given = {key: value for key, value in config.items() if key in known}
        for key, value in given.items():
            if not _fits(key, value):
                raise ConfigError(f"secondary tier kvtier: {key} can't be {value!r}; {HINTS[key]}")
        settings = cls(**given)  # type: ignore[arg-type]
        settings.disk_options()
        if settings.bytes_per_day < 0:
            raise ConfigError(
                f"secondary tier kvtier: disk_bytes_per_day: {settings.bytes_per_day} is below 0"
            )
        return settings

    @property
    def bytes_per_day(self) -> int:
        return parse_size(self.disk_bytes_per_day, "secondary tier kvtier: disk_bytes_per_day")

    def disk_options(self, subfolder: str = "") -> DiskOptions:
        """The same, as the disk tier wants it. subfolder: below each path."""
        paths = [self.disk_path] if isinstance(self.disk_path, str) else self.disk_path
        first, *more = (Path(each).expanduser() / subfolder for each in paths)
        return DiskOptions(
            first,
            parse_size(self.disk_capacity, "secondary tier kvtier: disk_capacity"),
            tuple(more),
            durability=Durability(self.disk_durability),
            verify=Verify(self.disk_verify),
        )


HINTS = {
    "disk_path": "name a folder, or a list of folders",
    "disk_capacity": 'write for instance "200GiB", or bytes',
    "disk_durability": f"use one of {', '.join(Durability)}",
    "disk_verify": f"use one of {', '.join(Verify)}",
    "disk_bytes_per_day": 'write for instance "2TiB", bytes, or 0 for no limit',
    "namespace": "write any text",
    "enable_kv_events": "use true or false",
    "locality": "use LOCAL or REMOTE",
}


def _fits(key: str, value: object) -> bool:
    match key:
        case "disk_path":
            paths = [value] if isinstance(value, str) else value
            return isinstance(paths, list) and bool(paths) and all(map(_is_path, paths))
        case "disk_capacity" | "disk_bytes_per_day":
            return isinstance(value, str) or type(value) is int
        case "disk_durability":
            return value in list(Durability)
        case "disk_verify":
            return value in list(Verify)
        case "locality":
            return value in (None, "LOCAL", "REMOTE")
        case "enable_kv_events":
            return isinstance(value, bool)
        case _:
            return isinstance(value, str)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value)
