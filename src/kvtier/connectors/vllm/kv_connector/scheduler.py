"""The scheduler's half: which blocks a request loads and stores, in jobs for all ranks."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.vllm.kv_connector.messages import (
    NOTHING,
    PageJob,
    RankMessage,
    StepMessage,
)
from kvtier.connectors.vllm.shared.copies import BlockSlots, BlocksToStore, PageRange
from kvtier.connectors.vllm.shared.manager import TierManager
from kvtier.connectors.vllm.shared.prompt import RequestBlocks, group_key
from kvtier.connectors.vllm.shared.step import DueRequests, QueuedRequests, prefill_pieces
from kvtier.core.types import DEVICE, HOST
from kvtier.observe.specs import VLLM_MOVED_BYTES, VLLM_MOVED_SECONDS

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvtier.connectors.vllm.kv_connector.events import TierEvents
    from kvtier.connectors.vllm.shared.names import EngineFacts
    from kvtier.connectors.vllm.shared.request_state import RequestState

logger = logging.getLogger(__name__)

GROUP = 0
"""The one KV group that this front serves."""


@dataclass(slots=True, eq=False)
class Tracked:
    """A request, its blocks and its pages.

    Attributes:
        request: vLLM's request, or a wrapper that replaces its block hashes.
        state: State of the request in ``TierManager``.
        keys: Keys of its full blocks so far, in prompt order.
        pages: Pages that vLLM has allocated to the request, in prompt order.
        num_stored: Number of leading blocks that were stored, or need not be.
        is_running: Whether a step was scheduled for it since it was last given pages. Until then
            kvtier or another connector may be loading into them.
        stores: Job ids of the stores in flight.
    """

    request: Any
    state: RequestState
    keys: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_stored: int = 0
    is_running: bool = False
    stores: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class RunningJob:
    """A copy job that some ranks have not reported yet.

    Attributes:
        of: The request it belongs to.
        keys: Keys of its blocks.
        is_store: Whether it copies from pages to host memory.
        num_left: Number of ranks that have not reported it.
        is_dropped: Whether the copied blocks must not be used.
    """

    of: Tracked
    keys: Sequence[bytes]
    is_store: bool
    num_left: int
    is_dropped: bool = False


class SchedulerHalf:
    """Decides the loads and stores of requests. Used on the thread of vLLM's scheduler.

    Args:
        manager: Tiers of all ranks.
        facts: Sizes of the engine's pages and blocks.
        due: Finds the requests of a step that may have something to store.
        prompt_only: Whether generated tokens are left out of the cache.
        events: Turns changes into vLLM's KV events; None if vLLM publishes none.
    """

    def __init__(
        self,
        manager: TierManager,
        facts: EngineFacts,
        due: DueRequests,
        prompt_only: bool = False,
        events: TierEvents | None = None,
    ) -> None:
        self.manager = manager
        self._facts = facts
        self._due = due
        self._page = facts.groups[GROUP].tokens_per_page
        self.block_tokens = self._block = self._page * facts.pages_per_block
        self._hashes_per_block = self._block // facts.tokens_per_hash
        self._prompt_only = prompt_only
        self.events = events
        self._requests: dict[str, Tracked] = {}
        self._jobs: dict[int, RunningJob] = {}
        self._ids = itertools.count(1)
        self._loads: list[PageJob] = []
        self._stores: list[PageJob] = []
        self._finishing: list[str] = []
        self._waits = False
        self._queued = QueuedRequests(self._hashes_per_block, GROUP, manager.wait)

    # -- requests ----------------------------------------------------------------------------------

    def begin(self, request: Any) -> Tracked:
        """Return the state of a request; create it if vLLM has just added or first queried it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            blocks = RequestBlocks(
                request.request_id,
                params=request.kv_transfer_params,
                envelope=getattr(request, "kv_hints", None),  # from vLLM 0.32
                source=request,
            )
            tracked = Tracked(request, self.manager.begin(blocks))
            self._requests[request.request_id] = tracked
            self._queued.on_queued(request)
        return tracked

    def is_known(self, request_id: str) -> bool:
        return request_id in self._requests

    def _hash(self, tracked: Tracked) -> None:
        """Add the keys of blocks that vLLM has hashed since the last call."""
        every, keys, ends = self._hashes_per_block, tracked.keys, tracked.state.request.ends
        block_hashes = tracked.request.block_hashes
        for at in range(len(keys), len(block_hashes) // every):
            key = group_key(bytes(block_hashes[(at + 1) * every - 1]), GROUP)
            keys.append(key)
            ends[key] = (at + 1) * self._block

    # -- loads -------------------------------------------------------------------------------------

    def num_to_load(self, tracked: Tracked, num_computed: int) -> int | None:
        """Return the number of tokens to load behind ``num_computed``; None to make vLLM retry."""
        request = tracked.request
        if request.skip_reading_prefix_cache:
            return 0
        is_early = self.manager.names.needs_layout and self.manager.has_storage
        if is_early and self.manager.looks_up(tracked.state):
            return None  # the ranks report their layout in the first step
        self._hash(tracked)
        limits = tracked.state.request.limits

        def look_up() -> int | None:
            # The last token is computed, or there would be nothing to sample from.
            most = min(request.num_tokens - 1, num_computed + limits.max_load)
            first, last = num_computed // self._block, most // self._block
            end, is_ready = first, True
            for key in tracked.keys[first:last]:
                place = self.manager.find(key, tracked.state)
                if place is BlockState.NOWHERE:
                    break
                is_ready &= place is BlockState.MEMORY
                end += 1
            if self.events is not None:
                self._describe(tracked, tracked.keys[first:end])
            return max(0, end * self._block - num_computed) if is_ready else None

        return self.manager.num_to_load(tracked.state, num_computed, request.num_tokens, look_up)

    def on_pages(self, tracked: Tracked, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Note the pages of a request, and have ``num_tokens`` loaded into them."""
        tracked.pages, tracked.is_running = list(blocks.get_block_ids()[GROUP]), False
        if not num_tokens:
            return
        begin = tracked.state.lookup.num_computed
        end = begin + num_tokens
        keys = tracked.keys[begin // self._block : end // self._block]
        slots = self.manager.begin_load(keys, tracked.state)
        pages = tracked.pages[begin // self._page : end // self._page]
        first = begin // self._page % self._facts.pages_per_block
        job = self._begin_job(tracked, keys, PageRange(pages, first), slots, is_store=False)
        self._loads.append(job)

    def _begin_job(
        self,
        tracked: Tracked,
        keys: Sequence[bytes],
        pages: PageRange,
        slots: BlockSlots,
        is_store: bool,
    ) -> PageJob:
        job_id = next(self._ids)
        self._jobs[job_id] = RunningJob(tracked, keys, is_store, self._facts.num_ranks)
        return PageJob(job_id, tracked.request.request_id, [pages], slots)

    # -- stores ------------------------------------------------------------------------------------

    def _store(self, due: Iterable[tuple[Tracked, int]]) -> None:
        """Store the blocks that are new among the first tokens of requests.

        due: each request, and how many of its tokens are computed.
        """
        wanted: list[tuple[Tracked, int]] = []  # with the number of blocks that may be stored
        for tracked, num_computed in due:
            end = self._end_to_store(tracked, num_computed)
            if end > tracked.num_stored:
                wanted.append((tracked, end))
        if not wanted:
            return
        blocks_of = self.manager.begin_stores(
            [(tracked.keys[tracked.num_stored : end], tracked.state) for tracked, end in wanted]
        )
        for (tracked, end), blocks in zip(wanted, blocks_of, strict=True):
            if blocks is not None:  # else it is tried again when the request is due again
                tracked.num_stored = end
                self._begin_store(tracked, blocks)

    def _end_to_store(self, tracked: Tracked, num_computed: int) -> int:
        """Return how many of a request's first blocks may be stored."""
        self._hash(tracked)
        limits = tracked.state.request.limits
        num_tokens: int = min(num_computed, tracked.request.num_tokens, limits.max_store)
        if self._prompt_only:
            num_tokens = min(num_tokens, tracked.request.num_prompt_tokens)
        return min(num_tokens // self._block, len(tracked.keys))

    def _begin_store(self, tracked: Tracked, blocks: BlocksToStore) -> None:
        """Order the ranks to copy new blocks into their slots, and to compare audited ones."""
        if not blocks.keys:
            return
        num, pages = self._facts.pages_per_block, tracked.pages
        stored: list[int] = []
        for key in blocks.keys:
            at = tracked.state.request.ends[key] // self._page
            stored += pages[at - num : at]
        assert len(stored) == num * len(blocks.keys), "vLLM has not reported the pages of a block"
        if self.events is not None:
            self._describe(tracked, blocks.keys)
        job = self._begin_job(tracked, blocks.keys, PageRange(stored), blocks.slots, is_store=True)
        tracked.stores.add(job.job_id)
        self._stores.append(job)

    def _describe(self, tracked: Tracked, keys: Iterable[bytes]) -> None:
        assert self.events is not None, "checked by the caller: most engines have no listener"
        for key in keys:
            self.events.describe(tracked.request, key, tracked.state.request.ends[key])

    def _drop_stores(self, tracked: Tracked) -> None:
        """Mark the stores of a preempted request: vLLM may reuse their pages during the copy.

        The copied blocks are discarded. Their slots are freed after all ranks have ended the copy.
        """
        for job_id in tracked.stores:
            self._jobs[job_id].is_dropped = True
        tracked.pages = []
        tracked.num_stored = 0

    # -- steps -------------------------------------------------------------------------------------

    def take_step(self, output: SchedulerOutput) -> StepMessage:
        """Return the jobs and orders of the ranks for a step that vLLM has scheduled."""
        for request_id in output.preempted_req_ids or ():
            if tracked := self._requests.get(request_id):
                self._drop_stores(tracked)
        for new in output.scheduled_new_reqs:
            self._queued.on_dequeued(new.req_id)
        self._queued.end_step()
        due = self._due.find(output)
        if due:
            self._store_due(output, due)
        orders = self.manager.take_orders()
        step = self.manager.steps.begin(time.monotonic(), prefill_pieces(output)) if due else None
        computes = bool(output.num_scheduled_tokens)
        begins = self._loads or self._stores or orders or self._finishing or self._waits
        if computes and step is None and not begins:
            return NOTHING
        message = StepMessage(
            self._loads,
            self._stores,
            orders,
            self._finishing,
            step,
            computes,
            self._waits,
            self.manager.num_new_weights,
        )
        self._loads, self._stores, self._finishing, self._waits = [], [], [], False
        return message

    def _store_due(self, output: SchedulerOutput, due: Collection[str]) -> None:
        """Note the pages of the requests that were given some, and store what is new."""
        num_scheduled = output.num_scheduled_tokens
        computed: list[tuple[Tracked, int]] = []
        for new in output.scheduled_new_reqs:
            if tracked := self._requests.get(new.req_id):
                tracked.pages, tracked.is_running = list(new.block_ids[GROUP]), True
                computed.append((tracked, new.num_computed_tokens + num_scheduled[new.req_id]))
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, pages, before in (row for row in rows if row[0] in due):
            if tracked := self._requests.get(request_id):
                if request_id in cached.resumed_req_ids:
                    tracked.pages, tracked.is_running = [], True
                if pages is not None:
                    tracked.pages += pages[GROUP]
                computed.append((tracked, before + num_scheduled[request_id]))
        self._store(computed)

    def finish(self, request: Any, pages: Sequence[int]) -> bool:
        """Note that a request has finished. Return whether stores still read its pages."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._queued.on_dequeued(request.request_id)
        if tracked.is_running and pages:
            # What the last steps have computed may have been hashed only now.
            tracked.pages = list(pages)
            self._store([(tracked, min(request.num_computed_tokens, request.num_tokens - 1))])
        self.manager.finish(request.request_id)
        if all(self._jobs[job_id].is_dropped for job_id in tracked.stores):
            return False
        self._finishing.append(request.request_id)
        return True

    def drop_failed(self, pages: Collection[int]) -> None:
        """Discard the stores of requests with pages that another connector failed to load.

        What a request has computed behind such a page is wrong, too. vLLM has it computed again.
        """
        failed = set(pages)
        for job in self._jobs.values() if failed else ():
            if job.is_store and not job.is_dropped and not failed.isdisjoint(job.of.pages):
                job.is_dropped = True
                job.of.num_stored = 0

    def hear(self, message: RankMessage) -> None:
        """Process the reports of the ranks."""
        manager = self.manager
        if message.report.has_new_weights:  # before it reports the copies of that time as ended
            self.reset()
        if message.layouts:
            manager.names.tell_layout(" ".join(sorted(message.layouts)))
        manager.hear(message.report)
        manager.observe_loads(message.load_bytes, message.load_s)
        self._count_copies(HOST, DEVICE, sum(message.load_bytes), message.load_s)
        self._count_copies(DEVICE, HOST, message.store_bytes, message.store_s)
        for job_id, num in message.ended.items():
            job = self._jobs.get(job_id)
            if job is None:  # ordered before a reset
                continue
            job.num_left -= num
            if not job.num_left:
                del self._jobs[job_id]
                self._end(job_id, job)

    def _count_copies(self, src: str, dst: str, num_bytes: int, seconds: float) -> None:
        self.manager.counts.add(VLLM_MOVED_BYTES, num_bytes, src, dst)
        self.manager.counts.add(VLLM_MOVED_SECONDS, seconds, src, dst)

    def _end(self, job_id: int, job: RunningJob) -> None:
        if job.is_store:
            job.of.stores.discard(job_id)
            self.manager.end_store(job.keys, job.of.state, success=not job.is_dropped)
        else:
            self.manager.end_load(job.keys, job.of.state)

    def reset(self) -> None:
        """Forget all KV and all copies in flight. The ranks end these before they begin others."""
        self.manager.reset_cache()
        self._jobs.clear()
        self._stores.clear()
        self._waits = True
        for tracked in self._requests.values():
            tracked.stores.clear()
            tracked.num_stored = 0

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine has to go on taking steps."""
        return bool(self._jobs or self._finishing) or self.manager.has_pending_work()
