"""``"spec_name": "kvtier"``: reads the settings, and makes the scheduler's half or a rank's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)

from kvtier.connectors.vllm.offloading.manager import OffloadedTiers
from kvtier.connectors.vllm.offloading.stats import definitions
from kvtier.connectors.vllm.offloading.translation import facts_of
from kvtier.connectors.vllm.offloading.worker import OffloadedPages, pages_of
from kvtier.connectors.vllm.shared.counts import METRICS
from kvtier.connectors.vllm.shared.halves import Sizes
from kvtier.connectors.vllm.shared.pages import EnginePages
from kvtier.tiers.wrappers import Shards

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig


class KvtierSpec(OffloadingSpec):
    """Offloading spec that vLLM's connector makes in each of its processes."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, object]
    ) -> dict[str, OffloadingMetricMetadata]:
        return definitions(METRICS)

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.sizes = Sizes(facts_of(config), config.extra_config)
        # Every rank would keep the same bytes: the first one stores them, for all.
        self.replicated_layout = config.replicated_layout
        self.cut: Callable[[EnginePages], Shards] | None = None
        self._manager: OffloadedTiers | None = None
        self._worker: OffloadedPages | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self.sizes.make_manager(OffloadedTiers)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            first = kv_caches.tensors[0].tensor.device
            name = first.type if first.index is None else f"{first.type}:{first.index}"
            shards = None if self.cut is None else self.cut(pages_of(kv_caches))
            self._worker = self.sizes.make_worker(OffloadedPages, kv_caches, name, shards)
        return self._worker
