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
from typing import TypeVar

from kvtier.cache.block_cache import BlockCache, BlockState
from kvtier.connectors.sglang.shared.prefix_hits import common_cuts, side_cuts
from kvtier.connectors.sglang.shared.ranks import KV
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

READY = (BlockState.MEMORY,)
REACHABLE = (BlockState.MEMORY, BlockState.STORAGE, BlockState.ARRIVING, BlockState.UNKNOWN)
"""States of pages that are in memory, or may arrive there."""
MAX_REQUESTS = 4096
"""Most requests remembered, since SGLang does not report all that end."""
T = TypeVar("T")


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
        self._states: dict[str, PromptState] = {}
        self._explained: dict[str, None] = {}  # requests that were logged
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
        answers: Sequence[Awaited] = (),
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
            answers: look-ups in storage that are worth waiting for.
        """
        ready = _cuts(places, needs, READY)
        reachable = _cuts(places, needs, REACHABLE)
        state, now_s = self._states.get(rid), self._clock()
        may_wait = self._promotes and (state is None or bool(state.wait.answers))
        began_s = state.began_s if state else now_s
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
            end, load_end = decision.end, decision.ready
            num_pages = self._num_pages(prompt, end)
            reads = self._promote(keys[:num_pages], places, needs)
            is_unknown = any(BlockState.UNKNOWN in place[:num_pages] for place in places.values())
            wait = Wait(decision.until_s, reads, answers if is_unknown else ())
            _remember(self._states, rid, PromptState(wait, began_s))
        else:
            end = load_end = decision.end if isinstance(decision, LoadUpTo) else prompt.num_cached
            if decision.given_up is not None:
                num_weighed = 0
            if state is not None and may_wait:
                state.wait = Wait(state.wait.until_s)
        num_wanted = self._num_pages(prompt, end)
        if num_wanted < num_weighed and not answers:  # otherwise some of them may be in no tier
            self._decline(rid, keys[:num_weighed], places, num_wanted)
        num_loads = self._num_pages(prompt, load_end)
        return list(ready[: bisect_right(ready, num_loads)])

    def _num_pages(self, prompt: WaitingPrompt, end: int) -> int:
        """Return how many pages behind those on the device end at token ``end`` or before."""
        return max(0, end - prompt.num_cached) // self._page_size

    def _decline(
        self,
        rid: str,
        keys: Sequence[bytes],
        places: Mapping[str, Sequence[BlockState]],
        first: int,
    ) -> None:
        """Count a request's declined pages, and probe the storage that has them.

        They are counted once, though it is looked up several times. first: the first of them.
        """
        if rid not in self._declined:
            _remember(self._declined, rid, None)
            self._caches[KV].costs.planned(0, len(keys) - first)
        for name, cache in self._caches.items():
            pairs = zip(keys[first:], places[name][first:], strict=False)
            cache.probe([key for key, place in pairs if place is BlockState.STORAGE])

    def _tell(self, rid: str) -> Tell | None:
        """Return the logger of a request's decision, which logs once per request."""
        if rid in self._explained or not logger.isEnabledFor(logging.DEBUG):
            return None

        def tell(decision: Decision) -> None:
            _remember(self._explained, rid, None)
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
            pairs = zip(keys[first:], places[name][first:], strict=False)
            missing = [(key, place) for key, place in pairs if place is not BlockState.MEMORY]
            cache.promote([key for key, place in missing if place is BlockState.STORAGE])
            reads.append(cache.wait_for_reads([key for key, _ in missing]))
        return reads

    # -- waits -------------------------------------------------------------------------------------

    def wait(self, rid: str) -> WaitState:
        """Return what a request waits for on this rank, and note the end of its wait."""
        state = self._states.get(rid)
        if state is None:
            return WaitState.OVER
        now_s = self._clock()
        wait_state = state.wait.state(now_s)
        if wait_state is WaitState.OVER and state.over_s is None:
            state.over_s = now_s
        return wait_state

    def waited_s(self, rid: str) -> float:
        """Return how long a request has waited for its promotion."""
        state = self._states.get(rid)
        if state is None:
            return 0.0
        return (self._clock() if state.over_s is None else state.over_s) - state.began_s

    def keep_only(self, rids: Collection[str]) -> None:
        """Forget all requests but these."""
        for rid in [rid for rid in self._states if rid not in rids]:
            del self._states[rid]

    def forget(self) -> None:
        """Forget all requests."""
        self._states.clear()


def _remember(table: dict[str, T], rid: str, value: T) -> None:
    """Add a request to a table, and forget the oldest beyond ``MAX_REQUESTS``."""
    table[rid] = value
    while len(table) > MAX_REQUESTS:
        del table[next(iter(table))]


def _cuts(
    places: Mapping[str, Sequence[BlockState]],
    needs: Mapping[str, int],
    states: Sequence[BlockState],
) -> Sequence[int]:
    """Return the lengths of prefixes, ascending, whose pages are in one of ``states`` in each pool.

    A range if KV is the only pool.
    """
    kv = places[KV]
    num_pages = next((at for at, place in enumerate(kv) if place not in states), len(kv))
    sides = {
        name: side_cuts([place in states for place in places[name]], num_last, num_pages)
        for name, num_last in needs.items()
        if name != KV
    }
    return common_cuts(num_pages, sides)


def _ends(cuts: Sequence[int], first: int, page_size: int) -> Sequence[int]:
    """Return the tokens at which prefixes end. cuts: in pages behind ``first`` tokens."""
    if isinstance(cuts, range):
        return range(first + page_size, first + page_size * len(cuts) + 1, page_size)
    return [first + cut * page_size for cut in cuts]
