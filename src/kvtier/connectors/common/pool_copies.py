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
from kvtier.connectors.common.recomputed import Comparer, Comparison, Layers
from kvtier.core.types import DEVICE, DISK, HOST
from kvtier.devices import Device, Direction
from kvtier.index import make_key_index
from kvtier.index.policies.replayed import LRU
from kvtier.observe import Metrics
from kvtier.tiers import HostTier, MemoryTier, StorageTier
from kvtier.tiers.remote.warm_start import WarmStart

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
        comparison: of blocks in host memory with what was computed of them now.
    """

    asked: Sequence[bytes]
    depths: Sequence[int]
    new: Sequence[bytes]
    job: CopyJob | None
    comparison: Comparison | None = None

    @property
    def done(self) -> bool:
        is_compared = self.comparison is None or self.comparison.job.done
        return is_compared and (self.job is None or self.job.done)


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
    warm: WarmStart | None = None,
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
        warm: see ``LocalMover``.
    """
    tiers: dict[str, MemoryTier | StorageTier] = {host.name: host}
    tiers |= {storage.name: storage for storage in storages}
    bytes_per_block = host.layout.group.bytes_per_block
    mover = LocalMover(tiers, None, warm=warm)
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

    Attributes:
        comparer: compares audited blocks; None if nothing is audited.
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
        self.comparer: Comparer | None = None

    # -- from the device --------------------------------------------------------------------------

    def compare_with(self, layers: Layers | None, device: Device) -> None:
        """Be ready to compare blocks. layers: of the pool."""
        self.comparer = Comparer(self._pool, device, [layers])

    def store(
        self,
        keys: Sequence[bytes],
        depths: Sequence[int],
        pages: Sequence[int],
        audited: Sequence[bytes] = (),
    ) -> Store:
        """Begin to copy the blocks that are not in host memory, as many as there is room for.

        The pages must not change until the store is done.

        Args:
            keys: the blocks, in prompt order.
            depths: position of each block in its prompt.
            pages: page of each block on the device.
            audited: those of the blocks to compare, if they are in host memory.
        """
        reserved = self._cache.reserve(keys)
        if reserved is None:
            num = min(len(keys), self._cache.ladder.num_available(HOST))
            reserved = self._cache.reserve(keys[:num])
        new = () if reserved is None else reserved.keys
        states = self._cache.locate_all(audited)
        memory = BlockState.MEMORY
        found = [key for key, at in zip(audited, states, strict=True) if at is memory]
        if not new and not found:
            return Store(keys, depths, (), None)
        page_of = dict(zip(keys, pages, strict=True))
        batches, comparison = [], None
        if reserved is not None and new:
            at = GroupPages([page_of[key] for key in new], reserved.slots, 0)
            host = self._host
            batches.append(self._pool.stage([at], host.memory, Direction.STORE, host.seams))
        if found and self.comparer is not None:
            slots = self._cache.hold(found).slots
            blocks = [
                [GroupPages([page_of[key]], [slot], 0)]
                for key, slot in zip(found, slots, strict=True)
            ]
            comparison = self.comparer.begin(blocks, found, self._host.memory)
            batches += comparison.batches
        job = self._engine.submit(batches, Direction.STORE)
        if comparison is not None and self.comparer is not None:
            self.comparer.compare(comparison, job)
        return Store(keys, depths, new, job, comparison)

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
        if store.comparison is not None:
            self._cache.release(store.comparison.keys)
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
