"""Promote a waiting prompt's pages from storage to host memory.

``kvtier.keyed.reuse`` decides whether a request loads, waits or computes. This module describes
SGLang's look-ups to it, begins the promotions that a request waits for, and tells when its wait is
over.
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
from kvtier.keyed.reuse import FoundBlocks, LoadUpTo, Waited, WaitUntil, decide
from kvtier.keyed.waiters import StorageWaiter
from kvtier.ladder import PendingLookup
from kvtier.plan import Decision, Tell, explain

logger = logging.getLogger(__name__)

READY = (BlockLocation.MEMORY,)
MAY_COME = (*READY, BlockLocation.ARRIVING, BlockLocation.STORAGE, BlockLocation.UNKNOWN)
MOST_VISITS = 4096
"""Requests that are remembered where nobody says which have gone."""


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """Tokens of a prompt, and how many of the first ones the device has."""

    num_cached: int
    num_tokens: int


@dataclass(slots=True)
class PromptState:
    """A request that something is brought for, or asked.

    until_s: when it has waited for long enough. began_s, over_s: when it began to wait, and when it
    was found to be over.
    """

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
    """Promotes the pages of waiting prompts from storage to host memory.

    caches: by pool, that of the KV first. page_size: tokens.
    """

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
        """Requests are looked up in here that can wait.

        From now on nothing is brought for others: they are computed at once.
        """
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
        """Lengths of prefixes of ``keys``, in pages, whose load can begin now.

        What else there is begins to come to host memory, once for each request that can wait, and
        again when it has heard what stores have.

        keys: of the pages that the device does not have. places: of each, by pool. needs: by pool,
        how many pages before a cut must be there; 0 for all of them. asked: what stores were asked
        about them, and is worth waiting for.
        """
        ready, reachable = _cuts(places, needs, READY), _cuts(places, needs, MAY_COME)
        visit, now_s = self._visits.get(rid), self._clock()
        may_wait = self._brings and (visit is None or bool(visit.asked))
        began_s = visit.began_s if visit else now_s
        decision = decide(
            self._found(prompt, keys, ready, reachable),
            Waited(began_s, may_wait=may_wait),
            self._caches[KV].ladder.cost_snapshot,
            now_s,
            always_loads=self._always,
            tell=self._tell(rid),
        )
        weighed = reachable if may_wait else ready
        num_weighed = weighed[-1] if weighed else 0
        if isinstance(decision, WaitUntil):
            end, loads = decision.end, decision.ready
            watches = self._bring(keys[: self._num_pages(prompt, end)], places, needs)
            self._visits[rid] = PromptState(decision.until_s, began_s, None, watches, asked)
            while len(self._visits) > MOST_VISITS:
                self._visits.pop(next(iter(self._visits)))
        else:
            end = loads = decision.end if isinstance(decision, LoadUpTo) else prompt.num_cached
            if decision.given_up is not None:
                num_weighed = 0
            if visit is not None and may_wait:
                visit.watches, visit.asked = [], ()
        if not asked:  # else some of them may be nowhere
            self._note_declined(rid, num_weighed - self._num_pages(prompt, end))
        num_loads = self._num_pages(prompt, loads)
        return [cut for cut in ready if cut <= num_loads]

    def _num_pages(self, prompt: WaitingPrompt, end: int) -> int:
        """Return how many pages behind those of the device end at a token or before."""
        return max(0, end - prompt.num_cached) // self._page_size

    def _note_declined(self, rid: str, num_pages: int) -> None:
        """A request is looked up several times, and counts once."""
        if num_pages > 0 and rid not in self._declined:
            self._declined[rid] = None
            self._caches[KV].ladder.account.planned(0, num_pages)
            while len(self._declined) > MOST_VISITS:
                self._declined.pop(next(iter(self._declined)))

    def _tell(self, rid: str) -> Tell | None:
        """Return the logger of a request's decision, which logs once per request."""
        if rid in self._explained or not logger.isEnabledFor(logging.DEBUG):
            return None

        def tell(decision: Decision) -> None:
            self._explained[rid] = None
            while len(self._explained) > MOST_VISITS:
                self._explained.pop(next(iter(self._explained)))
            logger.debug("prompt request=%s %s", printable(rid), explain(decision))

        return tell

    def _found(
        self,
        prompt: WaitingPrompt,
        keys: Sequence[bytes],
        ready: Sequence[int],
        reachable: Sequence[int],
    ) -> FoundBlocks:
        """Describe the pages of a look-up. ready, reachable: lengths of prefixes, in pages."""
        first, page_size = prompt.num_cached, self._page_size
        caches = list(self._caches.values())
        kv = self._caches[KV]
        return FoundBlocks(
            first,
            prompt.num_tokens,
            [first + cut * page_size for cut in ready],
            [first + cut * page_size for cut in reachable],
            lambda end: kv.sources(keys[: self._num_pages(prompt, end)]),
            page_size if len(caches) == 1 else 0,
            sum(cache.bytes_per_block for cache in caches),
            caches[0].host.num_open,
        )

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
            cache.promote([key for key, place in stored if place is BlockLocation.STORAGE])
            watches.append(cache.watch(coming))
        return watches

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
        """Forget all requests."""
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
