"""Loads of pages from host memory to the device, in three stages.

    promised   reported to SGLang, which may load them until its next look-up
    queued     requested by a request that waits for its forward
    batch      copied for one forward, layer by layer

In each stage the pages are held, so that they can't be evicted from host memory. Each stage holds
them before the previous one releases them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.cache.block_cache import BlockState
from kvtier.cache.local import LocalBlockCache
from kvtier.cache.transfer import CopyJob
from kvtier.connectors.common.pool_copies import Load, PoolCopies
from kvtier.connectors.sglang.shared.device_pools import DevicePool
from kvtier.connectors.sglang.shared.identity import page_keys
from kvtier.connectors.sglang.shared.ranks import KV
from kvtier.core.errors import DeviceError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolTiers:
    """One of SGLang's device pools with the tiers that keep its pages.

    pool: SGLang's pool. cache: cache of its pages. copies: between the two.
    """

    pool: DevicePool
    cache: LocalBlockCache
    copies: PoolCopies


@dataclass(frozen=True, slots=True)
class LoadPart:
    """Pages of one pool: their keys, and their destinations on the device."""

    linked: PoolTiers
    keys: list[bytes]
    pages: list[int]


@dataclass(slots=True)
class QueuedLoad:
    """Load that a request has requested.

    Attributes:
        first, end: its tokens in the prompt, by its pages in the KV pool.
        waited_s: how long the request has waited for them.
        parts: its pages by pool.
        is_whole: whether all of them are in host memory.
    """

    first: int
    end: int
    waited_s: float
    parts: list[LoadPart] = field(default_factory=list)
    is_whole: bool = False


@dataclass(slots=True)
class LoadBatch:
    """Loads for one forward.

    Attributes:
        queued: the requests' loads.
        loads: copies by pool.
        is_whole: whether all requested pages were in host memory.
    """

    queued: Sequence[QueuedLoad]
    is_whole: bool
    loads: list[tuple[PoolTiers, Load]] = field(default_factory=list)


class Loading:
    """Loads of one linker, on the scheduler's thread, and SGLang's ``layer_done_counter``.

    A load that can't be queued or begun is logged, and reported when its batch is finished: until
    then this rank must do the same as the others.

    Args:
        linked: tiers by pool.
        page_size: tokens per page.
        after_forward: context in which submitted copies start after the work queued on the
            forward's stream.
        keyed: return pages under the present name of their namespace.
    """

    def __init__(
        self,
        linked: Mapping[str, PoolTiers],
        page_size: int,
        after_forward: Callable[[], AbstractContextManager[None]],
        keyed: Callable[[list[bytes]], list[bytes]] = lambda keys: keys,
    ) -> None:
        self._linked = linked
        self._page_size = page_size
        self._after_forward = after_forward
        self._keyed = keyed
        self._account = linked[KV].cache.costs
        self._num_cached = 0  # tokens on the device of the prompt that was looked up last
        self._promised: dict[str, Sequence[bytes]] = {}  # by pool
        self._queued: dict[str, QueuedLoad] = {}  # by request
        self._batches: dict[int, LoadBatch] = {}
        self._num_batches = 0
        self._has_waited = False
        self.consumer_index = -1
        """Index of the running batch; -1 for a batch that loads nothing."""

    # -- promised ----------------------------------------------------------------------------------

    def look_up(self, num_cached: int) -> None:
        """Begin a look-up of SGLang's, and release the pages promised by the one before.

        num_cached: number of the prompt's first tokens that are on the device.
        """
        self._release()
        self._num_cached = num_cached

    def promise(self, keys: Sequence[bytes], places: Mapping[str, Sequence[BlockState]]) -> None:
        """Hold the pages that SGLang may load now, until it loads them or looks up another prompt.

        Other ranks may have fewer pages, so all pages in memory are held.

        places: locations by pool, of ``keys`` and perhaps of more pages.
        """
        for name, linked in self._linked.items():
            pairs = zip(keys, places[name], strict=False)
            self._promised[name] = [key for key, place in pairs if place is BlockState.MEMORY]
            linked.cache.hold(self._promised[name])

    def _release(self) -> None:
        for name, keys in self._promised.items():
            self._linked[name].cache.release(keys)
        self._promised.clear()

    # -- queued ------------------------------------------------------------------------------------

    def queue(self, rid: str, wanted: Sequence[PoolTransfer], waited_s: float) -> None:
        """Queue a request's load, instead of any load that it has queued before.

        Args:
            rid: the request.
            wanted: its pages by pool, with keys and device indices.
            waited_s: how long the request has waited for them.
        """
        self.cancel(rid)
        num_pages = max((len(pool.keys) for pool in wanted if pool.name == KV), default=0)
        self._account.planned(num_pages, 0)
        end = self._num_cached + num_pages * self._page_size
        self._queued[rid] = queued = QueuedLoad(self._num_cached, end, waited_s)
        try:
            for transfer in wanted:
                queued.parts.append(self._hold(transfer))
            queued.is_whole = True
        except Exception:
            logger.exception("kvtier: a load can't begin, its request fails rid=%s", rid)
        self._release()

    def _hold(self, transfer: PoolTransfer) -> LoadPart:
        linked, keys = self._linked[transfer.name.value], self._keyed(page_keys(transfer.keys))
        pages = linked.pool.pages(transfer.device_indices)
        places = linked.cache.lookup(keys).states
        if any(place is not BlockState.MEMORY for place in places):
            raise LookupError(f"pages of pool {transfer.name} have left host memory")
        if linked.pool.name == KV:
            for tier, num in Counter(linked.cache.origins(keys)).items():
                self._account.hit(tier, num)
        linked.cache.hold(keys)
        return LoadPart(linked, keys, pages)

    def cancel(self, rid: str) -> bool:
        """Cancel a request's queued load. Return whether it had one."""
        queued = self._queued.pop(rid, None)
        _release(queued.parts if queued else ())
        return queued is not None

    # -- batches -----------------------------------------------------------------------------------

    def begin(self) -> int:
        """Begin the loads of all queued requests, for the next forward.

        Returns the number of their batch; -1 if none is queued.
        """
        if not self._queued:
            return -1
        queued, self._queued = list(self._queued.values()), {}
        parts = [part for request in queued for part in request.parts]
        batch = LoadBatch(queued, all(request.is_whole for request in queued))
        index = self._num_batches
        self._num_batches += 1
        self._batches[index] = batch
        try:
            with self._after_forward():
                for part in _by_pool(parts):
                    load = part.linked.copies.load(part.keys, part.pages)
                    batch.loads.append((part.linked, load))
        except Exception:
            logger.exception("kvtier: a load could not be begun")
            batch.is_whole = False
        finally:
            _release(parts)
        return index

    def set_consumer(self, index: int) -> None:
        """Note the batch of the next forward."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Make compute that is queued from now on wait for the KV of ``layer``. Never raises.

        A failed load is reported when its batch is finished; SGLang then discards the results.
        """
        batch = self._batches.get(self.consumer_index)
        for _, load in batch.loads if batch else ():
            try:
                load.job.hold_compute(layer // load.job.layers_per_step)
            except DeviceError as error:
                logger.error("kvtier: a layer did not arrive layer=%d error=%s", layer, error)

    def finish(self, index: int) -> bool:
        """End a batch after its forward. Return whether all requested pages had arrived."""
        batch = self._batches.pop(index, None)
        if batch is None:
            return True
        self._has_waited = True
        are_there = batch.is_whole
        for linked, load in batch.loads:
            load.job.wait()
            are_there &= linked.copies.end_load(load)
        took_s = sum(load.job.seconds for _, load in batch.loads)
        share_s = took_s / len(batch.queued)
        for request in batch.queued if are_there else ():
            self._account.saved(request.first, request.end, request.waited_s + share_s)
        return are_there

    def take_waits(self) -> bool:
        """Whether a forward may have waited for layers since the last call."""
        has_waited, self._has_waited = self._has_waited or bool(self._batches), False
        return has_waited

    def jobs(self) -> Iterator[CopyJob]:
        """Return the jobs of batches that are not finished."""
        return (load.job for batch in self._batches.values() for _, load in batch.loads)

    # -- upkeep ------------------------------------------------------------------------------------

    def forget_promised(self) -> None:
        """Forget the promised pages without releasing them, before the caches are cleared."""
        self._promised.clear()

    def reset(self) -> None:
        """Forget all loads, after waiting for the copies in flight."""
        self._release()
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._batches):
            self.finish(index)


def _release(parts: Iterable[LoadPart]) -> None:
    for part in parts:
        part.linked.cache.release(part.keys)


def _by_pool(parts: Iterable[LoadPart]) -> Iterator[LoadPart]:
    """Yield the pages of all requests, merged by pool."""
    found: dict[str, LoadPart] = {}
    for part in parts:
        whole = found.setdefault(part.linked.pool.name, LoadPart(part.linked, [], []))
        whole.keys.extend(part.keys)
        whole.pages.extend(part.pages)
    yield from found.values()
