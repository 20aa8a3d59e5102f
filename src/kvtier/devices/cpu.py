"""The CPU as a device: its memory is host memory, a copy is a batched memcpy."""

from __future__ import annotations

import os

from kvtier._hot import NATIVE, NATIVE_REASON, copy_batch
from kvtier.devices.base import CopyBatch, Device, Direction, Fence, Finding, Memory


class _Now(Fence):
    """Compute on the CPU is synchronous: everything queued before is done."""

    def wait(self) -> None:
        return


class CpuDevice(Device):
    """Batched copies by the native core, or by its pure-Python twin.

    threads: per batch; by default half of the cores, at most four, for the other half computes.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or max(1, min(4, (os.cpu_count() or 1) // 2))

    def copy(self, batch: CopyBatch, direction: Direction) -> None:
        copy_batch(
            (batch.dst_offset + batch.dst.address).astype("uint64"),
            (batch.src_offset + batch.src.address).astype("uint64"),
            batch.size.astype("uint64"),
            self._threads,
        )

    def fence(self) -> Fence:
        return _Now()

    def page_lock(self, memory: Memory) -> bool:
        return False

    def unlock(self, memory: Memory) -> None:
        return

    def findings(self) -> list[Finding]:
        path = "native batched copy" if NATIVE else "pure-Python copy"
        return [Finding("device", "cpu"), Finding("copy path", path, NATIVE_REASON)]
