"""Hints that act: blocks read before their request comes, and blocks that leave memory early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf, isfinite
from typing import Generic, TypeVar

from kvtier.cache.ladder import Ladder
from kvtier.core.hints import (
    DEFAULT_TTL_S,
    END,
    MAX_BACK_S,
    Action,
    BlockHint,
    HintKind,
    HintOutcome,
    HintResult,
    check_block_hint,
)
from kvtier.core.types import BlockId
from kvtier.index import BlockIndex, State
from kvtier.observe.specs import HINTS

TENANT_SHARE = 0.25
"""Share of memory for blocks that were read for hints of one tenant and are not used yet."""
TOTAL_SHARE = 0.5
"""The same for all tenants together."""
MAX_PREFETCHES = 64
"""Prefetches of one tenant that are scheduled or not used yet."""
MAX_IN_ALL = 1024
MAX_NOTED = 4
"""Most blocks in the prompts of one tenant's prefetches, in multiples of memory's blocks. For all
tenants twice that. The bound is on the memory for their names."""
BLOCKS_AT_ONCE = 1 << 11
"""Most blocks of an action that are moved in one step."""
KEEP_S = 30.0
"""Seconds for which prefetched blocks are kept after the time by which they were needed."""
LEAD_FACTOR = 2.0
"""A prefetch begins so many times earlier than its read is expected to take."""
MIN_LEAD_S = 0.2
LOOK_AGAIN_S = 0.01

Prompt = TypeVar("Prompt", bound=Sequence[bytes])


@dataclass(frozen=True, slots=True)
class PromptCalls(Generic[Prompt]):
    """Calls of a cache about a tenant's prompt. The last two are for prefetches only.

    retain: apply a statement to its policies. blocks: its known blocks, in order.
    is_pending: whether a look-up in storage is in flight, so that more may be known soon.
    read: begin to read blocks from a storage, behind all reads that requests wait for; return how
        many of the first ones memory has room for.
    """

    retain: Callable[[bytes, Prompt, BlockHint], object]
    blocks: Callable[[bytes, Prompt], Sequence[BlockId]]
    is_pending: Callable[[bytes, Prompt], bool] = lambda tenant, prompt: False
    read: Callable[[Sequence[BlockId], str], int] = lambda blocks, storage: 0


@dataclass(slots=True, eq=False)
class _Prefetch(Generic[Prompt]):
    """A prefetch of one prompt.

    next_s: time at which it is looked at again. over_s: time at which it ends.
    num_uses: by then, of each block that is read for it.
    """

    prompt: Prompt
    next_s: float
    over_s: float
    num_uses: dict[BlockId, int] = field(default_factory=dict)

    def is_for(self, prompt: Prompt) -> bool:
        """Whether a prompt begins with the one that was prefetched."""
        num = len(self.prompt)
        if len(prompt) < num or prompt[num - 1] != self.prompt[-1]:
            return False
        return list(prompt[:num]) == list(self.prompt)


class HintActions(Generic[Prompt]):
    """Carries out the hints of clients on one cache. Owned by the cache's thread.

    A prefetch begins shortly before its time. Its reads are patient: every read that a request
    waits for goes before them. What was read and not used when the time is over leaves memory
    again, so that prefetches never hold more than their share of it.

    Args:
        index, ladder: of the cache.
        calls: of the cache.
        memory: name of the tier that storage is read into; None if nothing is moved.
        block_bytes: bytes of a block.
        learns: whether the policy of memory follows hints.
        clock: seconds.
    """

    def __init__(
        self,
        index: BlockIndex,
        ladder: Ladder,
        calls: PromptCalls[Prompt],
        memory: str | None,
        block_bytes: int,
        learns: bool,
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._ladder = ladder
        self._calls = calls
        self._memory = memory
        self._block_bytes = block_bytes
        self._learns = learns
        self._clock = clock
        self._prefetches: dict[bytes, list[_Prefetch[Prompt]]] = {}
        self._num_read: Counter[bytes] = Counter()  # blocks read and not used yet, by tenant
        self._next_s = inf

    def apply(self, tenant: bytes, prompt: Prompt, block_hint: BlockHint) -> HintResult:
        """Apply a client's statement to a prompt, and count it.

        Raises ValueError for an invalid one.
        """
        if block_hint.word in (HintKind.PREFETCH, HintKind.DEMOTE):
            check_block_hint(block_hint._replace(word=HintKind.KEEP))
        if block_hint.word == HintKind.PREFETCH:
            result = self._prefetch(tenant, prompt, block_hint.until)
        elif block_hint.word == HintKind.DEMOTE:
            result = self._demote(tenant, prompt, block_hint)
        else:
            self._calls.retain(tenant, prompt, block_hint)
            num = block_hint.num_of(len(prompt)) if self._learns else 0
            outcome = HintOutcome.DONE if self._learns else HintOutcome.NO_POLICY
            result = HintResult(block_hint.action, outcome, num)
        self._count(result)
        return result

    def _count(self, result: HintResult) -> None:
        self._ladder.metrics.count(HINTS, action=result.action, outcome=result.outcome)

    # -- leaving memory ----------------------------------------------------------------------------

    def _demote(self, tenant: bytes, prompt: Prompt, block_hint: BlockHint) -> HintResult:
        """Evict blocks that a slower tier has, and let the others be evicted first."""
        named = self._calls.blocks(tenant, prompt)[block_hint.first : block_hint.end]
        blocks, left = list(dict.fromkeys(named[-BLOCKS_AT_ONCE:])), set[BlockId]()
        tiers = self._index.tiers if self._memory is not None else ()
        has = {tier: self._ready(blocks, tier) for tier in tiers}
        for at, tier in enumerate(tiers[: len(tiers) - len(self._ladder.storages)]):
            below = set[BlockId]().union(*(has[slower] for slower in tiers[at + 1 :]))
            going = [block for block in blocks if block in has[tier] and block in below]
            left.update(self._ladder.evict_blocks(going, tier))
        until_s = self._clock() + DEFAULT_TTL_S
        rest = BlockHint(HintKind.KEEP, 0, block_hint.first, block_hint.end, until_s)
        self._calls.retain(tenant, prompt, rest)
        outcome = HintOutcome.NO_STORAGE if len(tiers) < 2 else HintOutcome.DONE
        return HintResult(Action.DEMOTE, outcome, len(left))

    def _ready(self, blocks: Sequence[BlockId], tier: str) -> set[BlockId]:
        """Return the blocks that can be read from a tier."""
        states = zip(blocks, self._index.states_of(blocks, tier), strict=True)
        ready = {block for block, state in states if state is State.READY}
        return {b for b in ready if (b, tier) not in lost} if (lost := self._ladder.lost) else ready

    # -- prefetches --------------------------------------------------------------------------------

    def _prefetch(self, tenant: bytes, prompt: Prompt, due_s: float) -> HintResult:
        if self._memory is None or not self._ladder.storages:
            return HintResult(Action.PREFETCH, HintOutcome.NO_STORAGE)
        if not len(prompt):
            return HintResult(Action.PREFETCH, HintOutcome.ABSENT)
        now_s = self._clock()
        due_s = min(max(due_s, now_s), now_s + MAX_BACK_S)
        mine = self._prefetches.get(tenant, [])
        known = [
            prefetch
            for prefetch in mine
            if len(prefetch.prompt) == len(prompt) and prefetch.is_for(prompt)
        ]
        for prefetch in known:
            if prefetch.num_uses:  # being read, or in memory
                prefetch.over_s = max(prefetch.over_s, due_s + KEEP_S)
                return HintResult(Action.PREFETCH, HintOutcome.BEGUN, len(prefetch.num_uses))
            self._end(tenant, prefetch)
        others = [prefetch for each in self._prefetches.values() for prefetch in each]
        if len(mine) >= MAX_PREFETCHES or len(others) >= MAX_IN_ALL:
            return HintResult(Action.PREFETCH, HintOutcome.SHARE)
        for noted, most in (mine, MAX_NOTED), (others, 2 * MAX_NOTED):
            if (
                sum(len(prefetch.prompt) for prefetch in noted) + len(prompt)
                > most * self._num_slots
            ):
                return HintResult(Action.PREFETCH, HintOutcome.SHARE)
        begin_s = due_s - self._lead_s(len(prompt))
        new = _Prefetch(prompt, max(now_s, begin_s), due_s + KEEP_S)
        self._prefetches.setdefault(tenant, []).append(new)
        result = None if begin_s > now_s else self._begin(tenant, new, now_s)
        self._next_s = min(self._next_s, new.next_s)
        return result or HintResult(Action.PREFETCH, HintOutcome.SCHEDULED, len(prompt))

    def _lead_s(self, num_blocks: int) -> float:
        """Return how long before it is due a prefetch begins."""
        costs = self._ladder.cost_snapshot()
        most_s = 0.0
        for storage in self._ladder.storages:
            route = (storage, str(self._memory))
            read_s = costs.copy_s(route, num_blocks * self._block_bytes)
            read_s += costs.queued_s.get(route, 0.0)
            most_s = max(most_s, read_s) if isfinite(read_s) else most_s
        return max(MIN_LEAD_S, LEAD_FACTOR * most_s)

    def _begin(self, tenant: bytes, prefetch: _Prefetch[Prompt], now_s: float) -> HintResult | None:
        """Begin to read the blocks of a prefetch that are not in memory, some in each step.

        Returns None while a look-up in storage is in flight, and in later steps.
        """
        prefetch.next_s = now_s + LOOK_AGAIN_S
        if self._calls.is_pending(tenant, prefetch.prompt):
            return None
        found = self._calls.blocks(tenant, prefetch.prompt)
        is_first, num_left, room = not prefetch.num_uses, 0, self._room(tenant)
        wanted = list(dict.fromkeys(self._missing(found)))  # an engine may name a block twice
        for storage in self._ladder.storages:
            has = self._ready(wanted, storage)
            there = [block for block in wanted if block in has]
            wanted = [block for block in wanted if block not in has]
            some = there[: min(room, BLOCKS_AT_ONCE)]
            begun = some[: self._calls.read(some, storage)]
            num_left += len(there) - len(begun)
            room = room - len(begun) if len(begun) == len(some) else 0
            num_before = len(prefetch.num_uses)  # what left memory meanwhile is read again
            prefetch.num_uses.update(zip(begun, self._index.num_uses(begun), strict=True))
            self._num_read[tenant] += len(prefetch.num_uses) - num_before
        if not num_left or not room:
            prefetch.next_s = prefetch.over_s
            if prefetch.num_uses or not num_left:
                back = BlockHint(HintKind.BACK, 0, 0, END, prefetch.over_s)
                self._calls.retain(tenant, prefetch.prompt, back)
        if prefetch.num_uses:
            num = num_left + len(prefetch.num_uses) if room else len(prefetch.num_uses)
            return HintResult(Action.PREFETCH, HintOutcome.BEGUN, num) if is_first else None
        self._end(tenant, prefetch)
        if num_left:
            return HintResult(Action.PREFETCH, HintOutcome.SHARE)
        outcome = HintOutcome.IN_MEMORY if len(found) else HintOutcome.ABSENT
        return HintResult(Action.PREFETCH, outcome, len(found))

    def _missing(self, blocks: Sequence[BlockId]) -> Sequence[BlockId]:
        """Return the blocks that no memory has, and that are not on their way there."""
        for tier in self._index.tiers[: -len(self._ladder.storages)]:
            states = zip(blocks, self._index.states_of(blocks, tier), strict=True)
            blocks = [block for block, state in states if state is State.ABSENT]
        return blocks

    def _room(self, tenant: bytes) -> int:
        """Return how many blocks may be read for a tenant now."""
        of_tenant = int(TENANT_SHARE * self._num_slots) - self._num_read[tenant]
        return max(0, min(of_tenant, int(TOTAL_SHARE * self._num_slots) - self._num_read.total()))

    @property
    def _num_slots(self) -> int:
        return self._ladder.usage()[str(self._memory)].num_slots

    def _end(self, tenant: bytes, prefetch: _Prefetch[Prompt]) -> None:
        self._prefetches[tenant].remove(prefetch)
        if not self._prefetches[tenant]:
            del self._prefetches[tenant]
        self._num_read[tenant] -= len(prefetch.num_uses)
        if not self._num_read[tenant]:
            del self._num_read[tenant]

    def on_request(self, tenant: bytes, prompt: Prompt) -> None:
        """Note a request for a prompt. It uses the prefetched blocks: their prefetch ends."""
        for prefetch in [
            prefetch for prefetch in self._prefetches.get(tenant, ()) if prefetch.is_for(prompt)
        ]:
            if prefetch.num_uses:
                self._count(HintResult(Action.PREFETCH, HintOutcome.USED))
            self._end(tenant, prefetch)

    def poll(self) -> None:
        """Begin the prefetches that are due, and end late ones.

        One call looks at about ``BLOCKS_AT_ONCE`` blocks of prompts, or at one longer prompt. The
        next call goes on, so that no step of the engine pays for many prefetches of one time.
        """
        now_s = self._clock()
        if now_s < self._next_s:
            return
        due = [
            (tenant, prefetch)
            for tenant, mine in self._prefetches.items()
            for prefetch in mine
            if prefetch.next_s <= now_s
        ]
        num_left = BLOCKS_AT_ONCE
        for tenant, prefetch in sorted(due, key=lambda pair: pair[1].next_s):
            if num_left <= 0:
                break
            num_left -= len(prefetch.prompt)
            if now_s >= prefetch.over_s:
                self._expire(tenant, prefetch)
            elif (result := self._begin(tenant, prefetch, now_s)) is not None:
                self._count(result)
        left = (prefetch.next_s for mine in self._prefetches.values() for prefetch in mine)
        self._next_s = min(left, default=inf)

    @property
    def has_prefetches(self) -> bool:
        """Whether ``poll`` has work to do, now or later."""
        return bool(self._prefetches)

    @property
    def is_due(self) -> bool:
        """Whether ``poll`` has work to do now."""
        return self._next_s <= self._clock()

    def _expire(self, tenant: bytes, prefetch: _Prefetch[Prompt]) -> None:
        """Evict the blocks of a prefetch that nothing has used since, some in each step."""
        num_uses, memory = prefetch.num_uses, str(self._memory)
        some = list(islice(num_uses, BLOCKS_AT_ONCE))
        states = list(zip(some, self._index.states_of(some, memory), strict=True))
        if any(at is State.WRITING for _, at in states):  # its slots are taken until it is read
            prefetch.next_s = self._clock() + MIN_LEAD_S
            return
        here = [block for block, at in states if at is State.READY]
        uses = zip(here, self._index.num_uses(here), strict=True)
        self._ladder.evict_blocks([b for b, num in uses if num == num_uses[b]], memory)
        if len(some) < len(num_uses):
            prefetch.num_uses = {
                block: num_uses[block] for block in islice(num_uses, len(some), None)
            }
            self._num_read[tenant] -= len(some)
            return
        outcome = HintOutcome.EXPIRED if num_uses else HintOutcome.ABSENT
        self._count(HintResult(Action.PREFETCH, outcome))
        self._end(tenant, prefetch)

    def clear(self) -> None:
        """Forget all prefetches."""
        self._prefetches.clear()
        self._num_read.clear()
        self._next_s = inf
