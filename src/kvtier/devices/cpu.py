"""The CPU as a device: its memory is host memory, and a copy is a batched memcpy."""

from __future__ import annotations

import numpy as np

from kvtier.core.hot import NATIVE, NATIVE_REASON, copy_batch
from kvtier.core.system.process import num_cores
from kvtier.devices.base import CopyBatch, CopyQueue, Device, Direction, Fence, Finding, Memory
from kvtier.devices.synchronous import Passed, SynchronousQueue


class CpuDevice(Device):
    """Batched copies by the native core or its pure-Python twin. Compute is synchronous, too.

    threads: per batch. Default: half of the cores, at most four; the other half computes.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or max(1, min(4, num_cores() // 2))
        self._queue = SynchronousQueue(self._copy)  # stateless: shared by both directions

    def queue(self, direction: Direction) -> CopyQueue:
        return self._queue

    def make_queue(self, direction: Direction) -> CopyQueue:
        return self._queue

    def fence(self) -> Fence:
        return Passed()

    def _copy(self, batch: CopyBatch) -> None:
        copy_batch(
            (batch.dst_offset + batch.dst.address).astype("uint64"),
            (batch.src_offset + batch.src.address).astype("uint64"),
            batch.size.astype("uint64"),
            self._threads,
        )

    def allocate(self, nbytes: int) -> Memory:
        memory = np.zeros(nbytes, np.uint8)
        return Memory(memory.ctypes.data, nbytes, self.name, memory)

    def page_lock(self, memory: Memory) -> bool:
        return False

    def unlock(self, memory: Memory) -> None:
        return

    def findings(self) -> list[Finding]:
        path = "native batched copy" if NATIVE else "pure-Python copy"
        return [Finding("device", "cpu"), Finding("copy path", path, NATIVE_REASON)]
