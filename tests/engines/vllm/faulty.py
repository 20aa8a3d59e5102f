"""Specs whose copies fail, or whose disk hangs, in a rank of a real vLLM."""

from __future__ import annotations

from pathlib import Path
from threading import Event

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker

from kvtier.cache.transfer import CopyJob, TransferEngine
from kvtier.connectors.vllm.offloading.spec import KvtierSpec
from kvtier.connectors.vllm.shared.worker import TierWorker
from kvtier.core.errors import DeviceError
from kvtier.devices import CopyBatch, Direction
from kvtier.tiers.disk import DiskTier


class FailingEngine(TransferEngine):
    """Every second copy of each direction fails, beginning with the first."""

    num = dict.fromkeys(Direction, 0)

    def submit(self, steps: list[CopyBatch], direction: Direction) -> CopyJob:  # type: ignore[override]
        self.num[direction] += 1
        if self.num[direction] % 2 == 0:
            return super().submit(steps, direction)
        job = CopyJob(0, 1)
        job.finish(DeviceError("a copy failed, as was planned"))
        return job


class FaultySpec(KvtierSpec):
    """``"spec_name": "FaultySpec"`` with ``"spec_module_path"`` of this file."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker = super().get_worker(kv_caches)
        assert isinstance(worker, TierWorker)
        if not isinstance(worker._engine, FailingEngine):
            worker._engine.close()
            worker._engine = FailingEngine(worker._device)
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
