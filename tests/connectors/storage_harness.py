"""Storage as a cache, and the host memory of an engine whose scheduler uses it.

Bytes follow from keys, and are compared for every load that is reported as done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import shake_128

import numpy as np

from kvtier.cache.block_cache import BlockState
from kvtier.cache.storage_only import StorageJob, StorageOnlyCache
from kvtier.layout import opaque
from kvtier.observe import Metrics
from kvtier.testing import host_memory, memory_bytes
from kvtier.testing.storage import MemoryStorage, StoredBlocks
from kvtier.tiers import Pieces, StorageFacts, StorageTier

BLOCK_BYTES = 4096
GROUP = opaque(BLOCK_BYTES)
DIGEST = b"d" * 32


def key_of(number: int) -> bytes:
    return b"%036d" % number


def bytes_of(key: bytes) -> np.ndarray:
    return np.frombuffer(shake_128(key).digest(BLOCK_BYTES), np.uint8)


class Harness:
    """A slab and the host memory of an engine: no two jobs in flight share a row.

    now_s: the slab's clock.
    """

    def __init__(
        self,
        tier: StorageTier,
        most_queued: int = 100,
        num_rows: int = 256,
        bytes_per_day: int = 0,
        digest: bytes = DIGEST,
    ) -> None:
        self.now_s = 0.0
        self._memory = host_memory(num_rows * BLOCK_BYTES)
        self._metrics = Metrics(is_exposed=False)
        self.slab = StorageOnlyCache(
            tier,
            np.array([BLOCK_BYTES]),
            num_rows,
            digest,
            most_queued=most_queued,
            bytes_per_day=bytes_per_day,
            metrics=self._metrics,
            clock=lambda: self.now_s,
        )
        self.rows = memory_bytes(self._memory).reshape(num_rows, BLOCK_BYTES)
        self._next_row = 0

    def submit(self, is_load: bool, numbers: Sequence[int]) -> StorageJob:
        """Submit a load or a store of blocks over the next rows of host memory."""
        keys = [key_of(number) for number in numbers]
        if self._next_row + len(numbers) > len(self.rows):
            self._next_row = 0
        rows = list(range(self._next_row, self._next_row + len(numbers)))
        begins = self._memory.address + BLOCK_BYTES * np.array(rows, np.int64)
        memory = Pieces.whole(begins, BLOCK_BYTES)
        self._next_row += len(numbers)
        if is_load:
            job = self.slab.load(keys, memory)
        else:
            for row, key in zip(rows, keys, strict=True):
                self.rows[row] = bytes_of(key)
            job = self.slab.store(keys, range(len(keys)), memory)
        self._rows_of = dict(zip(keys, rows, strict=True))
        return job

    def find(self, number: int) -> BlockState:
        """Return the location of a block; one that a restart found is adopted."""
        self.slab.adopt([key_of(number)])
        return self.slab.locate(key_of(number))

    def take_counted(self) -> Callable[..., float]:
        """Return the counts since the last call, by metric and label values."""
        recent = self._metrics.take_recent()
        return lambda metric, *labels: recent.get((metric, labels), 0)

    def settle(self) -> None:
        self.slab.drain()
        self.slab.take_finished()
        self.slab.check_invariants()

    def store(self, *numbers: int) -> StorageJob:
        job = self.submit(False, numbers)
        self.settle()
        return job

    def load(self, *numbers: int) -> list[int]:
        """Load blocks; return which arrived with the right bytes."""
        self.rows[:] = 0
        job = self.submit(True, numbers)
        self.settle()
        for key in job.keys:
            assert (self.rows[self._rows_of[key]] == bytes_of(key)).all(), "wrong bytes"
        return [int(key) for key in job.keys]


def memory(
    num_slots: int, stored_blocks: StoredBlocks | None = None, facts: StorageFacts | None = None
) -> MemoryStorage:
    return MemoryStorage(GROUP, num_slots, stored_blocks or StoredBlocks(), facts=facts)


def open_harness(harnesss: list[Harness], tier: StorageTier, most_queued: int = 100) -> Harness:
    """Open a harness, which the fixture closes."""
    harnesss.append(Harness(tier, most_queued))
    return harnesss[-1]
