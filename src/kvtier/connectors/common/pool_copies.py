"""Copies between an engine's device pool and a cache in host memory and storage.

    store: device pages --> host slots --> storage, by a write queue
    load:  storage --> host slots, by a promotion --> device pages, layer by layer

The engine owns the device's pages. The ladder manages all tiers below. For engines whose ranks
decide independently.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.cache.block_cache import BlockState
from kvtier.cache.ladder import LadderOptions
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer import CopyJob, LocalMover, TransferEngine
from kvtier.cache.transfer.staging import layers_per_step
from kvtier.connectors.common.paged_pool import GroupPages, LayerSteps, PagedPool
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.devices import Direction
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.observe import Metrics
from kvtier.tiers import HostTier, MemoryTier, StorageTier

PIECE_BYTES = 16 << 20
"""Bytes per read from storage, and per write to it."""


@dataclass(frozen=True, slots=True)
class Store:
    """A store to host memory that has begun.

    Attributes:
        asked: all requested blocks, in prompt order.
        depths: position of each block in its prompt.
        new: the blocks that are being copied.
        job: the copy; None if there is none.
    """

    asked: Sequence[bytes]
    depths: Sequence[int]
    new: Sequence[bytes]
    job: CopyJob | None

    @property
    def done(self) -> bool:
        return self.job is None or self.job.done


@dataclass(frozen=True, slots=True)
class Load:
    """A load to the device that has begun; ``end_load`` releases its blocks in host memory."""

    keys: Sequence[bytes]
    job: CopyJob


def open_cache(
    host: HostTier,
    storages: Sequence[StorageTier],
    digest: Callable[[], bytes],
    bytes_per_day: int = 0,
    lookup_deadline_s: float = 0.0,
    policy: str = LRU,
    metrics: Metrics | None = None,
    tells_changes: bool = False,
) -> LocalBlockCache:
    """Return a cache of a device pool's pages, which closes its tiers. A block is a page.

    Args:
        host: host memory.
        storages: storage tiers, fastest first.
        digest: return the digest of the namespace; b"" while it is unknown.
        bytes_per_day, lookup_deadline_s: limits of writes to the disk, and of a look-up in a store.
        policy: eviction policy of all tiers; all but LRU need ``on_request`` to be called.
        metrics: by default, metrics that are counted but not exposed.
        tells_changes: whether ``take_changes`` is called.
    """
    tiers: dict[str, MemoryTier | StorageTier] = {host.name: host}
    tiers |= {storage.name: storage for storage in storages}
    bytes_per_block = host.layout.group.bytes_per_block
    mover = LocalMover(tiers, None)
    mover.start()
    index = make_key_index(dict.fromkeys(tiers, policy), digest)
    return LocalBlockCache(
        index,
        tiers,
        mover,
        LadderOptions(
            bytes_per_block,
            bytes_per_day={DISK: bytes_per_day},
            piece_blocks=max(1, PIECE_BYTES // bytes_per_block),
            lookup_patience_s=lookup_deadline_s,
        ),
        digest,
        time.monotonic,
        device=DEVICE,
        metrics=metrics,
        owned=tiers,
        # Without a listener the cache keeps every change until ``take_changes`` is called.
        on_change=None if tells_changes else lambda tier, blocks, is_removed: None,
    )


class PoolCopies:
    """Copies between the pages of a device pool and the slots of a cache of this process.

    Args:
        cache: cache of the pages.
        pool: the device pool, of one group.
        ends: per layer of the engine, the number of the pool's shares that belong to it or to
            earlier layers.
        host: memory of the cache.
        engine: copies between the device and ``host``.
    """

    def __init__(
        self,
        cache: LocalBlockCache,
        pool: PagedPool,
        ends: Sequence[int],
        host: HostTier,
        engine: TransferEngine,
    ) -> None:
        self.bytes_per_block = host.layout.group.bytes_per_block
        self._cache = cache
        self._host = host
        self._pool = pool
        self._ends = ends
        self._engine = engine

    # -- from the device --------------------------------------------------------------------------

    def store(self, keys: Sequence[bytes], depths: Sequence[int], pages: Sequence[int]) -> Store:
        """Begin to copy the blocks that are not in host memory, as many as there is room for.

        The pages must not change until the store is done.

        Args:
            keys: the blocks, in prompt order.
            depths: position of each block in its prompt.
            pages: page of each block on the device.
        """
        reserved = self._cache.reserve(keys)
        if reserved is None:
            num = min(len(keys), self._cache.ladder.num_available(HOST))
            reserved = self._cache.reserve(keys[:num])
        if reserved is None or not reserved.keys:
            return Store(keys, depths, (), None)
        page_of = dict(zip(keys, pages, strict=True))
        at = GroupPages([page_of[key] for key in reserved.keys], reserved.slots, 0)
        batch = self._pool.stage([at], self._host.memory, Direction.STORE, self._host.seams)
        return Store(keys, depths, reserved.keys, self._engine.submit([batch], Direction.STORE))

    def end_store(self, store: Store) -> bool:
        """End a store that is done. Return whether all its blocks are in host memory or storage."""
        if store.job is not None and store.job.succeeded:
            num_bytes = store.job.num_bytes
            self._cache.costs.moved((DEVICE, HOST), num_bytes, store.job.seconds)
            new = set(store.new)
            depths = dict(zip(store.asked, store.depths, strict=True))
            mine = [key for key in depths if key in new]
            self._cache.commit(mine, [depths[key] for key in mine])
        else:
            self._cache.abort(store.new)
        self._cache.adopt(store.asked)
        self._cache.touch(store.asked)
        there = (BlockState.MEMORY, BlockState.STORAGE)
        return all(place in there for place in self._cache.locate_all(store.asked))

    # -- to the device ----------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes], pages: Sequence[int]) -> Load:
        """Begin to copy blocks that are in host memory to ``pages``, layer by layer."""
        slots = self._cache.hold(keys).slots
        num_bytes = len(keys) * self.bytes_per_block
        num_layers = len(self._ends)
        width = layers_per_step(num_layers, num_bytes)
        ends = [self._ends[min(at + width, num_layers) - 1] for at in range(0, num_layers, width)]
        steps = LayerSteps(
            self._pool,
            GroupPages(pages, slots, 0),
            self._host.memory,
            self._host.seams,
            ends,
            width,
            num_bytes,
        )
        return Load(keys, self._engine.submit(steps, Direction.LOAD))

    def end_load(self, load: Load) -> bool:
        """End a load that is done. Return whether all its blocks have arrived."""
        if load.job.succeeded:
            seconds = load.job.seconds
            self._cache.costs.moved((HOST, DEVICE), load.job.num_bytes, seconds)
            self._cache.costs.observe_copy((HOST, DEVICE), load.job.num_bytes, seconds)
        self._cache.release(load.keys)
        return load.job.succeeded
