"""Promote a waiting prompt's pages from storage to host memory.

``kvtier.plan.decide`` decides whether a request loads, waits or computes. This module translates
SGLang's look-ups for it, begins the promotions that a request waits for, and reports when the wait
is over.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.cache.block_cache import BlockCache, BlockState
from kvtier.connectors.sglang.shared.device_pools import KV
from kvtier.connectors.sglang.shared.prefix_hits import SidePool, common_hits
from kvtier.core.errors import printable
from kvtier.core.types import HOST
from kvtier.plan import Decision, Tell, explain
from kvtier.plan.decide import (
    Awaited,
    FoundBlocks,
    LoadUpTo,
    Wait,
    Waited,
    WaitState,
    WaitUntil,
    decide,
)

logger = logging.getLogger(__name__)

NOWHERE, MEMORY, UNKNOWN = BlockState.NOWHERE, BlockState.MEMORY, BlockState.UNKNOWN
MAX_VISITS = 4096
"""Most requests remembered, since SGLang does not report all that end."""


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """Length of a prompt in tokens, and how many of the first ones are on the device."""

    num_cached: int
    num_tokens: int


@dataclass(slots=True)
class PromptState:
    """A request whose pages are being promoted, or looked up in storage.

    began_s: when it began to wait. over_s: when its wait was found to be over.
    """

    wait: Wait
    began_s: float
    over_s: float | None = None


class PromptPromotion:
    """Promotes the pages of waiting prompts from storage to host memory.

    Args:
        caches: caches by pool, that of the KV first.
        page_size: tokens per page.
        block_bytes: bytes of a page, of all pools.
        always: whether all pages found are loaded, at any cost.
        clock: seconds.
    """

    def __init__(
        self,
        caches: Mapping[str, BlockCache],
        page_size: int,
        block_bytes: int,
        always: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caches = caches
        self._page_size = page_size
        self._block_bytes = block_bytes
        self._always = always
        self._clock = clock
        self._visits: dict[str, PromptState] = {}
        self._explained: dict[str, None] = {}  # requests that were logged, the latest last
        self._declined: dict[str, None] = {}  # requests whose declined pages were counted
        self._promotes = True

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Mark look-ups in this context as those of requests that can wait.

        After its first use, no pages are promoted for look-ups outside of it, since these requests
        are computed at once.
        """
        self._promotes = True
        try:
            yield
        finally:
            self._promotes = False

    def cuts(
        self,
        rid: str,
        prompt: WaitingPrompt,
        keys: Sequence[bytes],
        places: Mapping[str, Sequence[BlockState]],
        needs: Mapping[str, int],
        asked: Sequence[Awaited] = (),
    ) -> list[int]:
        """Return the lengths of prefixes of ``keys``, in pages, whose load can begin now.

        Begins to promote further pages, once per request that can wait, and again after storage has
        answered its look-ups.

        Args:
            rid: the request.
            prompt: its length, and the tokens on the device.
            keys: the pages that are not on the device.
            places: locations of each, by pool.
            needs: by pool, how many pages are needed before a cut; 0 for all of them.
            asked: look-ups in storage that are worth waiting for.
        """
        ready, reachable = _ready_cuts(places, needs), _reachable_cuts(places, needs)
        visit, now_s = self._visits.get(rid), self._clock()
        may_wait = self._promotes and (visit is None or bool(visit.wait.answers))
        began_s = visit.began_s if visit else now_s
        decision = decide(
            self._found(prompt, keys, ready, reachable),
            Waited(began_s, may_wait=may_wait),
            self._caches[KV].cost_snapshot,
            now_s,
            always_loads=self._always,
            tell=self._tell(rid),
        )
        weighed = reachable if may_wait else ready
        num_weighed = weighed[-1] if weighed else 0
        if isinstance(decision, WaitUntil):
            end, loads = decision.end, decision.ready
            num_wanted = self._num_pages(prompt, end)
            reads = self._promote(keys[:num_wanted], places, needs)
            is_unknown = asked and any(UNKNOWN in place[:num_wanted] for place in places.values())
            wait = Wait(decision.until_s, reads, asked if is_unknown else ())
            self._visits[rid] = PromptState(wait, began_s)
            while len(self._visits) > MAX_VISITS:
                self._visits.pop(next(iter(self._visits)))
        else:
            end = loads = decision.end if isinstance(decision, LoadUpTo) else prompt.num_cached
            if decision.given_up is not None:
                num_weighed = 0
            if visit is not None and may_wait:
                visit.wait = Wait(visit.wait.until_s)
        if not asked:  # otherwise some of them may be in no tier
            num_wanted = self._num_pages(prompt, end)
            self._note_declined(rid, num_weighed - num_wanted)
            if num_wanted < num_weighed:
                self._probe(keys[num_wanted:num_weighed], places, num_wanted)
        num_loads = self._num_pages(prompt, loads)
        return list(ready[: bisect_right(ready, num_loads)])

    def _num_pages(self, prompt: WaitingPrompt, end: int) -> int:
        """Return how many pages behind those on the device end at token ``end`` or before."""
        return max(0, end - prompt.num_cached) // self._page_size

    def _probe(
        self, keys: Sequence[bytes], places: Mapping[str, Sequence[BlockState]], first: int
    ) -> None:
        """Probe the storage of pages that are computed. first: their place in ``places``."""
        for name, cache in self._caches.items():
            pairs = zip(keys, places[name][first:], strict=False)
            cache.probe([key for key, place in pairs if place is BlockState.STORAGE])

    def _note_declined(self, rid: str, num_pages: int) -> None:
        """Count a request's declined pages once, though it is looked up several times."""
        if num_pages > 0 and rid not in self._declined:
            self._declined[rid] = None
            self._caches[KV].costs.planned(0, num_pages)
            while len(self._declined) > MAX_VISITS:
                self._declined.pop(next(iter(self._declined)))

    def _tell(self, rid: str) -> Tell | None:
        """Return the logger of a request's decision, which logs once per request."""
        if rid in self._explained or not logger.isEnabledFor(logging.DEBUG):
            return None

        def tell(decision: Decision) -> None:
            self._explained[rid] = None
            while len(self._explained) > MAX_VISITS:
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
        kv = self._caches[KV]
        return FoundBlocks(
            first,
            prompt.num_tokens,
            _ends(ready, first, page_size),
            _ends(reachable, first, page_size),
            lambda end: kv.sources(keys[: self._num_pages(prompt, end)]),
            page_size if len(self._caches) == 1 else 0,
            self._block_bytes,
            kv.usage()[HOST].num_open,
        )

    def _promote(
        self,
        keys: Sequence[bytes],
        places: Mapping[str, Sequence[BlockState]],
        needs: Mapping[str, int],
    ) -> list[Awaited]:
        """Begin to promote the pages that all pools need for a cut after ``keys``."""
        reads: list[Awaited] = []
        for name, cache in self._caches.items():
            first = max(0, len(keys) - needs[name]) if needs[name] else 0
            there = zip(keys[first:], places[name][first:], strict=False)
            coming = [key for key, place in there if place is not MEMORY]
            stored = zip(keys[first:], places[name][first:], strict=False)
            cache.promote([key for key, place in stored if place is BlockState.STORAGE])
            reads.append(cache.wait_for_reads(coming))
        return reads

    # -- waits -------------------------------------------------------------------------------------

    def wait(self, rid: str) -> WaitState:
        """Return what a request waits for on this rank, and note the end of its wait."""
        visit = self._visits.get(rid)
        if visit is None:
            return WaitState.OVER
        now_s = self._clock()
        state = visit.wait.state(now_s)
        if state is WaitState.OVER and visit.over_s is None:
            visit.over_s = now_s
        return state

    def waited_s(self, rid: str) -> float:
        """Return how long a request has waited for its promotion."""
        visit = self._visits.get(rid)
        if visit is None:
            return 0.0
        return (self._clock() if visit.over_s is None else visit.over_s) - visit.began_s

    def keep_only(self, rids: Collection[str]) -> None:
        """Forget all requests but these."""
        for rid in [rid for rid in self._visits if rid not in rids]:
            del self._visits[rid]

    def forget(self) -> None:
        """Forget all requests."""
        self._visits.clear()


def _ready_cuts(
    places: Mapping[str, Sequence[BlockState]], needs: Mapping[str, int]
) -> Sequence[int]:
    """Return the lengths of prefixes, ascending, whose pages are in memory in every pool."""
    kv = places[KV]
    num_pages = next((at for at, place in enumerate(kv) if place is not MEMORY), len(kv))
    sides = {name: [place is MEMORY for place in places[name]] for name in needs if name != KV}
    return _common_cuts(num_pages, sides, needs)


def _reachable_cuts(
    places: Mapping[str, Sequence[BlockState]], needs: Mapping[str, int]
) -> Sequence[int]:
    """Return ``_ready_cuts`` as they will be if all pages arrive in memory that may."""
    kv = places[KV]
    num_pages = kv.index(NOWHERE) if NOWHERE in kv else len(kv)
    sides = {name: [place is not NOWHERE for place in places[name]] for name in needs if name != KV}
    return _common_cuts(num_pages, sides, needs)


def _common_cuts(
    num_pages: int, sides: Mapping[str, Sequence[bool]], needs: Mapping[str, int]
) -> Sequence[int]:
    """Return the cuts that all pools have in common; a range if KV is the only pool."""
    pools = {name: SidePool(are_there, needs[name]) for name, are_there in sides.items()}
    return common_hits((KV, num_pages), pools).cuts


def _ends(cuts: Sequence[int], first: int, page_size: int) -> Sequence[int]:
    """Return the tokens at which prefixes end. cuts: in pages behind ``first`` tokens."""
    if isinstance(cuts, range):
        return range(first + page_size, first + page_size * len(cuts) + 1, page_size)
    return [first + cut * page_size for cut in cuts]
