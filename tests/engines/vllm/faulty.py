"""Specs whose copies fail, or whose disk hangs, in a rank of a real vLLM."""

from __future__ import annotations

from pathlib import Path
from threading import Event

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker

from kvtier.connectors.vllm.offloading.spec import KvtierSpec
from kvtier.connectors.vllm.shared.worker import TierWorker
from kvtier.tiers.disk import DiskTier
from tests.engines.vllm.faulty_connector import FailingEngine, replace_engine


class FaultySpec(KvtierSpec):
    """``"spec_name": "FaultySpec"`` with ``"spec_module_path"`` of this file."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker = super().get_worker(kv_caches)
        assert isinstance(worker, TierWorker)
        if not isinstance(worker._engine, FailingEngine):
            replace_engine(worker, FailingEngine)
        return worker


class SilentDiskSpec(KvtierSpec):
    """Spec whose disk answers no read; a read creates a marker file beside the slabs."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        folder = Path(str(self.sizes.settings.disk_path))

        def hangs(*_: object) -> None:
            (folder / "asked").touch()
            Event().wait()

        DiskTier.get = hangs  # type: ignore[method-assign,assignment]
        return super().get_worker(kv_caches)
