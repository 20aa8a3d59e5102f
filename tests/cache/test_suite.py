"""The rules of ``BlockCache`` for a cache in this process."""

from __future__ import annotations

from pathlib import Path

from kvtier.connectors.common.pool_copies import open_cache
from kvtier.devices.cpu import CpuDevice
from kvtier.layout import opaque
from kvtier.testing import (
    BlockCacheHarness,
    BlockCacheSuite,
    FaultyStorage,
    MemoryStorage,
    StoredBlocks,
)
from kvtier.tiers import HostTier

BLOCK_BYTES = 512
NUM_READS = 8


class LocalHarness(BlockCacheHarness):
    """A cache over host memory, and over storage that can fail and be slow."""

    num_slots = 16

    def __init__(self) -> None:
        self._stored = StoredBlocks()
        self._open()

    def _open(self) -> None:
        group = opaque(BLOCK_BYTES)
        host = HostTier(group, self.num_slots * BLOCK_BYTES, CpuDevice())
        self._storage = FaultyStorage(MemoryStorage(group, 64, self._stored))
        self.cache = self._local = open_cache(host, [self._storage], lambda: b"d" * 32)

    def settle(self, num_blocks: int) -> None:
        self._local.poll()
        assert self._local.ladder.drain(30, self._local.poll)
        assert self._local.usage()["disk"].num_used == num_blocks

    def fail_reads(self) -> None:
        for nth in range(1, NUM_READS):
            self._storage.fail("get", nth)

    def stop(self) -> None:
        self._storage.hold("put", "get", "drop")

    def resume(self) -> None:
        self._storage.release()

    def restart(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self.resume()
        assert self.cache.close()


class TestLocalBlockCache(BlockCacheSuite):
    def make_harness(self, folder: Path) -> BlockCacheHarness:
        return LocalHarness()
