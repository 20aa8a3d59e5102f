"""What storage has of prompts is brought to host memory, and their requests wait for it, and for
stores to say what they have: for no longer than computing it would take."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.connectors.sglang.device_pools import KV
from kvtier.connectors.sglang.hits import SidePool, common_hits
from kvtier.connectors.sglang.waits import Wait
from kvtier.connectors.shared.pool_cache import PoolCache
from kvtier.keyed_cache import Place
from kvtier.ladder import Asked
from kvtier.plan import Costs, end_worth_loading, patience_s
from kvtier.watch import Watch

READY = (Place.MEMORY,)
TO_COME = (Place.MEMORY, Place.ARRIVING, Place.STORAGE)
MOST_VISITS = 4096
"""Requests that are remembered where nobody says which have gone."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a prompt, and how many of the first ones the device has."""

    num_cached: int
    num_tokens: int


@dataclass(slots=True)
class Visit:
    """A request that something is brought for, or asked. until_s: when it has waited for long
    enough."""

    until_s: float
    watches: list[Watch] = field(default_factory=list)
    asked: Sequence[Asked] = ()

    def wait(self, now_s: float) -> Wait:
        if now_s >= self.until_s:
            return Wait.OVER
        if self.asked and not any(question.is_over for question in self.asked):
            return Wait.ANSWERS
        are_over = all(watch.is_over for watch in self.watches)
        return Wait.OVER if are_over else Wait.READS


class Bringing:
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
        self._visits: dict[str, Visit] = {}
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
        prompt: Prompt,
        keys: Sequence[bytes],
        places: Mapping[str, Sequence[Place]],
        needs: Mapping[str, int],
        asked: Sequence[Asked] = (),
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
        worth = self._num_worth(prompt, keys, longest)
        if not worth and ready:  # where all is loaded or nothing, less may be worth it
            worth = self._num_worth(prompt, keys, ready[-1])
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
            watches = self._bring(keys[:wanted], places, needs) if wanted else []
            self._visits[rid] = Visit(until_s, watches, asked)
            while len(self._visits) > MOST_VISITS:
                self._visits.pop(next(iter(self._visits)))
        return now

    def _num_worth(self, prompt: Prompt, keys: Sequence[bytes], longest: int) -> int:
        """How many of the first pages to load, rather than compute; ``longest`` at most."""
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
        )
        return max(0, (end - prompt.num_cached) // page_size)

    def _bring(
        self,
        keys: Sequence[bytes],
        places: Mapping[str, Sequence[Place]],
        needs: Mapping[str, int],
    ) -> list[Watch]:
        """Begin to bring what the pools need for a cut after ``keys``."""
        watches: list[Watch] = []
        for name, cache in self._caches.items():
            first = max(0, len(keys) - needs[name]) if needs[name] else 0
            there = zip(keys[first:], places[name][first:], strict=False)
            coming = [key for key, place in there if place is not Place.MEMORY]
            stored = zip(keys[first:], places[name][first:], strict=False)
            cache.cache.promote([key for key, place in stored if place is Place.STORAGE])
            watches.append(cache.cache.watch(coming))
        return watches

    def _costs(self) -> Costs:
        return self._caches[KV].ladder.cost_snapshot()

    # -- to wait or not ----------------------------------------------------------------------------

    def wait(self, rid: str) -> Wait:
        """What a request waits for; for nothing, when it is time to compute it."""
        visit = self._visits.get(rid)
        return Wait.OVER if visit is None else visit.wait(self._clock())

    def keep_only(self, rids: Collection[str]) -> None:
        """All other requests have gone."""
        for rid in [rid for rid in self._visits if rid not in rids]:
            del self._visits[rid]

    def forget(self) -> None:
        """All requests have gone."""
        self._visits.clear()


def _cuts(
    places: Mapping[str, Sequence[Place]], needs: Mapping[str, int], wanted: Collection[Place]
) -> Sequence[int]:
    """Lengths of prefixes for which every pool has what it needs in ``wanted`` places."""
    there = {name: [place in wanted for place in each] for name, each in places.items()}
    kv = there.pop(KV)
    num_pages = kv.index(False) if False in kv else len(kv)
    sides = {name: SidePool(flags, needs[name]) for name, flags in there.items()}
    return common_hits((KV, num_pages), sides).cuts
