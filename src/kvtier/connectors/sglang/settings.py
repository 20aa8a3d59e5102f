"""What a user may set in ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from kvtier.config import parse_size
from kvtier.errors import ConfigError
from kvtier.types import Durability, LoadPolicy, Verify

OPTION: Final = "--hicache-storage-backend-extra-config"
SGLANGS_OWN = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""Settings that SGLang reads."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Ours, by the names that they have everywhere in kvtier. Sizes are of all ranks on this
    machine together, and may be written "200GiB"."""

    disk_path: str
    """Directory for the slabs: one for each rank and pool."""
    disk_capacity: str | int
    """Room on the disk, reserved at the start and never exceeded."""
    disk_durability: str = "process"
    """What a stored page survives: ``process`` or ``power``."""
    disk_verify: str = "always"
    """Which reads compare the checksum: ``always``, ``sampled`` or ``off``."""
    disk_bytes_per_day: str | int = 0
    """What may be written in a day, for disks that wear; 0 for no limit."""
    load_policy: str = "auto"
    """When pages are found: ``auto``, where reading beats computing, or ``always``."""
    hold_s: int = 60
    """Seconds for which a page that SGLang was told of is not given up, if it is never read."""
    namespace: str = ""
    """KV on disk is shared only under the same name: for what kvtier can't know of, such as weights
    that are in no file."""

    def __post_init__(self) -> None:
        if not self.disk_path:
            raise ConfigError(f"{OPTION}: disk_path is empty; name a directory")
        for name, kind in KINDS.items():
            if getattr(self, name) not in list(kind):
                raise ConfigError(
                    f"{OPTION}: {name} can't be {getattr(self, name)!r}; use one of "
                    f"{', '.join(kind)}"
                )
        if self.disk_bytes < 1 or self.bytes_per_day < 0 or self.hold_s < 1:
            raise ConfigError(
                f"{OPTION}: disk_capacity: {self.disk_capacity!r}, disk_bytes_per_day: "
                f"{self.disk_bytes_per_day!r}, hold_s: {self.hold_s!r}; the first and the last are "
                "above 0, and none is below"
            )

    @property
    def folder(self) -> Path:
        return Path(self.disk_path).expanduser()

    @property
    def disk_bytes(self) -> int:
        return parse_size(self.disk_capacity, f"{OPTION}: disk_capacity")

    @property
    def bytes_per_day(self) -> int:
        return parse_size(self.disk_bytes_per_day, f"{OPTION}: disk_bytes_per_day")

    @classmethod
    def read(cls, extra_config: Mapping[str, object]) -> Settings:
        """Raises ``ConfigError`` for a key that nobody knows, or a value that can't be read."""
        known = {field.name: str(field.type) for field in fields(cls)}
        for key in extra_config:
            if key not in known and key not in SGLANGS_OWN:
                near = get_close_matches(key, sorted({*known, *SGLANGS_OWN}), 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"{OPTION}: no setting is called {key!r}; {hint}")
        for key in ("disk_path", "disk_capacity"):
            if key not in extra_config:
                raise ConfigError(
                    f"{OPTION}: {key} is missing; kvtier sglang-args prints all that is wanted"
                )
        given = {key: value for key, value in extra_config.items() if key in known}
        for key, value in given.items():
            if not _fits(known[key], value):
                raise ConfigError(f"{OPTION}: {key} can't be {value!r}; {HINTS[known[key]]}")
        return cls(**given)  # type: ignore[arg-type]


KINDS: Final = {
    "disk_durability": Durability,
    "disk_verify": Verify,
    "load_policy": LoadPolicy,
}
HINTS: Final = {
    "str": "write it in quotes",
    "int": "write a number",
    "str | int": 'write for instance "200GiB", or bytes',
}


def _fits(kind: str, value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return ("str" in kind and isinstance(value, str)) or ("int" in kind and is_number)
