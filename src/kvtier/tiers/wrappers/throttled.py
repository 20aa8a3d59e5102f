"""A storage tier that is no faster than it is told to be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvtier.core.types import BlockKey, BlockName
from kvtier.devices.base import Finding
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, ScrubReport, StorageTier
from kvtier.tiers.wrappers.wrapper import StorageWrapper


class ThrottledTier(StorageWrapper):
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
        super().__init__(inner)
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep

    def num_known(self, keys: Sequence[BlockKey]) -> int | None:
        return self.inner.num_known(keys)

    def put(self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        began = self._clock()
        stored = super().put(names, blocks, timeout_s)
        self._pace(len(names) * self.bytes_per_block, began)
        return stored

    def get(self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float) -> list[Outcome]:
        began = self._clock()
        loaded = super().get(keys, blocks, timeout_s)
        self._pace(len(keys) * self.bytes_per_block, began)
        return loaded

    def scrub(self, max_bytes: int) -> ScrubReport:
        began = self._clock()
        report = super().scrub(max_bytes)
        self._pace(report.num_bytes, began)
        return report

    def _pace(self, num_bytes: int, began: float) -> None:
        """Sleep until ``num_bytes`` since ``began`` are no more than the rate allows."""
        self._sleep(max(0.0, began + num_bytes / self.bytes_per_s - self._clock()))

    def findings(self) -> list[Finding]:
        rate = f"at most {self.bytes_per_s / 2**20:.1f} MiB/s"
        return [*super().findings(), Finding(f"{self.name} rate", rate)]
