"""Settings of the storage back end and of the linker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtier.connectors.common.settings import HostSettings, StoreSettings
from kvtier.core.config import setting


@dataclass(frozen=True)
class StorageSettings(StoreSettings):
    """Settings of the storage back end: a disk, or one store, below SGLang's own host memory."""

    option: ClassVar[str] = "--hicache-storage-backend-extra-config"
    own: ClassVar[frozenset[str]] = frozenset(
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

    hold_s: int = setting(
        60, "Seconds for which a page that was reported to SGLang is held for its read."
    )

    def __post_init__(self) -> None:
        if self.size("warm_start"):
            raise self.wrong(
                "warm_start: there is one store here, and it copies from one into another; run "
                "kvtier warm beside the engine, or use the linker"
            )
        StoreSettings.__post_init__(self)
        if not self.disk_path and not self.locations:
            raise self.wrong(
                "there is neither disk_path nor storage; name one, or give host_capacity to "
                "kvtier sglang-args, which then takes the linker"
            )
        if self.disk_path and self.storage:
            raise self.wrong("disk_path and storage exclude each other here; give one of them")
        if len(self.locations) > 1:
            raise self.wrong(
                f"storage: one store is allowed here, not {len(self.locations)}; give one, or use "
                "the linker"
            )
        if self.hold_s < 1:
            raise self.wrong(f"hold_s: {self.hold_s!r} is below 1")


@dataclass(frozen=True)
class LinkerSettings(HostSettings):
    """Settings of the linker: host memory of kvtier's, and optionally a disk and stores below."""

    option: ClassVar[str] = "--unified-cache-external-linker-config"


def served(options: object) -> tuple[str, int | None]:
    """Return model and port that SGLang serves. options: its ``ServerArgs``; None outside of it."""
    names = (getattr(options, name, None) for name in ("served_model_name", "model_path"))
    return next(filter(None, names), ""), getattr(options, "port", None)
