"""Promote a waiting prompt's blocks from storage to host memory.

A request waits no longer than recomputing would take, and only for blocks that are worth it. Blocks
that need not pass through host memory are reported to vLLM at once, and the ranks read them
directly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from vllm.v1.kv_offload.base import OffloadKey

from kvtier.connectors.vllm.counts import IMPATIENT, RECOMPUTED, Counts
from kvtier.connectors.vllm.prompt import Shape
from kvtier.connectors.vllm.request_state import Advice, RequestState, WaitReason
from kvtier.errors import printable
from kvtier.keyed.cache import BlockLocation, KeyedCache
from kvtier.plan import Costs, Tell, end_worth_loading, explain, patience_s
from kvtier.tiers import Room
from kvtier.types import HOST, Direct, LoadPolicy

logger = logging.getLogger(__name__)


class Promotion:
    """Decides, for one request at a time, from what its last look-up met: whether to wait, what to
    promote, how much to load.

    host: the room that is brought to. knows_storage: whether the ranks' disks have said all that
    they have. counts: is told what is computed though it was there.
    """

    def __init__(
        self,
        cache: KeyedCache,
        host: Room,
        shape: Shape,
        policy: LoadPolicy,
        knows_storage: Callable[[], bool],
        counts: Counts,
    ) -> None:
        self._cache = cache
        self._straight = cache.straight
        self._host = host
        self._shape = shape
        self._always_loads = policy is LoadPolicy.ALWAYS
        self._knows_storage = knows_storage
        self._counts = counts
        self._num_ended_loads = 0

    def load_ended(self) -> None:
        """A copy of vLLM's to the device has ended: whoever waits for one looks again."""
        self._num_ended_loads += 1

    def sources(self, places: Mapping[OffloadKey, BlockLocation]) -> list[str]:
        """Return the tier that each block would be read from; host memory also for blocks on
        their way there."""
        if BlockLocation.STORAGE not in places.values():
            return [HOST] * len(places)
        storages = self._cache.ladder.storages
        if len(storages) > 1:
            return self._cache.sources(list(places))
        (storage,) = storages
        return [storage if place is BlockLocation.STORAGE else HOST for place in places.values()]

    def goes_straight(self, key: OffloadKey, visit: RequestState) -> bool:
        """Whether a block in storage is to be read straight to the device: once for a request. What
        did not come that way is brought to host memory."""
        if key in visit.straight:
            return True
        if key in visit.read or self._straight.how(key) is not Direct.ON:
            return False
        visit.straight.add(key)
        return True

    # -- to wait or not ----------------------------------------------------------------------------

    def must_wait(self, visit: RequestState, first: int) -> bool:
        """Whether a request has to wait, and nothing has happened since that could change that: it
        need not look its blocks up again. first: tokens that it has already."""
        wait = visit.wait
        if wait is None:
            return False
        if (
            wait.first == first
            and time.monotonic() < wait.until
            and wait.num_ended_loads in (None, self._num_ended_loads)
            and not any(sign.is_over for sign in wait.signs)
            and (wait.unknown is None or self._cache.find(wait.unknown) is BlockLocation.UNKNOWN)
        ):
            return True
        visit.wait = None
        return False

    def advise(self, visit: RequestState, first: int, num_tokens: int) -> Advice:
        """Some blocks that a request asked for are not in host memory: bring them there, and have
        it wait, but for no longer than computing them would take.

        first: tokens that it has already. num_tokens: of its prompt.
        """
        if visit.is_impatient:
            return Advice.COMPUTE
        now_s = time.monotonic()
        visit.waits_since = visit.waits_since or now_s
        ends = visit.ends()
        found = max(ends.values(), default=num_tokens)
        until_s = visit.waits_since + patience_s(self._costs(), first, found)
        if now_s >= until_s:
            self._counts.add(IMPATIENT, 1)
            visit.is_impatient = True
            return Advice.LOOK_AGAIN
        stored = visit.to_bring()
        if not stored:
            self._wait(visit, first, until_s)
            return Advice.WAIT
        if not visit.promoted.isdisjoint(stored):  # a read failed: it may do so again and again
            visit.is_impatient = True
            return Advice.LOOK_AGAIN
        limit = self._limit(visit, ends, first, num_tokens)
        wanted = [key for key in stored if ends[key] <= limit]
        beside = [key for key, place in visit.places.items() if place is BlockLocation.MEMORY]
        num = self._cache.promote(wanted, beside)
        visit.promoted.update(wanted[:num])
        for key in wanted[num:]:
            if key in visit.read or self._straight.how(key) is Direct.OFF:
                limit = ends[key] - 1 if self._shape.has_one_group else first
                break
            visit.straight.add(key)
        if limit < found:
            visit.limit = limit
            visit.declined_ahead = sum(end > limit for end in ends.values())
            self._counts.add(RECOMPUTED, visit.declined_ahead)
            return Advice.LOOK_AGAIN
        if not visit.straight.isdisjoint(wanted):
            return Advice.LOOK_AGAIN
        self._wait(visit, first, until_s)
        return Advice.WAIT

    def _wait(self, visit: RequestState, first: int, until_s: float) -> None:
        """Note what has to happen before another look is worth it. Where nothing is on its way to
        memory, vLLM waits for a load of its own."""
        unknown = next(
            (key for key, at in visit.places.items() if at is BlockLocation.UNKNOWN), None
        )
        coming = [
            key
            for key, at in visit.places.items()
            if at in (BlockLocation.ARRIVING, BlockLocation.STORAGE) and key not in visit.straight
        ]
        if coming or unknown is not None:
            watches = [self._cache.watch(coming)] if coming else []
            if self._knows_storage():  # then stores were asked for it
                unknown = None
            visit.wait = WaitReason(first, until_s, [*watches, *visit.asked], unknown)
        elif visit.places:
            visit.wait = WaitReason(first, until_s, num_ended_loads=self._num_ended_loads)

    # -- to load or to compute ---------------------------------------------------------------------

    def num_worth_loading(
        self, visit: RequestState, first: int, found: int, num_tokens: int
    ) -> int:
        """Return how many of ``found`` tokens in host memory, after the ``first`` ones, to load."""
        if visit.waits_since is not None:
            visit.waited_s = time.monotonic() - visit.waits_since
        visit.waits_since = None
        ends = visit.ends()
        limit = self._limit(visit, ends, first, num_tokens, self._logs_decision(visit))
        visit.declined = 0
        if limit >= max(ends.values(), default=0):
            return found
        worth = min(found, max(0, limit - first))
        visit.declined = sum(end > first + worth for end in ends.values())
        self._counts.add(RECOMPUTED, visit.declined)
        return worth

    def _logs_decision(self, visit: RequestState) -> Tell | None:
        """Return the logger of a request's decision, which logs once per request."""
        if visit.is_explained or not logger.isEnabledFor(logging.DEBUG):
            return None
        visit.is_explained = True
        request_id = printable(visit.context.req_id)
        return lambda decision: logger.debug("prompt request=%s %s", request_id, explain(decision))

    def _limit(
        self,
        visit: RequestState,
        ends: Mapping[OffloadKey, int],
        first: int,
        num_tokens: int,
        tell: Tell | None = None,
    ) -> int:
        """The token up to which loading beats computing."""
        found = max(ends.values(), default=first)
        if self._always_loads:
            return found
        return end_worth_loading(
            self._costs(),
            self.sources(visit.places),
            first=first,
            found=found,
            num_tokens=num_tokens,
            block_size=self._shape.block_sizes[0] if self._shape.has_one_group else 0,
            bytes_per_block=self._shape.bytes_per_block,
            num_staging_slots=None if self._straight.is_for_all else self._host.num_open,
            tell=tell,
        )

    def _costs(self) -> Costs:
        return self._cache.ladder.cost_snapshot()
