"""``"spec_name": "kvtier"``: reads the settings, and makes the scheduler's half or a rank's."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import vllm
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)

from kvtier.connectors.vllm.cores import off_compute_cores
from kvtier.connectors.vllm.counts import METRICS
from kvtier.connectors.vllm.manager import TierManager
from kvtier.connectors.vllm.names import VllmNames
from kvtier.connectors.vllm.prompt import Shape
from kvtier.connectors.vllm.settings import VllmSettings
from kvtier.connectors.vllm.stats import definitions
from kvtier.connectors.vllm.worker import RankRoom, TierWorker
from kvtier.devices import find_device
from kvtier.errors import ConfigError
from kvtier.system.memory import total_bytes
from kvtier.telemetry.logs import log_in_engine
from kvtier.tiers import StorageFacts
from kvtier.tiers.disk import DiskOptions, DiskTier
from kvtier.tiers.row import storage_names
from kvtier.transfer.ranks import RankMover
from kvtier.types import DEVICE, DISK, HOST, ClientHints, Direct, LoadPolicy

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

SLOT_ALIGNMENT = 4096
"""Slots begin on sectors, so that each can be read from a disk in place."""
SHARED_MEMORY = Path("/dev/shm")


class KvtierSpec(OffloadingSpec):
    """Offloading spec that vLLM's connector makes in each of its processes."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, object]
    ) -> dict[str, OffloadingMetricMetadata]:
        return definitions(METRICS)

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        log_in_engine(logging.getLogger("vllm"))
        self.settings = VllmSettings.read(config.extra_config)
        num_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self.slot_bytes = -(-num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.names = VllmNames(
            config, self.slot_bytes, f"vllm {vllm.__version__}", self.settings.namespace
        )
        self._num_ranks = max(1, config.parallel.world_size)
        # Every rank would keep the same bytes: the first one stores them, for all.
        self.replicated_layout = config.replicated_layout
        self._num_shards = 1 if self.replicated_layout else self._num_ranks
        self.num_slots = self._num_slots_in("host_capacity", self.settings.host_bytes)
        self._check_host()
        self.num_disk_slots = self._num_slots_in("disk_capacity", self.settings.disk_bytes)
        store_bytes = self.settings.store_bytes if self.settings.stores else 0
        self.num_store_slots = self._num_slots_in("storage_capacity", store_bytes)
        self.direct = self._find_direct()
        self._manager: TierManager | None = None
        self._worker: TierWorker | None = None

    def _num_slots_in(self, name: str, num_bytes: int) -> int:
        """Slots of each shard in ``num_bytes`` of all of them."""
        num_slots = num_bytes // self._num_shards // self.slot_bytes if self.slot_bytes else 0
        if num_bytes and self.slot_bytes and num_slots < 1:
            raise ConfigError(
                f"{name}: {num_bytes} bytes are below one block of {self.slot_bytes} bytes on each "
                f"of {self._num_shards} ranks; raise it"
            )
        return num_slots

    def _check_host(self) -> None:
        """Refuse more host memory than there is, before tables of that many slots are made."""
        total, limited_by = total_bytes()
        if self.num_slots * self.slot_bytes > total:
            raise self.settings.wrong(
                f"host_capacity: {self.settings.host_capacity!r} is more than the "
                f"{total / 2**30:.1f} GiB that are there ({limited_by}); lower it"
            )

    def _find_direct(self) -> Direct:
        """Whether blocks may go directly from the disk to vLLM's memory.

        As far as is known before a rank has looked.
        """
        reason = ""
        if not self.num_disk_slots:
            reason = "there is no disk_path"
        elif self._num_shards < self._num_ranks:
            reason = "one rank has the disk, and all load what it brings to host memory"
        direct = Direct(self.settings.disk_direct)
        if direct is Direct.ON and reason:
            raise self.settings.wrong(f"disk_direct is on, and {reason}; leave it off")
        return Direct.OFF if reason else direct

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            tokens = tuple(each * self.blocks_per_chunk for each in self.tokens_per_block)
            stores = storage_names(self.settings.stores, bool(self.num_disk_slots))
            disk = replace(DiskTier.facts, direct=self.direct)
            facts = {
                name: disk if name == DISK else StorageFacts(is_shared=True) for name in stores
            }
            room = dict.fromkeys(stores, self.num_store_slots)
            room |= {HOST: self.num_slots, DISK: self.num_disk_slots}
            mover = RankMover(
                facts,
                self.slot_bytes,
                self._num_ranks,
                self._num_shards,
                self.settings.lookup_deadline_s,
                device=DEVICE,
            )
            self._manager = TierManager(
                mover,
                room,
                self.names,
                Shape(tokens, self.slot_bytes, self._num_shards),
                LoadPolicy(self.settings.load_policy),
                self.settings.bytes_per_day // self._num_shards,
                self.kv_events_config.enable_kv_cache_events,
                self.settings.lookup_deadline_s,
                self.settings.eviction_policy,
                self.settings.client_hints != ClientHints.OFF,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            first = kv_caches.tensors[0].tensor.device
            name = first.type if first.index is None else f"{first.type}:{first.index}"
            has_storage = self.config.parallel.rank < self._num_shards
            room = RankRoom(
                self.slot_bytes,
                self.num_slots,
                self._disk_options(),
                self.settings.bytes_per_s // self._num_shards,
                self._shared_file(),
                self.settings.stores if has_storage else (),
                self.num_store_slots * self.slot_bytes,
                self._num_shards,
            )
            with off_compute_cores():
                self._worker = TierWorker(
                    kv_caches,
                    find_device(name),
                    room,
                    self.blocks_per_chunk,
                    self.config.parallel.rank,
                )
        return self._worker

    def _disk_options(self) -> DiskOptions | None:
        """Return the options of this rank's slab."""
        rank = self.config.parallel.rank
        if not self.num_disk_slots or rank >= self._num_shards:
            return None
        num_bytes = self.num_disk_slots * self.slot_bytes
        options = self.settings.disk_options(
            self._folder(rank), num_bytes, rank=rank, num_ranks=self._num_shards
        )
        return replace(options, direct=self.direct)

    def _folder(self, rank: int) -> str:
        """Replicas of an engine have slabs of their own."""
        parallel = self.config.parallel
        if parallel.data_parallel_size == 1:
            return f"rank{rank}"
        return f"replica{parallel.data_parallel_index}-rank{rank}"

    def _shared_file(self) -> Path | None:
        """Host memory that the ranks share, where one of them stores for all."""
        if not self.replicated_layout:
            return None
        return SHARED_MEMORY / f"kvtier-{self.config.engine_id}"
