"""Promote a waiting prompt's pages from storage to host memory.

A request waits for its promotion, and for stores that are still looking up its pages, but never
longer than recomputing would take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.connectors.common.pool_cache import PoolCache
from kvtier.connectors.sglang.device_pools import KV
from kvtier.connectors.sglang.prefix_hits import SidePool, common_hits
from kvtier.connectors.sglang.wait_reasons import RankWait
from kvtier.errors import printable
from kvtier.keyed.cache import BlockLocation
from kvtier.keyed.waiters import StorageWaiter
from kvtier.ladder import PendingLookup
from kvtier.plan import Costs, Tell, explain
from kvtier.plan.worth import end_worth_loading, patience_s

logger = logging.getLogger(__name__)

READY = (BlockLocation.MEMORY,)
TO_COME = (BlockLocation.MEMORY, BlockLocation.ARRIVING, BlockLocation.STORAGE)
MOST_VISITS = 4096
"""Requests that are remembered where nobody says which have gone."""


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """Tokens of a prompt, and how many of the first ones the device has."""

    num_cached: int
    num_tokens: int


@dataclass(slots=True)
class PromptState:
    """A request that something is brought for, or asked. until_s: when it has waited for long
    enough. began_s, over_s: when it began to wait, and when it was found to be over."""

    until_s: float
    began_s: float = 0.0
    over_s: float | None = None
    watches: list[StorageWaiter] = field(default_factory=list)
    asked: Sequence[PendingLookup] = ()

    def wait(self, now_s: float) -> RankWait:
        if now_s >= self.until_s:
            return RankWait.OVER
        if self.asked and not any(question.is_over for question in self.asked):
            return RankWait.ANSWERS
        are_over = all(watch.is_over for watch in self.watches)
        return RankWait.OVER if are_over else RankWait.READS


class PromptPromotion:
    """caches: by pool, that of the KV first. page_size: tokens."""

    def __init__(
        self,
        caches: Mapping[str, PoolCache],
        page_size: int,
        always: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caches = caches
        self._page_size = page_size
        self._always = always
        self._clock = clock
        self._visits: dict[str, PromptState] = {}
        self._explained: dict[str, None] = {}  # requests that the log has, the latest last
        self._declined: dict[str, None] = {}  # requests whose pages were counted
        self._brings = True

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Requests are looked up in here that can wait. From now on nothing is brought for others:
        they are computed at once."""
        self._brings = True
        try:
            yield
        finally:
            self._brings = False

    def cuts(
        self,
        rid: str,
        prompt: WaitingPrompt,
        keys: Sequence[bytes],
        places: Mapping[str, Sequence[BlockLocation]],
        needs: Mapping[str, int],
        asked: Sequence[PendingLookup] = (),
    ) -> list[int]:
        """Lengths of prefixes of ``keys``, in pages, whose load can begin now. What else there is
        begins to come to host memory, once for each request that can wait, and again when it has
        heard what stores have.

        keys: of the pages that the device does not have. places: of each, by pool. needs: by pool,
        how many pages before a cut must be there; 0 for all of them. asked: what stores were asked
        about them, and is worth waiting for.
        """
        ready = _cuts(places, needs, READY)
        to_come = _cuts(places, needs, TO_COME)
        longest = to_come[-1] if to_come else 0
        worth = self._num_worth(prompt, keys, longest, self._tell(rid) if longest else None)
        if not worth and ready:  # where all is loaded or nothing, less may be worth it
            worth = self._num_worth(prompt, keys, ready[-1])
        self._note_declined(rid, longest - worth)
        now = [cut for cut in ready if cut <= worth]
        wanted = max((cut for cut in to_come if cut <= worth), default=0)
        if wanted <= (now[-1] if now else 0):
            wanted = 0
        visit = self._visits.get(rid)
        is_new = self._brings and (visit is None or bool(visit.asked))
        if is_new and (wanted or asked or visit):
            end = prompt.num_cached + (len(keys) if asked else wanted) * self._page_size
            patience = patience_s(self._costs(), prompt.num_cached, end)
            until_s = visit.until_s if visit else self._clock() + patience
            began_s = visit.began_s if visit else self._clock()
            watches = self._bring(keys[:wanted], places, needs) if wanted else []
            self._visits[rid] = PromptState(until_s, began_s, None, watches, asked)
            while len(self._visits) > MOST_VISITS:
                self._visits.pop(next(iter(self._visits)))
        return now

    def _note_declined(self, rid: str, num_pages: int) -> None:
        """A request is looked up several times, and counts once."""
        if num_pages and rid not in self._declined:
            self._declined[rid] = None
            self._caches[KV].ladder.account.planned(0, num_pages)
            while len(self._declined) > MOST_VISITS:
                self._declined.pop(next(iter(self._declined)))

    def _tell(self, rid: str) -> Tell | None:
        """Return the logger of a request's decision, which logs once per request."""
        if rid in self._explained or not logger.isEnabledFor(logging.DEBUG):
            return None
        self._explained[rid] = None
        while len(self._explained) > MOST_VISITS:
            self._explained.pop(next(iter(self._explained)))
        return lambda decision: logger.debug(
            "prompt request=%s %s", printable(rid), explain(decision)
        )

    def _num_worth(
        self, prompt: WaitingPrompt, keys: Sequence[bytes], longest: int, tell: Tell | None = None
    ) -> int:
        """Return how many of the first pages are cheaper to load than to compute; at most
        ``longest``."""
        if self._always or not longest:
            return longest
        page_size, caches = self._page_size, list(self._caches.values())
        tiers = self._caches[KV].cache.sources(keys[:longest])
        end = end_worth_loading(
            self._costs(),
            tiers,
            first=prompt.num_cached,
            found=prompt.num_cached + longest * page_size,
            num_tokens=prompt.num_tokens,
            block_size=page_size if len(caches) == 1 else 0,
            bytes_per_block=sum(cache.bytes_per_block for cache in caches),
            num_staging_slots=caches[0].host.num_open,
            tell=tell,
        )
        return max(0, (end - prompt.num_cached) // page_size)

    def _bring(
        self,
        keys: Sequence[bytes],
        places: Mapping[str, Sequence[BlockLocation]],
        needs: Mapping[str, int],
    ) -> list[StorageWaiter]:
        """Begin to bring what the pools need for a cut after ``keys``."""
        watches: list[StorageWaiter] = []
        for name, cache in self._caches.items():
            first = max(0, len(keys) - needs[name]) if needs[name] else 0
            there = zip(keys[first:], places[name][first:], strict=False)
            coming = [key for key, place in there if place is not BlockLocation.MEMORY]
            stored = zip(keys[first:], places[name][first:], strict=False)
            cache.cache.promote([key for key, place in stored if place is BlockLocation.STORAGE])
            watches.append(cache.cache.watch(coming))
        return watches

    def _costs(self) -> Costs:
        return self._caches[KV].ladder.cost_snapshot()

    # -- to wait or not ----------------------------------------------------------------------------

    def wait(self, rid: str) -> RankWait:
        """Return what a request waits for; nothing once it is time to compute."""
        visit = self._visits.get(rid)
        if visit is None:
            return RankWait.OVER
        wait = visit.wait(self._clock())
        if wait is RankWait.OVER and visit.over_s is None:
            visit.over_s = self._clock()
        return wait

    def waited_s(self, rid: str) -> float:
        """Return how long a request has waited for its promotion."""
        visit = self._visits.get(rid)
        if visit is None:
            return 0.0
        return (self._clock() if visit.over_s is None else visit.over_s) - visit.began_s

    def keep_only(self, rids: Collection[str]) -> None:
        """All other requests have gone."""
        for rid in [rid for rid in self._visits if rid not in rids]:
            del self._visits[rid]

    def forget(self) -> None:
        """All requests have gone."""
        self._visits.clear()


def _cuts(
    places: Mapping[str, Sequence[BlockLocation]],
    needs: Mapping[str, int],
    wanted: Collection[BlockLocation],
) -> Sequence[int]:
    """Lengths of prefixes for which every pool has what it needs in ``wanted`` places."""
    there = {name: [place in wanted for place in each] for name, each in places.items()}
    kv = there.pop(KV)
    num_pages = kv.index(False) if False in kv else len(kv)
    sides = {name: SidePool(flags, needs[name]) for name, flags in there.items()}
    return common_hits((KV, num_pages), sides).cuts
