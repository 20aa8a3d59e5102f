"""Loads of pages from host memory to the device, in three stages.

    promised   SGLang was told of them, and may ask for them until it looks up something else
    queued     a request asked for them; its forward comes
    batch      copies that one forward follows, layer by layer

In each stage they are held: they don't leave host memory. A stage takes them before the one in
front of it lets them go.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.connectors.common.pool_cache import Load
from kvtier.connectors.sglang.device_pools import KV
from kvtier.connectors.sglang.identity import page_keys
from kvtier.connectors.sglang.layer_counter import LayerCounter
from kvtier.keyed.cache import BlockLocation
from kvtier.transfer import CopyJob

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    from kvtier.connectors.sglang.pool_tiers import PoolTiers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Given:
    """Tokens of a prompt, from ``first`` up to ``end``, that a request waited for."""

    first: int
    end: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class LoadPart:
    """Pages of one pool: their keys, and where they go on the device."""

    linked: PoolTiers
    keys: list[bytes]
    pages: list[int]


@dataclass(slots=True)
class Queued:
    """Pages that a request wants loaded.

    is_whole: all of them are there. given: pages of the KV pool.
    """

    given: Given
    parts: list[LoadPart] = field(default_factory=list)
    is_whole: bool = False


@dataclass(slots=True)
class Batch:
    """Loads that one forward follows, by pool; is_whole: everything was there that was asked for.

    given: to each request.
    """

    loads: list[tuple[PoolTiers, Load]] = field(default_factory=list)
    is_whole: bool = True
    given: Sequence[Given] = ()


class Loading:
    """Loads of one linker, on the scheduler's thread.

    A load that can't be queued or begun is logged, and is told of when its batch is finished: until
    then this rank goes on as the others do.

    linked: by pool. page_size: tokens. layers: where the forward waits. after_forward: copies that
    are submitted in there start after what the forward's stream has to do by then.
    """

    def __init__(
        self,
        linked: Mapping[str, PoolTiers],
        page_size: int,
        layers: LayerCounter,
        after_forward: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._linked = linked
        self._page_size = page_size
        self._layers = layers
        self._after_forward = after_forward
        self._account = linked[KV].cache.ladder.account
        self._num_cached = 0  # tokens that the device has, of the prompt that was looked up last
        self._promised: dict[str, Sequence[bytes]] = {}  # by pool
        self._queued: dict[str, Queued] = {}  # by request
        self._batches: dict[int, Batch] = {}
        self._num_batches = 0
        self._has_waited = False

    # -- promised ----------------------------------------------------------------------------------

    def look_up(self, num_cached: int) -> None:
        """SGLang looks up a prompt, of which the device has so many tokens.

        What was promised before it may go.
        """
        self._let_go()
        self._num_cached = num_cached

    def promise(self, keys: Sequence[bytes], places: Mapping[str, Sequence[BlockLocation]]) -> None:
        """Hold the pages that SGLang may load now, until it loads them or looks up something else.

        Other ranks may have fewer pages, so all pages in memory are held.

        places: of each of ``keys`` and perhaps of more, by pool.
        """
        for name, linked in self._linked.items():
            pairs = zip(keys, places[name], strict=False)
            self._promised[name] = [key for key, place in pairs if place is BlockLocation.MEMORY]
            linked.cache.hold(self._promised[name])

    def _let_go(self) -> None:
        for name, keys in self._promised.items():
            self._linked[name].cache.release(keys)
        self._promised.clear()

    # -- queued ------------------------------------------------------------------------------------

    def queue(self, rid: str, wanted: Sequence[PoolTransfer], waited_s: float) -> None:
        """In the place of what the request asked for before.

        wanted: by pool, with keys and indices of the device.
        waited_s: how long the request waited for them.
        """
        self.cancel(rid)
        num_pages = max((len(each.keys) for each in wanted if each.name == KV), default=0)
        self._account.planned(num_pages, 0)
        end = self._num_cached + num_pages * self._page_size
        self._queued[rid] = queued = Queued(Given(self._num_cached, end, waited_s))
        try:
            for each in wanted:
                queued.parts.append(self._hold(each))
            queued.is_whole = True
        except Exception:
            logger.exception("kvtier: a load can't begin, its request fails rid=%s", rid)
        self._let_go()

    def _hold(self, transfer: PoolTransfer) -> LoadPart:
        linked, keys = self._linked[transfer.name.value], page_keys(transfer.keys)
        pages = linked.pool.pages(transfer.device_indices)
        places = linked.cache.locate_all(keys)
        if any(place is not BlockLocation.MEMORY for place in places):
            raise LookupError(f"pages of pool {transfer.name} have left host memory")
        if linked.pool.name == KV:
            for tier, num in Counter(linked.cache.origins(keys)).items():
                self._account.hit(tier, num)
        linked.cache.hold(keys)
        return LoadPart(linked, keys, pages)

    def cancel(self, rid: str) -> bool:
        """The request does not want it any more. Whether it had asked for anything."""
        queued = self._queued.pop(rid, None)
        _release(queued.parts if queued else ())
        return queued is not None

    # -- batches -----------------------------------------------------------------------------------

    def begin(self) -> int:
        """The next forward is of all requests that are queued.

        Returns the number of their batch; -1 for none.
        """
        if not self._queued:
            return -1
        queued, self._queued = list(self._queued.values()), {}
        parts = [part for each in queued for part in each.parts]
        is_whole = all(each.is_whole for each in queued)
        batch = Batch(is_whole=is_whole, given=[each.given for each in queued])
        index = self._num_batches
        self._num_batches += 1
        self._batches[index] = batch
        try:
            with self._after_forward():
                for part in _by_pool(parts):
                    load = part.linked.cache.load(part.keys, part.pages)
                    batch.loads.append((part.linked, load))
        except Exception:
            logger.exception("kvtier: a load could not be begun")
            batch.is_whole = False
        finally:
            _release(parts)
        self._layers.begin(index, [load.job for _, load in batch.loads])
        return index

    def finish(self, index: int) -> bool:
        """The batch's forward is over. Whether all that its requests asked for had arrived."""
        self._layers.end(index)
        batch = self._batches.pop(index, None)
        if batch is None:
            return True
        self._has_waited = True
        are_there = batch.is_whole
        for linked, load in batch.loads:
            load.job.wait()
            are_there &= linked.cache.end_load(load)
        took_s = sum(load.job.seconds for _, load in batch.loads)
        for each in batch.given if are_there else ():
            share = took_s / len(batch.given)
            self._account.saved(each.first, each.end, each.waited_s + share)
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
        """The caches are about to be cleared, and with them what is held."""
        self._promised.clear()

    def reset(self) -> None:
        """The device's pages mean nothing any more. Waits for copies that are under way."""
        self._let_go()
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._batches):
            self.finish(index)


def _release(parts: Iterable[LoadPart]) -> None:
    for part in parts:
        part.linked.cache.release(part.keys)


def _by_pool(parts: Iterable[LoadPart]) -> Iterator[LoadPart]:
    """Return the pages that all requests want, merged by pool."""
    found: dict[str, LoadPart] = {}
    for part in parts:
        whole = found.setdefault(part.linked.pool.name, LoadPart(part.linked, [], []))
        whole.keys.extend(part.keys)
        whole.pages.extend(part.pages)
    yield from found.values()
