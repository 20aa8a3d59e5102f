"""kvtier's own connector, whose copies fail or are slow in a rank of a real vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, ClassVar

from kvtier.cache.transfer import CopyJob, TransferEngine
from kvtier.connectors.vllm.kv_connector.connector import KvtierConnector
from kvtier.connectors.vllm.shared.worker import TierWorker
from kvtier.core.errors import DeviceError
from kvtier.devices import Direction


class FailingEngine(TransferEngine):
    """Every second copy of each direction fails, beginning with the first."""

    fails: ClassVar[frozenset[Direction]] = frozenset(Direction)

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.num = dict.fromkeys(Direction, 0)

    def submit(self, steps: Any, direction: Direction) -> CopyJob:
        self.num[direction] += 1
        if direction not in self.fails or self.num[direction] % 2 == 0:
            return super().submit(steps, direction)
        job = CopyJob(0, 1)
        job.finish(DeviceError("a copy failed, as was planned"))
        return job


class FailingLoads(FailingEngine):
    """Every second copy to the device fails, beginning with the first."""

    fails = frozenset({Direction.LOAD})


class SlowStores(TransferEngine):
    """A copy from the device takes longer than several steps."""

    def _copy(self, job: Any, steps: Any, direction: Direction, *more: Any) -> Iterable[int]:
        if direction is Direction.STORE:
            time.sleep(0.5)
        return super()._copy(job, steps, direction, *more)


class FaultyConnector(KvtierConnector):
    """``"kv_connector": "FaultyConnector"`` with the module path of this file."""

    copies: ClassVar[type[TransferEngine]] = FailingLoads

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        replace_engine(self._pages.worker, self.copies)


def replace_engine(worker: TierWorker, kind: type[TransferEngine]) -> None:
    """Give a rank another engine of copies."""
    worker._engine.close()
    worker._engine = kind(worker._device)
    worker._engine.start()


# MultiConnector looks up by this name the class that reads the statistics.
FaultyConnector.__name__ = KvtierConnector.__name__


class SlowConnector(FaultyConnector):
    """``"kv_connector": "SlowConnector"``."""

    copies = SlowStores


SlowConnector.__name__ = KvtierConnector.__name__
