"""The scheduler's half: which blocks a request loads and stores, in jobs for all ranks."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any

from kvtier.cache.block_cache import BlockState
from kvtier.connectors.vllm.kv_connector.messages import (
    NOTHING,
    PageJob,
    RankMessage,
    StepMessage,
)
from kvtier.connectors.vllm.shared.copies import BlockSlots, BlocksToStore, PageRange
from kvtier.connectors.vllm.shared.manager import EndedStore, TierManager
from kvtier.connectors.vllm.shared.prompt import RequestBlocks, group_key, group_of
from kvtier.connectors.vllm.shared.reach import Kind
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

NULL = 0
"""Id of vLLM's null block: a group's table has it in place of pages that vLLM has freed or has not
allocated."""
Offer = tuple[int, int, int]
"""State that vLLM offers to store: its KV group, its page, and the token that it is behind."""


@dataclass(slots=True, eq=False)
class GroupBlocks:
    """Blocks and pages of a request in one KV group.

    Attributes:
        keys: Keys of its full blocks so far, in prompt order.
        pages: Pages that vLLM has allocated to the request, in prompt order.
        num_stored: Number of leading blocks that were stored, or need not be.
    """

    keys: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_stored: int = 0


@dataclass(slots=True, eq=False)
class Tracked:
    """A request, its blocks and its pages.

    Attributes:
        request: vLLM's request, or a wrapper that replaces its block hashes.
        state: State of the request in ``TierManager``.
        groups: Its blocks in each KV group.
        is_running: Whether a step was scheduled for it since it was last given pages. Until then
            kvtier or another connector may be loading into them.
        stores: Job ids of the stores in flight.
    """

    request: Any
    state: RequestState
    groups: Sequence[GroupBlocks]
    is_running: bool = False
    stores: set[int] = field(default_factory=set)

    def set_stored(self, ends: Sequence[int]) -> None:
        for group, end in zip(self.groups, ends, strict=True):
            group.num_stored = end

    def begin_anew(self) -> None:
        """Have all blocks stored again."""
        self.set_stored([0] * len(self.groups))

    def set_pages(self, tables: Sequence[Sequence[int]]) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            group.pages = list(table)


@dataclass(slots=True, eq=False)
class RunningJob:
    """A copy job that some ranks have not reported yet.

    Attributes:
        of: The request it belongs to.
        keys: Keys of its blocks.
        is_store: Whether it copies from pages to host memory.
        num_left: Number of ranks that have not reported it.
        is_dropped: Whether the copied blocks must not be used.
        moving: Pages that it reads, and that vLLM may free before it has ended.
        lost: Keys of the blocks that were in such pages when these passed to others.
    """

    of: Tracked
    keys: Sequence[bytes]
    is_store: bool
    num_left: int
    is_dropped: bool = False
    moving: list[int] = field(default_factory=list)
    lost: set[bytes] = field(default_factory=set)


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
        self._groups = facts.groups
        self._pages = [group.tokens_per_page for group in facts.groups]
        self._blocks = [tokens * facts.pages_per_block for tokens in self._pages]
        self.block_tokens = max(self._blocks)
        self._align = lcm(*self._blocks)
        """Loads end at multiples of so many tokens, where a block of each group ends."""
        self._prompt_only = prompt_only
        self.events = events
        self._requests: dict[str, Tracked] = {}
        self._jobs: dict[int, RunningJob] = {}
        self._ids = itertools.count(1)
        self._loads: list[PageJob] = []
        self._stores: list[PageJob] = []
        self._finishing: list[str] = []
        self._waits = False
        self._read: dict[int, tuple[RunningJob, bytes]] = {}
        """Pages that vLLM may give to others while a store reads them."""
        self._queued = QueuedRequests(self._blocks[0] // facts.tokens_per_hash, 0, manager.wait)

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
            groups = [GroupBlocks() for _ in self._groups]
            tracked = Tracked(request, self.manager.begin(blocks), groups)
            self._requests[request.request_id] = tracked
            self._queued.on_queued(request)
        return tracked

    def is_known(self, request_id: str) -> bool:
        return request_id in self._requests

    def _hash(self, tracked: Tracked) -> None:
        """Add the keys of blocks that vLLM has hashed since the last call."""
        ends, block_hashes = tracked.state.request.ends, tracked.request.block_hashes
        for group, (blocks, num_tokens) in enumerate(
            zip(tracked.groups, self._blocks, strict=True)
        ):
            keys, every = blocks.keys, num_tokens // self._facts.tokens_per_hash
            for at in range(len(keys), len(block_hashes) // every):
                key = group_key(bytes(block_hashes[(at + 1) * every - 1]), group)
                keys.append(key)
                ends[key] = (at + 1) * num_tokens

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
            found: dict[bytes, BlockState] = {}
            end = self._end_found(tracked, num_computed, most, found)
            keys = [
                key
                for blocks, first, last in self._needed(tracked, num_computed, end)
                for key in blocks.keys[first:last]
            ]
            # Blocks of longer prefixes, which some group lacks, are not worth a wait.
            lookup = tracked.state.lookup
            lookup.met = {key: lookup.met[key] for key in keys if key in lookup.met}
            if self.events is not None:
                self._describe(tracked, keys)
            is_ready = all(found[key] is BlockState.MEMORY for key in keys)
            return max(0, end - num_computed) if is_ready else None

        return self.manager.num_to_load(tracked.state, num_computed, request.num_tokens, look_up)

    def _end_found(
        self, tracked: Tracked, num_computed: int, most: int, found: dict[bytes, BlockState]
    ) -> int:
        """Return the last token up to which all groups have what they need; 0 for none.

        Layers of whole prompts need all blocks, others the last ones.

        most: Token beyond which nothing is loaded. found: Takes the state of each block looked up.
        """

        def gap(blocks: GroupBlocks, places: Iterable[int]) -> int | None:
            for at in places:
                key = blocks.keys[at]
                if key not in found:
                    found[key] = self.manager.find(key, tracked.state)
                if found[key] is BlockState.NOWHERE:
                    return at
            return None

        whole = [group.reach.kind is Kind.WHOLE for group in self._groups]
        lengths = zip(tracked.groups, self._blocks, strict=True)
        most = min(most, *(len(blocks.keys) * size for blocks, size in lengths))
        end = most // self._align * self._align
        for is_whole in (True, False):
            last_end = -1
            while num_computed < end != last_end:
                last_end = end
                ranges = self._needed(tracked, num_computed, end)
                for group, (blocks, first, last) in enumerate(ranges):
                    if whole[group] is not is_whole:
                        continue
                    last = min(last, end // self._blocks[group])
                    places = range(first, last)
                    at = gap(blocks, places if is_whole else reversed(places))
                    if at is not None:
                        end = at * self._blocks[group] // self._align * self._align
        return end if end > num_computed else 0

    def _needed(
        self, tracked: Tracked, begin: int, end: int
    ) -> Iterator[tuple[GroupBlocks, int, int]]:
        """Yield, for each group, its first block that a load up to ``end`` brings, and the last.

        begin: Number of tokens that the device has.
        """
        for group, blocks, size in zip(self._groups, tracked.groups, self._blocks, strict=True):
            first = max(begin, group.reach.first_needed(end)) // size
            yield blocks, first, max(first, end // size)

    def on_pages(self, tracked: Tracked, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Note the pages of a request, and have ``num_tokens`` loaded into them."""
        tracked.set_pages(blocks.get_block_ids())
        tracked.is_running = False
        if not num_tokens:
            return
        begin = tracked.state.lookup.num_computed
        end = begin + num_tokens
        self._fence(tracked, begin)
        keys: list[bytes] = []
        ranges: list[PageRange] = []
        needed = zip(self._needed(tracked, begin, end), self._groups, self._pages, strict=True)
        for (of_group, first, last), group, size in needed:
            keys += of_group.keys[first:last]
            page = max(begin, group.reach.first_needed(end)) // size
            pages = of_group.pages[page : end // size]
            is_whole = group.reach.kind is Kind.WHOLE
            assert is_whole or NULL not in pages, "vLLM has allocated less than the group needs"
            ranges.append(PageRange(pages, page % self._facts.pages_per_block))
        slots = self.manager.begin_load(keys, tracked.state)
        self._loads.append(self._begin_job(tracked, keys, ranges, slots, is_store=False))

    def _fence(self, tracked: Tracked, num_computed: int) -> None:
        """Give up blocks that stores read from pages which now are this request's.

        vLLM frees pages behind a window while their request runs.

        num_computed: Tokens in front of the pages that are new to the request.
        """
        if self._read:
            for blocks, size in zip(tracked.groups, self._pages, strict=True):
                self._lose(blocks.pages[num_computed // size :])

    def _lose(self, pages: Iterable[int]) -> None:
        for page in pages:
            job, key = self._read.pop(page, (None, b""))
            if job is not None:
                job.lost.add(key)

    def _begin_job(
        self,
        tracked: Tracked,
        keys: Sequence[bytes],
        pages: Sequence[PageRange],
        slots: BlockSlots,
        is_store: bool,
    ) -> PageJob:
        job_id = next(self._ids)
        self._jobs[job_id] = RunningJob(tracked, keys, is_store, self._facts.num_ranks)
        return PageJob(job_id, tracked.request.request_id, pages, slots)

    # -- stores ------------------------------------------------------------------------------------

    def _store(self, due: Iterable[tuple[Tracked, int, int, Sequence[Offer] | None]]) -> None:
        """Store the blocks that are new among the first tokens of requests.

        due: each request, how many of its tokens were computed before this step and are after it,
        and the states that vLLM offers; None if it offers none.
        """
        wanted: list[tuple[Tracked, list[bytes], list[int]]] = []
        for tracked, num_before, num_after, offers in due:
            keys, ends = self._to_store(tracked, num_before, num_after, offers)
            if keys:
                wanted.append((tracked, keys, ends))
            else:
                tracked.set_stored(ends)
        if not wanted:
            return
        blocks_of = self.manager.begin_stores(
            [(keys, tracked.state) for tracked, keys, _ in wanted]
        )
        for (tracked, _, ends), blocks in zip(wanted, blocks_of, strict=True):
            if blocks is not None:  # else it is tried again when the request is due again
                tracked.set_stored(ends)
                self._begin_store(tracked, blocks)

    def _to_store(
        self, tracked: Tracked, num_before: int, num_after: int, offers: Sequence[Offer] | None
    ) -> tuple[list[bytes], list[int]]:
        """Return the blocks of a request that may be stored, and where each group's end."""
        self._hash(tracked)
        limits = tracked.state.request.limits
        num_tokens: int = min(num_after, tracked.request.num_tokens, limits.max_store)
        if self._prompt_only:
            num_tokens = min(num_tokens, tracked.request.num_prompt_tokens)
        keys: list[bytes] = []
        ends: list[int] = []
        num_pages = self._facts.pages_per_block
        for at, (group, blocks) in enumerate(zip(self._groups, tracked.groups, strict=True)):
            size, page = self._blocks[at], self._pages[at]
            first, end = blocks.num_stored, min(num_tokens // size, len(blocks.keys))
            ends.append(max(first, end))
            if group.reach.kind is Kind.STATE:
                for place, boundary in self._states(tracked, at, num_after, offers):
                    if boundary <= end * size and place != NULL:
                        blocks.pages[boundary // page - 1] = place
                        keys.append(blocks.keys[boundary // size - 1])
                continue
            if num_freed := min(group.reach.first_needed(num_before) // page, len(blocks.pages)):
                begin = min(first * num_pages, num_freed)
                blocks.pages[begin:num_freed] = [NULL] * (num_freed - begin)
            is_whole = group.reach.kind is Kind.WHOLE
            keys += [
                blocks.keys[number]
                for number in range(first, end)
                if is_whole or blocks.pages[(number + 1) * num_pages - 1] != NULL
            ]
        return keys, ends

    def _states(
        self, tracked: Tracked, at: int, num_after: int, offers: Sequence[Offer] | None
    ) -> Iterator[tuple[int, int]]:
        """Yield the page of each state that may be stored, and the token that it is behind.

        Versions of vLLM that don't offer states leave one in its page where a step ends with a
        block. Others write some in the middle of a step, too.
        """
        if offers is None:
            page = num_after // self._pages[at] - 1
            pages = tracked.groups[at].pages
            offers = [(at, pages[page], num_after)] if 0 <= page < len(pages) else ()
        for group, page, boundary in offers:
            if group == at and boundary % self._blocks[at] == 0:
                yield page, boundary

    def _begin_store(self, tracked: Tracked, blocks: BlocksToStore) -> None:
        """Order the ranks to copy new blocks into their slots, and to compare audited ones."""
        if not blocks.keys:
            return
        num, ends = self._facts.pages_per_block, tracked.state.request.ends
        pages: list[list[int]] = [[] for _ in self._groups]
        firsts = [0] * len(self._groups)
        moving: list[tuple[list[int], bytes]] = []
        for key in blocks.keys:
            group = group_of(key)
            at = ends[key] // self._pages[group]
            live = tracked.groups[group].pages[at - num : at]
            assert len(live) == num, "vLLM has not reported the pages of a block"
            if self._groups[group].reach.kind is not Kind.WHOLE:
                live = [page for page in live if page != NULL]
                firsts[group] = firsts[group] if pages[group] else num - len(live)
                moving.append((live, key))
            pages[group] += live
        if self.events is not None:
            self._describe(tracked, blocks.keys)
        ranges = list(map(PageRange, pages, firsts))
        job = self._begin_job(tracked, blocks.keys, ranges, blocks.slots, is_store=True)
        running = self._jobs[job.job_id]
        for live, key in moving:
            self._read.update(dict.fromkeys(live, (running, key)))
            running.moving += live
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
        for group in tracked.groups:
            group.pages = []
        tracked.begin_anew()

    # -- steps -------------------------------------------------------------------------------------

    def take_step(self, output: SchedulerOutput) -> StepMessage:
        """Return the jobs and orders of the ranks for a step that vLLM has scheduled."""
        for request_id in output.preempted_req_ids or ():
            if tracked := self._requests.get(request_id):
                self._drop_stores(tracked)
        for new in output.scheduled_new_reqs:
            self._queued.on_dequeued(new.req_id)
        self._queued.end_step()
        self._lose(
            copy.dst_block_id for copy in getattr(output, "kv_cache_block_copies", None) or ()
        )
        block_state = getattr(output, "kv_connector_block_state", None)
        offers = None if block_state is None else block_state.boundary_state_offloads
        due = self._due.find(output).union(offers or ())
        if due:
            self._store_due(output, due, offers)
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

    def _store_due(
        self,
        output: SchedulerOutput,
        due: Collection[str],
        offers: Mapping[str, Sequence[Offer]] | None,
    ) -> None:
        """Note the pages of the requests that were given some, and store what is new."""
        num_scheduled = output.num_scheduled_tokens
        computed: list[tuple[Tracked, int, int, Sequence[Offer] | None]] = []

        def note(tracked: Tracked, num_before: int) -> None:
            name = tracked.request.request_id
            states = None if offers is None else offers.get(name, ())
            computed.append((tracked, num_before, num_before + num_scheduled[name], states))

        for new in output.scheduled_new_reqs:
            if tracked := self._requests.get(new.req_id):
                tracked.set_pages(new.block_ids)
                tracked.is_running = True
                self._fence(tracked, new.num_computed_tokens)
                note(tracked, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, tables, before in (row for row in rows if row[0] in due):
            if tracked := self._requests.get(request_id):
                if request_id in cached.resumed_req_ids:
                    tracked.set_pages(tables or [()] * len(self._groups))
                    tracked.is_running = True
                    self._fence(tracked, before)
                elif tables is not None:
                    for blocks, pages in zip(tracked.groups, tables, strict=True):
                        self._lose(pages if self._read else ())
                        blocks.pages += pages
                note(tracked, before)
        self._store(computed)

    def finish(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """Note that a request has finished. Return whether stores still read its pages.

        tables: Its pages in each KV group.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._queued.on_dequeued(request.request_id)
        if tracked.is_running and any(tables):
            # What the last steps have computed may have been hashed only now.
            tracked.set_pages(tables)
            num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self._store([(tracked, num_computed, num_computed, ())])
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
            is_open = job.is_store and not job.is_dropped
            if is_open and not all(failed.isdisjoint(each.pages) for each in job.of.groups):
                job.is_dropped = True
                job.of.begin_anew()

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
        stored: list[EndedStore] = []
        for job_id, num in message.ended.items():
            job = self._jobs.get(job_id)
            if job is None:  # ordered before a reset
                continue
            job.num_left -= num
            if job.num_left:
                continue
            del self._jobs[job_id]
            if job.is_store:
                stored += self._ended(job_id, job)
            else:
                manager.end_load(job.keys, job.of.state)
        manager.end_stores(stored)

    def _count_copies(self, src: str, dst: str, num_bytes: int, seconds: float) -> None:
        self.manager.counts.add(VLLM_MOVED_BYTES, num_bytes, src, dst)
        self.manager.counts.add(VLLM_MOVED_SECONDS, seconds, src, dst)

    def _ended(self, job_id: int, job: RunningJob) -> list[EndedStore]:
        """Forget a store. Return its blocks whose pages passed to others, and the rest."""
        job.of.stores.discard(job_id)
        for page in job.moving:
            if self._read.get(page, (None, b""))[0] is job:
                del self._read[page]
        kept = [key for key in job.keys if key not in job.lost]
        return [(job.lost, job.of.state, False), (kept, job.of.state, not job.is_dropped)]

    def reset(self) -> None:
        """Forget all KV and all copies in flight. The ranks end these before they begin others."""
        self.manager.reset_cache()
        self._jobs.clear()
        self._read.clear()
        self._stores.clear()
        self._waits = True
        for tracked in self._requests.values():
            tracked.stores.clear()
            tracked.begin_anew()

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine has to go on taking steps."""
        return bool(self._jobs or self._finishing) or self.manager.has_pending_work()
