"""A storage tier that is no faster than it is told to be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvtier.devices.base import Finding
from kvtier.tiers.base import Addresses, LoadResult, ScrubReport, StorageTier
from kvtier.types import BlockKey, BlockName, Slot


class ThrottledTier(StorageTier):
    """Passes everything on; reads and writes move at most ``bytes_per_s`` each.

    For disks whose bandwidth others need, too, and to measure what a slow one does. The calling
    thread sleeps. clock, sleep: in seconds, for tests.
    """

    def __init__(
        self,
        inner: StorageTier,
        bytes_per_s: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = inner.name
        self.num_slots = inner.num_slots
        self.bytes_per_block = inner.bytes_per_block
        self.bytes_per_s = bytes_per_s
        self._inner = inner
        self._clock = clock
        self._sleep = sleep

    # -- what takes its time -----------------------------------------------------------------------

    def store(
        self, names: Sequence[BlockName], slots: Sequence[Slot], addresses: Addresses
    ) -> list[bool]:
        began = self._clock()
        stored = self._inner.store(names, slots, addresses)
        self._pace(len(names) * self.bytes_per_block, began)
        return stored

    def load(
        self, keys: Sequence[BlockKey], slots: Sequence[Slot], addresses: Addresses
    ) -> list[LoadResult]:
        began = self._clock()
        loaded = self._inner.load(keys, slots, addresses)
        self._pace(len(keys) * self.bytes_per_block, began)
        return loaded

    def scrub(self, max_bytes: int) -> ScrubReport:
        began = self._clock()
        report = self._inner.scrub(max_bytes)
        self._pace(report.num_bytes, began)
        return report

    def _pace(self, num_bytes: int, began: float) -> None:
        """Sleep until ``num_bytes`` since ``began`` are no more than the rate allows."""
        self._sleep(max(0.0, began + num_bytes / self.bytes_per_s - self._clock()))

    # -- what does not -----------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return self._inner.num_free

    @property
    def num_used(self) -> int:
        return self._inner.num_used

    @property
    def num_unclaimed(self) -> int:
        return self._inner.num_unclaimed

    @property
    def can_load(self) -> bool:
        return self._inner.can_load

    @property
    def can_store(self) -> bool:
        return self._inner.can_store

    def allocate(self, num_slots: int) -> list[Slot] | None:
        return self._inner.allocate(num_slots)

    def free(self, slots: list[Slot]) -> None:
        self._inner.free(slots)

    def claim(self, keys: Sequence[BlockKey]) -> list[Slot]:
        return self._inner.claim(keys)

    def num_welcome(self, num_blocks: int) -> int:
        return self._inner.num_welcome(num_blocks)

    def findings(self) -> list[Finding]:
        rate = f"at most {self.bytes_per_s / 2**20:.1f} MiB/s"
        return [*self._inner.findings(), Finding(f"{self.name} rate", rate)]

    def close(self) -> None:
        self._inner.close()
