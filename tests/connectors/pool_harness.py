"""A device pool of a few layers, over host memory and storage.

Bytes follow from keys, and are compared for every load that is reported as done.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128

import numpy as np

from kvtier.cache.block_cache import BlockState
from kvtier.cache.transfer import TransferEngine
from kvtier.connectors.common.paged_pool import PagedPool, PoolShare
from kvtier.connectors.common.pool_copies import Load, PoolCopies, Store, open_cache
from kvtier.devices.cpu import CpuDevice
from kvtier.index.policies.replayed import LRU
from kvtier.layout import opaque
from kvtier.testing import FaultyStorage, MemoryStorage, StoredBlocks
from kvtier.tiers import HostTier, StorageTier

SHARES = (64, 192, 64, 128)
"""Bytes of a page in each buffer."""
ENDS = (1, 3, 3, 4)
"""By layer: buffers up to it; the third layer has none."""
PAGE_BYTES = sum(SHARES)
SLOT_BYTES = 512
NUM_PAGES = 64
DIGEST = b"d" * 32


def key_of(number: int) -> bytes:
    return b"%032d" % number


def bytes_of(key: bytes) -> bytes:
    return shake_128(key).digest(PAGE_BYTES)


class PoolHarness:
    """A device pool, host memory and storage.

    Args:
        num_host: Capacity of host memory, in blocks.
        num_stored: Capacity of storage, in blocks.
        storages: Storage tiers in place of the default one, which is in memory and can fail.
    """

    def __init__(
        self,
        num_host: int = 8,
        num_stored: int = 16,
        stored_blocks: StoredBlocks | None = None,
        engine: TransferEngine | None = None,
        storages: Sequence[StorageTier] = (),
        lookup_deadline_s: float = 0.0,
        policy: str = LRU,
    ) -> None:
        group = opaque(SLOT_BYTES)
        self.buffers = [np.zeros((NUM_PAGES, size), np.uint8) for size in SHARES]
        shares = [
            PoolShare(buffer.ctypes.data, buffer.shape[1], buffer.shape[1])
            for buffer in self.buffers
        ]
        pool = PagedPool([shares], NUM_PAGES, 1, SLOT_BYTES, "cpu", self.buffers)
        self.device = CpuDevice()
        self.engine = engine or TransferEngine(self.device)
        self.storage = FaultyStorage(
            MemoryStorage(group, num_stored, stored_blocks or StoredBlocks())
        )
        self.digest = DIGEST
        host = HostTier(group, num_host * SLOT_BYTES, self.device)
        self.pool = open_cache(
            host,
            storages or [self.storage],
            lambda: self.digest,
            lookup_deadline_s=lookup_deadline_s,
            policy=policy,
        )
        self.copies = PoolCopies(self.pool, pool, ENDS, host, self.engine)

    def compute(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Write the blocks of ``keys`` to ``pages`` of the device."""
        for key, page in zip(keys, pages, strict=True):
            content, at = np.frombuffer(bytes_of(key), np.uint8), 0
            for buffer in self.buffers:
                buffer[page] = content[at : at + buffer.shape[1]]
                at += buffer.shape[1]

    def scribble(self, pages: Sequence[int]) -> None:
        for buffer in self.buffers:
            buffer[list(pages)] = 0xEE

    def has(self, key: bytes, page: int, num_buffers: int = len(SHARES)) -> bool:
        """Whether the first buffers have the block of ``key`` in ``page``."""
        found = b"".join(buffer[page].tobytes() for buffer in self.buffers[:num_buffers])
        return found == bytes_of(key)[: len(found)]

    def store(self, keys: Sequence[bytes], pages: Sequence[int]) -> Store:
        self.compute(keys, pages)
        return self.copies.store(keys, range(len(keys)), pages)

    def keep(self, *numbers: int) -> bool:
        """Store a prompt, and wait for the end; return whether it succeeded."""
        store = self.store([key_of(number) for number in numbers], range(len(numbers)))
        if store.job is not None:
            store.job.wait()
        return self.copies.end_store(store)

    def finish(self, load: Load, pages: Sequence[int]) -> bool:
        """Wait for a load and compare its bytes; return whether it succeeded."""
        load.job.wait()
        is_there = self.copies.end_load(load)
        if is_there:
            assert all(self.has(key, page) for key, page in zip(load.keys, pages, strict=True)), (
                "a block is not what it was"
            )
        return is_there

    def places(self, *numbers: int) -> list[BlockState]:
        """Return the locations of blocks, after adopting the ones that storage recovered."""
        keys = [key_of(number) for number in numbers]
        self.pool.adopt(keys)
        return self.pool.locate_all(keys)

    def settle(self) -> None:
        assert self.pool.ladder.drain(60, self.pool.poll)
        self.pool.poll()

    def close(self) -> None:
        self.storage.release()
        self.settle()
        self.pool.check_invariants()
        assert self.engine.close(60)
        assert self.pool.close()
