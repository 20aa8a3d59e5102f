"""Promote a waiting prompt's blocks from storage to host memory.

``kvtier.plan.decide`` decides whether a request loads, waits or computes. This module describes
vLLM's look-ups to it, and answers vLLM in vLLM's terms. Blocks that need not pass through host
memory are reported to vLLM at once, and the ranks read them directly.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from weakref import WeakSet

from kvtier.cache.block_cache import BlockCache, BlockState
from kvtier.cache.direct import DirectReads
from kvtier.cache.waiters import Signal
from kvtier.connectors.vllm.shared.counts import Counts
from kvtier.connectors.vllm.shared.prompt import Shape
from kvtier.connectors.vllm.shared.request_state import Advice, RequestState, Way
from kvtier.core.errors import printable
from kvtier.core.types import HOST, Direct, LoadPolicy
from kvtier.observe.specs import VLLM_IMPATIENT_REQUESTS, VLLM_RECOMPUTED_CHUNKS
from kvtier.plan import Decision, Tell, explain
from kvtier.plan.decide import (
    OVER,
    Awaited,
    FoundBlocks,
    GivenUp,
    LoadUpTo,
    Wait,
    Waited,
    WaitUntil,
    decide,
    end_without_room,
    reads_directly,
)

logger = logging.getLogger(__name__)

COMING = (BlockState.ARRIVING, BlockState.STORAGE)


@dataclass(frozen=True, slots=True)
class DiskAnswer:
    """Wait for a block that ends once the ranks' disks have reported whether they have it."""

    cache: BlockCache
    key: bytes

    @property
    def is_over(self) -> bool:
        return self.cache.lookup_again(self.key, BlockState.UNKNOWN) is not BlockState.UNKNOWN


class Promotion:
    """Translates decisions on requests: whether one waits, what is promoted, how much is loaded.

    A request is described by the blocks that its last look-up met.

    Args:
        direct_reads: those of the engine's ranks; None if the ranks do not reach the storage.
        knows_storage: return whether the ranks' disks have reported all blocks that they have.
        counts: counts blocks that are recomputed although they were found.
    """

    def __init__(
        self,
        cache: BlockCache,
        direct_reads: DirectReads | None,
        shape: Shape,
        policy: LoadPolicy,
        knows_storage: Callable[[], bool],
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._direct_reads = direct_reads
        self._shape = shape
        self._always_loads = policy is LoadPolicy.ALWAYS
        self._knows_storage = knows_storage
        self._counts = counts
        self._clock = clock
        self._next_load = Signal()
        self._explained: WeakSet[RequestState] = WeakSet()  # requests that were logged

    def load_ended(self) -> None:
        """Note that a copy of vLLM's to the device has ended: requests that wait for one go on."""
        self._next_load.is_over = True
        self._next_load = Signal()

    def sources(self, places: Mapping[bytes, BlockState]) -> list[str]:
        """Return the tier that each block would be read from.

        Host memory also for blocks on their way there.
        """
        if BlockState.STORAGE not in places.values():
            return [HOST] * len(places)
        storages = self._cache.storages
        if len(storages) > 1:
            return self._cache.sources(list(places))
        (storage,) = storages
        return [storage if place is BlockState.STORAGE else HOST for place in places.values()]

    def goes_direct(self, key: bytes, state: RequestState) -> bool:
        """Whether a request's block in storage is to be read directly to the device.

        That is tried once, and not after a promotion. A block that did not arrive is promoted to
        host memory.
        """
        if state.ways.get(key) is Way.DIRECT:
            return True
        if not self._reads_directly(key, state, lacks_room=False):
            return False
        state.ways[key] = Way.DIRECT
        return True

    def _reads_directly(self, key: bytes, state: RequestState, *, lacks_room: bool) -> bool:
        how = Direct.OFF if self._direct_reads is None else self._direct_reads.how(key)
        return reads_directly(how, lacks_room=lacks_room, was_read=key in state.ways)

    # -- to wait or not ----------------------------------------------------------------------------

    def must_wait(self, state: RequestState, first: int) -> bool:
        """Return whether a request goes on waiting.

        It is looked up again once the device has other tokens of it than when it began to wait.

        first: tokens that the device has.
        """
        wait, is_same = state.wait, first == state.lookup.num_computed
        return wait is not None and is_same and wait.state(self._clock()) is not OVER

    def advise(self, state: RequestState, first: int, num_tokens: int) -> Advice:
        """Translate the decision on a request, and begin to promote the blocks that it waits for.

        first: tokens that it has already. num_tokens: of its prompt.
        """
        if state.given_up is not None:
            return Advice.COMPUTE
        now_s = self._clock()
        state.since_s = state.since_s or now_s
        stored_keys = state.to_promote()
        promoted_keys = {key for key, way in state.ways.items() if way is Way.PROMOTED}
        ends = state.ends()
        found = self._found(state, ends, first, num_tokens, is_pending=True)
        decision = decide(
            found,
            Waited(
                state.since_s,
                has_failed=not promoted_keys.isdisjoint(stored_keys),
                is_weighed=state.num_ready(ends) == len(ends)
                or (bool(promoted_keys) and not stored_keys),
            ),
            self._cache.cost_snapshot,
            now_s,
            always_loads=self._always_loads,
            tell=self._logs_decision(state),
        )
        if isinstance(decision, WaitUntil):
            return self._wait_for(state, found, decision, ends, stored_keys)
        if decision.given_up is GivenUp.OVERDUE:
            self._counts.add(VLLM_IMPATIENT_REQUESTS, 1)
        end = decision.end if isinstance(decision, LoadUpTo) else first
        if decision.given_up is not None:
            request_id, reason = printable(state.request.request_id), decision.given_up.name.lower()
            logger.debug("prompt request=%s waits no longer reason=%s", request_id, reason)
        if decision.given_up is not None or state.limit <= end:
            state.given_up = decision.given_up or GivenUp.NOTHING_NEW
            return Advice.LOOK_AGAIN
        return self._look_up_to(state, ends, end)

    def _wait_for(
        self,
        state: RequestState,
        found: FoundBlocks,
        wait: WaitUntil,
        ends: Mapping[bytes, int],
        stored_keys: Sequence[bytes],
    ) -> Advice:
        """Promote what has to come from storage.

        Where not all of it can, or is worth it, the request looks again, and meets only what it is
        to have.
        """
        limit = wait.end
        keys = [key for key in stored_keys if ends[key] <= limit]
        if keys:
            ready_keys = [key for key, at in state.lookup.met.items() if at is BlockState.MEMORY]
            num = self._cache.promote(keys, ready_keys)
            state.ways.update(dict.fromkeys(keys[:num], Way.PROMOTED))
            for key in keys[num:]:
                if not self._reads_directly(key, state, lacks_room=True):
                    limit = end_without_room(found, ends[key])
                    break
                state.ways[key] = Way.DIRECT
        if limit < found.reachable[-1]:
            return self._look_up_to(state, ends, limit)
        if any(state.ways.get(key) is Way.DIRECT for key in keys):
            return Advice.LOOK_AGAIN
        self._wait(state, wait.until_s)
        return Advice.WAIT

    def _look_up_to(self, state: RequestState, ends: Mapping[bytes, int], limit: int) -> Advice:
        """Have the request look again, and meet no block that ends beyond ``limit``."""
        state.limit = limit
        self._decline(state, ends, limit)
        return Advice.LOOK_AGAIN

    def _decline(self, state: RequestState, ends: Mapping[bytes, int], limit: int) -> None:
        """Note the blocks that end beyond ``limit``, and probe the storage that has them."""
        keys = [key for key, end in ends.items() if end > limit]
        self._counts.add(VLLM_RECOMPUTED_CHUNKS, len(keys))
        state.declined.update(keys)
        stored_keys = [key for key in keys if state.lookup.met[key] is BlockState.STORAGE]
        if stored_keys:
            self._cache.probe(stored_keys)

    def _wait(self, state: RequestState, until_s: float) -> None:
        """Note what a request waits for.

        A request whose blocks are all in memory waits for the end of another request's load. One
        without a look-up waits for its own copies in flight; vLLM then retries it.
        """
        coming_keys, unknown_key = [], None
        lookup = state.lookup
        for key, at in lookup.met.items():
            if at is BlockState.UNKNOWN:
                unknown_key = key if unknown_key is None else unknown_key
            elif at in COMING and state.ways.get(key) is not Way.DIRECT:
                coming_keys.append(key)
        answers: list[Awaited] = [] if unknown_key is None else list(lookup.answers)
        if unknown_key is not None and not self._knows_storage():
            answers.append(DiskAnswer(self._cache, unknown_key))
        reads: list[Awaited] = []
        if coming_keys:
            reads.append(self._cache.wait_for_reads(coming_keys))
        elif not answers and lookup.met:
            reads.append(self._next_load)
        state.begin_wait(Wait(until_s, reads, answers))

    # -- to load or to compute ---------------------------------------------------------------------

    def num_worth_loading(
        self, state: RequestState, first: int, found: int, num_tokens: int
    ) -> int:
        """Return how many of ``found`` tokens in host memory, after the ``first`` ones, to load."""
        now_s = self._clock()
        if state.since_s is not None:
            state.lookup.waited_s, state.since_s = now_s - state.since_s, None
        ends = state.ends()
        blocks = self._found(state, ends, first, num_tokens, is_pending=False)
        decision = decide(
            blocks,
            Waited(may_wait=False),
            self._cache.cost_snapshot,
            now_s,
            always_loads=self._always_loads,
            tell=self._logs_decision(state),
        )
        limit = decision.end if isinstance(decision, LoadUpTo) else first
        if not blocks.reachable or limit >= blocks.reachable[-1]:
            return found
        worth = min(found, max(0, limit - first))
        self._decline(state, ends, first + worth)
        return worth

    def _logs_decision(self, state: RequestState) -> Tell | None:
        """Return the logger of a request's decision, which logs once per request."""
        if not logger.isEnabledFor(logging.DEBUG) or state in self._explained:
            return None

        def tell(decision: Decision) -> None:
            self._explained.add(state)
            request_id = printable(state.request.request_id)
            logger.debug("prompt request=%s %s", request_id, explain(decision))

        return tell

    def _found(
        self,
        state: RequestState,
        ends: Mapping[bytes, int],
        first: int,
        num_tokens: int,
        *,
        is_pending: bool,
    ) -> FoundBlocks:
        """Describe the blocks of the last look-up.

        is_pending: vLLM can't load yet. Where vLLM looks up several groups, or only a window, it
        alone knows which prefixes could be loaded now; it loads everything or nothing. If all
        blocks are ready, another copy is in flight, before whose end vLLM loads none of them.
        """
        reachable = list(ends.values())
        block_size = self._shape.block_sizes[0] if self._shape.has_one_group else 0
        if block_size and not _is_prefix(reachable, first, block_size):
            block_size = 0
        if not block_size:
            reachable = reachable and [max(reachable)]
        ready = reachable
        if is_pending:
            num_ready = state.num_ready(ends)
            ready = reachable[:num_ready] if block_size else []
            if num_ready == len(ends):
                ready, reachable = [], [max(reachable, default=num_tokens)]

        met = state.lookup.met

        def sources(end: int) -> list[str]:
            num = bisect_right(reachable, end) if block_size else len(ends)
            return self.sources(
                met if num == len(met) else {key: met[key] for key in islice(ends, num)}
            )

        return FoundBlocks(
            first,
            num_tokens,
            ready,
            reachable,
            sources,
            block_size,
            self._shape.bytes_per_block,
            self._num_host_slots(),
        )

    def _num_host_slots(self) -> int | None:
        """Return how many slots limit a promotion; None if none do, or if a node counts them."""
        if self._direct_reads is not None and self._direct_reads.is_for_all:
            return None
        host = self._cache.usage().get(HOST)
        return None if host is None else host.num_open


def _is_prefix(ends: Sequence[int], first: int, block_size: int) -> bool:
    """Whether blocks follow each other, the first one behind the tokens that the device has."""
    begin = first // block_size * block_size
    end = begin + len(ends) * block_size
    return ends == list(range(begin + block_size, end + block_size, block_size))
