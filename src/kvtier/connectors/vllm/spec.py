"""``"spec_name": "kvtier"``: what vLLM's OffloadingConnector makes in each of its processes."""

from __future__ import annotations

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.connectors.vllm.manager import HostManager
from kvtier.connectors.vllm.settings import Settings
from kvtier.connectors.vllm.worker import HostWorker
from kvtier.devices import find_device
from kvtier.errors import ConfigError

SLOT_ALIGNMENT = 4096
"""Slots begin on pages, so that each can be read from a disk in place."""


class KvtierSpec(OffloadingSpec):
    """Reads the settings, and makes the scheduler's half or a rank's."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = Settings.read(config.extra_config)
        chunk_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self.slot_bytes = -(-chunk_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        rank_bytes = self.settings.host_bytes // max(1, config.parallel.world_size)
        self.num_slots = rank_bytes // self.slot_bytes if self.slot_bytes else 0
        if self.slot_bytes and self.num_slots < 1:
            raise ConfigError(
                f"host: {self.settings.host!r} is below one chunk of {self.slot_bytes} bytes on "
                f"each of {config.parallel.world_size} ranks; raise it"
            )
        self._manager: HostManager | None = None
        self._worker: HostWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            events = self.kv_events_config.enable_kv_cache_events
            self._manager = HostManager(self.num_slots, events)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            first = kv_caches.tensors[0].tensor.device
            name = first.type if first.index is None else f"{first.type}:{first.index}"
            self._worker = HostWorker(
                kv_caches,
                find_device(name),
                self.num_slots,
                self.slot_bytes,
                self.blocks_per_chunk,
            )
        return self._worker
