"""The scheduler's side: answers vLLM's questions about blocks, and decides for all ranks."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.cache.block_cache import BlockState, Change, Reserved
from kvtier.cache.transfer.ranks import RankMover, RankOrder, Report
from kvtier.connectors.vllm.shared.audits import HitAudits
from kvtier.connectors.vllm.shared.copies import BlockSlots, BlocksToStore
from kvtier.connectors.vllm.shared.counts import Counts, MetricValues, take_values
from kvtier.connectors.vllm.shared.key_scope import Doubt
from kvtier.connectors.vllm.shared.names import VllmNames
from kvtier.connectors.vllm.shared.new_weights import NEW_WEIGHTS
from kvtier.connectors.vllm.shared.promotion import Promotion
from kvtier.connectors.vllm.shared.prompt import RequestBlocks, Shape, depth
from kvtier.connectors.vllm.shared.reach import Cuts
from kvtier.connectors.vllm.shared.request_state import Advice, RequestState, Way
from kvtier.connectors.vllm.shared.step import Tell
from kvtier.connectors.vllm.shared.tiers import EngineTiers
from kvtier.core.hints import Hint, HintOutcome
from kvtier.core.types import DEVICE, DISK, HOST, CacheMode, LoadPolicy
from kvtier.observe import specs
from kvtier.plan import StepClock

if TYPE_CHECKING:
    from kvtier.connectors.vllm.shared.descriptions import NodeDescriber

logger = logging.getLogger(__name__)

KEPT = (BlockState.MEMORY, BlockState.STORAGE)
"""States of blocks that some tier has."""
NO_ROOM = Reserved((), (), [])
EndedStore = tuple[Collection[bytes], RequestState | None, bool]
"""Blocks of a store that all ranks have ended, their request, and whether they were copied."""


class TierManager:
    """The scheduler's side of both fronts: answers for requests what its ``BlockCache`` knows.

    Used on the scheduler's thread.

    tiers: cache of the engine's blocks. mover: gives orders to the ranks, and takes their reports.
    follows_hints: those of clients count. mode: whether requests load, and store. audit: share of
    hits that are audited. is_exact: whether vLLM computes the same bits in any batch.

    Attributes:
        describer: describes blocks to a node; None without one.
        cuts: where prompts can be cut. Until it is set, each block counts as needed.
    """

    def __init__(
        self,
        tiers: EngineTiers,
        mover: RankMover,
        names: VllmNames,
        shape: Shape,
        policy: LoadPolicy,
        publishes_events: bool,
        follows_hints: bool = True,
        mode: CacheMode = CacheMode.BOTH,
        audit: float = 0.0,
        is_exact: bool = False,
    ) -> None:
        self._follows_hints = follows_hints
        self._mode = mode
        self.describer: NodeDescriber | None = None
        self.cuts = Cuts()
        self.names = names
        self.counts = Counts()
        self._mover = mover
        self._tiers = tiers
        self.cache = tiers.cache
        self._direct_reads = tiers.direct_reads
        self.cache.metrics.keep_observations(specs.SHARED_WITH_VLLM)
        self.promotion = Promotion(
            self.cache, self._direct_reads, shape, policy, lambda: mover.is_complete, self.counts
        )
        self.steps = StepClock(self.cache.costs.observe_prefill)
        self._shape = shape
        self._publishes_events = publishes_events
        self._requests: dict[str, RequestState] = {}
        self._events: list[Change] = []
        self._reset_at: int | None = None  # the last step before a reset
        self._is_pool_old = False  # vLLM's own prefix cache may have KV of earlier weights
        self.num_new_weights = 0
        self._num_loads = 0
        self.audits = HitAudits(
            audit, self.cache, names, shape, self.has_storage, is_exact, self._requests
        )

    @property
    def has_storage(self) -> bool:
        """Whether blocks may be kept outside of this engine."""
        return self._tiers.is_shared or bool(self.cache.storages)

    @property
    def wait(self) -> Tell | None:
        """Reports to the policy which blocks vLLM's queue will need; None if it learns nothing."""
        return self.cache.wait if self.cache.learns and self._mode.loads else None

    # -- requests ----------------------------------------------------------------------------------

    def begin(self, request: RequestBlocks) -> RequestState:
        """Return the state of a new request. The caller keeps it until its last store has ended."""
        state = self._requests[request.request_id] = RequestState(request)
        for action in request.kv_hints.actions:
            self.counts.add(specs.VLLM_HINT_ACTIONS, 1, action)
        return state

    def finish(self, request_id: str) -> None:
        """Note that a request has finished. Its stores may end later."""
        state = self._requests.pop(request_id, None)
        if state is not None:  # vLLM reports a use only here
            self._begin(state)  # vLLM looks up nothing if its own pool had the whole prompt
            self._note_planned(state, ())
            self.audits.finish(state)
            self.cache.touch(state.request.in_order())
            if state.request.last_key or not self.cache.learns:
                self._hint(state, at_end=True)
            state.finish()

    def num_to_load(
        self,
        state: RequestState,
        num_computed: int,
        num_tokens: int,
        look_up: Callable[[], int | None],
    ) -> int | None:
        """Return how many tokens a request loads behind those on the device; None if it waits.

        It loads only where that pays, and waits no longer than computing would take.

        look_up: return how many tokens are found, by ``find``; None if some are not ready.
        """
        if self.promotion.must_wait(state, num_computed):
            return None
        state.scope.doubts &= ~Doubt.WEIGHTS
        if self._is_pool_old and num_computed > 0:
            state.scope.doubts |= Doubt.WEIGHTS
        if not self.looks_up(state):
            state.begin_look_up(num_computed)
            return 0
        while True:
            state.begin_look_up(num_computed)
            found = look_up()
            if found:
                worth = self.promotion.num_worth_loading(state, num_computed, found, num_tokens)
                if not self.audits.begin(state, num_computed, worth, self._num_loads > 0):
                    return worth
                continue  # vLLM meets less now
            if found is not None:
                return 0
            match self.promotion.advise(state, num_computed, num_tokens):
                case Advice.WAIT:
                    return None
                case Advice.COMPUTE:
                    return 0

    def looks_up(self, state: RequestState) -> bool:
        """Whether a request may load. vLLM asks all its connectors, and takes the first hit."""
        return self._mode.loads and not state.request.is_transferred

    def find(self, key: bytes, state: RequestState) -> BlockState:
        """Look up a block for a request, and return its state as the request may use it.

        ``NOWHERE`` also stands for a block that the request may not load, and ``MEMORY`` for one
        that is read directly from storage.
        """
        request = state.request
        if request.ends.get(key, 0) > state.limit or not state.is_kept(key):
            return BlockState.NOWHERE
        place = self._find(key, state)
        (tier,) = self.promotion.sources({key: place})
        if not request.limits.allows(tier):
            return BlockState.NOWHERE
        if state.given_up is not None and place is not BlockState.MEMORY:
            return BlockState.NOWHERE
        state.lookup.met[key] = place
        if place is BlockState.STORAGE and self.promotion.goes_direct(key, state):
            return BlockState.MEMORY
        return place

    def _find(self, key: bytes, state: RequestState) -> BlockState:
        """Return the location of a block.

        The first call looks up all blocks of the request. A block that was missing is looked up
        again if storage may have recovered it by then.
        """
        lookup = state.lookup
        if lookup.found is None:
            keys = state.request.after(lookup.num_computed)
            shared_keys = [key for key in keys if state.is_shared(key)]
            has_gaps = not self._shape.has_one_group
            lookup.found = {}
            if shared_keys:
                found, lookup.answers = self.cache.lookup(shared_keys, has_gaps)
                lookup.found.update(zip(shared_keys, found, strict=True))
                pairs = zip(shared_keys, found, strict=True)
                self._describe((key for key, at in pairs if at in KEPT), state)
            if len(shared_keys) < len(keys):
                own_keys = [key for key in keys if not state.is_shared(key)]
                lookup.found.update(zip(own_keys, self.cache.lookup_private(own_keys), strict=True))
            self._begin(state)  # a node answers first, and learns of the request afterwards
        place = lookup.found.get(key)
        if not state.is_shared(key):
            return self.cache.lookup_private([key])[0] if place is None else place
        if place is None or place is BlockState.NOWHERE:
            return self.cache.lookup_again(key, place)
        return place

    def origin(self, key: bytes, state: RequestState | None) -> str:
        """Return the tier that a block of a request comes from, storage until it was used once."""
        if state is not None and state.ways.get(key) is Way.READ:
            return DISK
        (origin,) = self.cache.origins([key])
        return origin

    def begin_load(self, keys: Collection[bytes], state: RequestState) -> BlockSlots:
        """Hold blocks that were found, for a copy to the device. Return where they are."""
        read = state.begin_load(keys, time.monotonic())
        memory_keys = [key for key in keys if key not in read]
        direct, sources = list(read.values()), list[str]()
        if self._direct_reads is not None:
            sources = self._direct_reads.read(list(read), direct)
        for tier, num in Counter([*self.cache.origins(memory_keys), *sources]).items():
            self.counts.add(specs.VLLM_LOADED_CHUNKS, num, tier)
        self._note_planned(state, keys)
        self._num_loads += 1
        held = self.cache.hold(memory_keys)
        return BlockSlots(held.slots, direct, self._mover.take_reads(), held.guard)

    def end_load(self, keys: Collection[bytes], state: RequestState | None) -> None:
        """Release blocks whose copy to the device has ended, well or not."""
        ways = {} if state is None else state.ways
        self.cache.release([key for key in keys if ways.get(key) is not Way.READ])
        self.promotion.load_ended()
        self._num_loads -= 1
        since_s = None if state is None else state.end_load()
        if state is not None and since_s is not None:
            end = max((state.request.ends.get(key, 0) for key in keys), default=0)
            waited_s = time.monotonic() - since_s
            self.cache.costs.saved(state.lookup.num_computed, end, waited_s)

    def _note_planned(self, state: RequestState, loaded_keys: Collection[bytes]) -> None:
        """Count a request's loaded blocks, and its found blocks that are computed instead."""
        state.declined.difference_update(loaded_keys)
        self.cache.costs.planned(len(loaded_keys), len(state.declined))
        state.declined.clear()

    def begin_store(
        self, keys: Collection[bytes], state: RequestState | None
    ) -> BlocksToStore | None:
        """Reserve slots for those of a request's blocks that are new. None if there is no room."""
        if not self._mode.stores:
            return self._stored(keys, NO_ROOM, state)
        return self._reserve(keys if state is None else self._kept(keys, state), state)

    def begin_stores(
        self, wanted: Sequence[tuple[Collection[bytes], RequestState]]
    ) -> list[BlocksToStore | None]:
        """Reserve slots for the new blocks of all requests of a step, by one call of the cache.

        wanted: blocks of each request. Returns what ``begin_store`` returns for each.
        """
        if not self._mode.stores:
            return [self._stored(keys, NO_ROOM, state) for keys, state in wanted]
        kept = [self._kept(keys, state) for keys, state in wanted]
        states = [state for _, state in wanted]
        ordered = map(self._in_order, kept, states)
        reserved = self.cache.reserve([key for keys in ordered for key in keys])
        if reserved is None:  # there may be room for some
            pairs = zip(kept, wanted, strict=True) if len(kept) > 1 else ()
            return [self._reserve(keys, state) for keys, (_, state) in pairs] or [None]
        slots = dict(zip(reserved.keys, reserved.slots, strict=True))
        found: list[BlocksToStore | None] = []
        for keys, (_, state) in zip(kept, wanted, strict=True):
            new_keys = [key for key in keys if key in slots]
            new_slots = [slots.pop(key) for key in new_keys]
            new = Reserved(new_keys, new_slots, [], reserved.guard)
            found.append(self._stored(keys, new, state))
        return found

    def _reserve(self, keys: Collection[bytes], state: RequestState | None) -> BlocksToStore | None:
        reserved = self.cache.reserve(keys if state is None else self._in_order(keys, state))
        if reserved is None:
            return None
        if self._shape.has_unlike_blocks:
            slots = dict(zip(reserved.keys, reserved.slots, strict=True))
            ordered = [key for key in dict.fromkeys(keys) if key in slots]
            reserved = replace(reserved, keys=ordered, slots=[slots[key] for key in ordered])
        return self._stored(keys, reserved, state)

    def _stored(
        self, keys: Collection[bytes], new: Reserved, state: RequestState | None
    ) -> BlocksToStore:
        """Return blocks to store, and audited ones among ``keys`` to compare."""
        if state is not None:
            self._describe(new.keys, state)
        if state is None or self.audits.of(state) is None:
            return BlocksToStore(new.keys, BlockSlots(new.slots, guard=new.guard), new.evicted)
        audited, held = self.audits.take(state, keys)
        slots = dict(zip((*new.keys, *audited), (*new.slots, *held.slots), strict=True))
        ordered = [key for key in dict.fromkeys(keys) if key in slots]
        audits = {at: key for at, key in enumerate(ordered) if key in audited}
        guard = held.guard or new.guard
        found = BlockSlots([slots[key] for key in ordered], guard=guard, audits=audits)
        return BlocksToStore(ordered, found, new.evicted)

    def _describe(self, keys: Iterable[bytes], state: RequestState) -> None:
        if self.describer is not None:
            self.describer.describe(keys, state.request)

    def _kept(self, keys: Collection[bytes], state: RequestState) -> list[bytes]:
        """Return those of a request's blocks that may be stored, and that a cut may need.

        They are reported to the policy.
        """
        ends, need = state.request.ends, self.cuts.need
        keys = [key for key in keys if state.is_kept(key) and need(key, ends.get(key, 0))]
        if self.cache.learns:
            self._continue(keys, state)
        return keys

    def _in_order(self, keys: Collection[bytes], state: RequestState) -> Collection[bytes]:
        """Return a request's blocks in the order of its prompt instead of group by group.

        If all blocks of a group end where those of the others do, the order of the first group is
        that of the prompt.
        """
        if not self._shape.has_unlike_blocks:
            return keys
        ends = state.request.ends
        return sorted(keys, key=lambda key: ends.get(key, 0))

    def _begin(self, state: RequestState) -> None:
        """Report the request to the policy, if this is the first time that its blocks matter."""
        request = state.request
        if self.cache.learns and request.last_key is None:
            keys = self._path(state)
            self.cache.on_request(keys)
            request.last_key = keys[-1] if keys else b""
            self._hint(state, at_end=False)

    def _hint(self, state: RequestState, at_end: bool) -> None:
        """Apply hints of the client. vLLM has no field to answer with: results are counted."""
        hint = state.request.hint
        if hint is None:
            return
        for part in (hint.at_end, hint.after_end) if at_end else (hint.at_begin,):
            if self._follows_hints and part != Hint():
                self.cache.hint(self._path(state), part, self._shape.block_sizes[0])
            for declined in () if self._follows_hints else part.declined(HintOutcome.OFF):
                counter = specs.SHARED_WITH_VLLM[specs.HINTS]
                self.counts.add(counter, 1, declined.action, declined.outcome)

    def _path(self, state: RequestState) -> list[bytes]:
        path = state.request.path(math.gcd(*self._shape.block_sizes), self.cuts)
        return [key for key in path if state.is_kept(key)]

    def _continue(self, keys: Sequence[bytes], state: RequestState) -> None:
        """Report blocks that are about to be stored: those of an answer come behind its prompt."""
        self._begin(state)
        request = state.request
        if not request.last_key:
            return
        ends = {key: request.ends.get(key, 0) for key in keys}
        last_end = request.ends.get(request.last_key, 0)
        new_keys = sorted((key for key in keys if ends[key] > last_end), key=ends.__getitem__)
        if new_keys:
            self.cache.continues(new_keys, request.last_key)
            request.last_key = new_keys[-1]

    def end_stores(self, ended: Iterable[EndedStore]) -> None:
        """Note that blocks are in their slots, or that they were not copied.

        All blocks of a step are committed by one call, since each message wakes a node.
        """
        block_size = min(self._shape.block_sizes)
        new: dict[bool, dict[bytes, int]] = {True: {}, False: {}}  # depths of blocks to commit
        for stored, state, success in ended:
            is_right = success and (state is None or state.scope.is_computed_right())
            keys = self.audits.end(state, stored, is_right)
            if not is_right:
                self.cache.abort(keys)
                continue
            ends = {} if state is None else state.request.ends
            for key in sorted(keys, key=lambda key: ends.get(key, 0)):
                is_shared = state is None or state.is_shared(key)
                new[is_shared][key] = depth(ends.get(key, 0), block_size)
        for to_storage, depths in new.items():
            if depths:
                self.cache.commit(list(depths), list(depths.values()), to_storage=to_storage)

    def take_changes(self) -> list[Change]:
        """Return the blocks that entered and left tiers, if events are published."""
        self._note_changes()
        events, self._events = self._events, []
        return events

    def _note_changes(self) -> None:
        """Collect the cache's changes for events; discard them if events are not published.

        It is called often enough that changes do not accumulate in the cache.
        """
        changes = self.cache.take_changes()
        if self._publishes_events:
            self._events += changes

    def has_pending_work(self) -> bool:
        return self.cache.is_busy or self._mover.is_busy or not self._mover.is_complete

    def reset_cache(self) -> None:
        """Empty all tiers; in a pause that leaves the weights as they are, none of them."""
        keeps = NEW_WEIGHTS.is_pausing
        if keeps:
            logger.info("the engine pauses with its weights: KV outside the device is kept")
            self.cache.end_copies()
        else:
            kept = "in the node has other names" if self._tiers.is_shared else "is forgotten"
            logger.warning("reset: the KV of this engine %s from now on", kept)
            self.cache.clear()
            if self.has_storage:
                self.names.disown()
            self.num_new_weights += 1
            self._is_pool_old = True
        self._reset_at, self._num_loads = self.steps.last, 0
        self.audits.reset()
        for state in self._requests.values():
            state.reset(has_new_weights=not keeps)

    def pool_was_emptied(self) -> None:
        """Note that vLLM's own prefix cache has nothing left, nor have requests any pages."""
        self._is_pool_old = False

    def take_values(self) -> MetricValues | None:
        """Return the metrics that are new since the last call; None for nothing."""
        self._note_changes()
        return take_values(self.counts, self.cache.metrics, self.cache.usage())

    def shutdown(self) -> None:
        if self.has_storage:
            self.names.close()
        self.cache.close()

    # -- reports of the fronts ---------------------------------------------------------------------

    def state_of(self, request_id: str) -> RequestState:
        """Return the state of a request that has begun and not finished."""
        return self._requests[request_id]

    def take_orders(self) -> list[RankOrder]:
        """Return the next orders to the ranks."""
        return self._mover.take_orders()

    def observe_loads(self, sizes: Sequence[float], seconds: float) -> None:
        """Record copies to the device. sizes: bytes of each. seconds: time of all together."""
        total = sum(sizes)
        for size in sizes if total else ():
            self.cache.costs.observe_copy((HOST, DEVICE), int(size), seconds * size / total)

    def hear(self, report: Report) -> None:
        """Apply reports of the ranks, before their ended jobs are reported to vLLM."""
        self._mover.hear(report)
        self._tiers.open(self._mover.num_open)
        self.cache.distrust(report.failed)
        self.audits.hear(report.compared)
        self.cache.poll()
        now_s = time.monotonic()
        for step in report.steps:
            self.steps.end(step, now_s)
        if self._reset_at is not None and max(report.steps, default=0) > self._reset_at:
            # The ranks ended their older copies before this step, which is of all of them.
            self._reset_at = None
            self.cache.copies_have_ended()
        self._note_changes()
