"""Settings of the disk tier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from kvtier.core.errors import ConfigError
from kvtier.core.system.user_paths import user_path
from kvtier.core.types import Direct, Durability, IoKind, Verify

CHOICES: dict[str, type[StrEnum]] = {
    "durability": Durability,
    "verify": Verify,
    "io": IoKind,
    "direct": Direct,
}
"""Settings with a fixed set of values."""
LEAST = {
    **dict.fromkeys(("capacity_bytes", "sample_every", "queue_depth", "num_ranks"), 1),
    **dict.fromkeys(("errors_until_off", "checksum_threads"), 1),
    "bounce_bytes": 0,
}
"""Smallest value of a setting."""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Settings of the disk tier: location of the slab, capacity, and I/O behaviour."""

    path: Path
    """Directory of the slab; made if it is missing."""
    capacity_bytes: int
    """Capacity for blocks, of all directories together; allocated when the tier is opened."""
    more_paths: tuple[Path, ...] = ()
    """Directories on other disks. Each block is striped over all disks, and read in parallel."""
    durability: Durability = Durability.PROCESS
    """Failures that an acknowledged block survives: ``process`` or ``power``."""
    verify: Verify = Verify.ALWAYS
    """Checksum verification of loads: ``always``, ``sampled`` or ``off``."""
    sample_every: int = 16
    """With ``verify=sampled``, one load in this many is verified."""
    io: IoKind = IoKind.AUTO
    """I/O engine: ``auto``, ``uring`` or ``preadv``."""
    direct: Direct = Direct.AUTO
    """Whether blocks go directly to the engine's KV pool, bypassing the host tier: ``auto``, ``on``
    or ``off``."""
    encryption_key: str = ""
    """Source of the keys of encrypted blocks: "file:/path", "env:NAME" or "command:program"; "" for
    the value of ``KVTIER_ENCRYPTION_KEY``, if there is one."""
    queue_depth: int = 32
    """Maximum number of requests in flight, per direction."""
    rank: int = 0
    """Index of the part of every block that this slab holds, if other slabs hold the rest."""
    num_ranks: int = 1
    """Number of parts of a block."""
    read_deadline_s: float = 10.0
    """Reads that take longer fail, and the blocks are recomputed. A caller may set an earlier
    deadline."""
    write_deadline_s: float = 60.0
    """Writes that take longer fail; the blocks are not stored."""
    errors_until_off: int = 8
    """I/O errors in a row after which reads, or writes, are suspended for a while."""
    bounce_bytes: int = 16 << 20
    """Bytes of the bounce buffer per direction, for blocks that are not aligned for O_DIRECT."""
    checksum_threads: int = 1
    """Threads that compute the checksums of a written batch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", user_path(self.path))
        object.__setattr__(self, "more_paths", tuple(map(user_path, self.more_paths)))
        paths = [path.absolute() for path in (self.path, *self.more_paths)]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise ConfigError(f"more_paths: {twice} is named twice; give each disk one directory")
        if self.more_paths and self.num_ranks > 1:
            raise ConfigError(
                f"num_ranks: {self.num_ranks} with more_paths; each path is a rank of its own"
            )
        for name, kind in CHOICES.items():
            value = getattr(self, name)
            if value not in list(kind):
                raise ConfigError(f"{name}: {value!r} is unknown; use one of {', '.join(kind)}")
            object.__setattr__(self, name, kind(value))
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)} is below {least}")
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank: {self.rank} is not in 0 .. {self.num_ranks - 1}")
        for name in ("read_deadline_s", "write_deadline_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} is not above 0")

    @property
    def num_paths(self) -> int:
        return 1 + len(self.more_paths)

    def each_part(self) -> list[DiskOptions]:
        """Return the settings of each directory."""
        if not self.more_paths:
            return [self]
        return [
            replace(
                self,
                path=path,
                more_paths=(),
                capacity_bytes=self.capacity_bytes // self.num_paths,
                bounce_bytes=self.bounce_bytes // self.num_paths,
                rank=rank,
                num_ranks=self.num_paths,
            )
            for rank, path in enumerate((self.path, *self.more_paths))
        ]
