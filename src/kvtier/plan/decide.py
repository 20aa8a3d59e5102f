"""Decide whether KV of a prompt is loaded, waited for, or computed: read this file first.

    decide       for engines that bring keys: load, wait or compute
    Wait.state   for every engine: whether a request goes on waiting
    weigh        for every engine whose blocks are weighed one by one (``worth.py``)
    is_computed_sooner  for engines that compute from the front while a load comes from the end

All are pure: they move nothing, keep no state, and the clock is an argument. A connector translates
the blocks that its engine requested into ``FoundBlocks``, and the result into its engine's terms.
The token front (``Cache.decide``) loads what ``weigh`` has chosen. A request waits before that,
for its prefetch.

1. Blocks beyond the token up to which loading beats computing are left out.
2. Blocks up to there that are ready are loaded.
3. Blocks that are not ready are waited for, after a promotion if they are in storage. A request
   never waits longer than computing would take, nor for a block whose read has failed. It then
   loads the blocks that are ready.
4. If no block is left, the prompt is computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from kvtier.core.types import DEVICE, Direct
from kvtier.plan.cost import Costs
from kvtier.plan.worth import Tell, is_worth_loading, num_worth_loading, patience_s


class GivenUp(Enum):
    """Reason why a request stopped waiting before all of its blocks had arrived."""

    OVERDUE = "overdue"
    """It has waited as long as computing would take."""
    READ_FAILED = "read failed"
    """A block is still in storage after it was promoted, and may fail again."""
    NOTHING_NEW = "nothing new"
    """Another look-up would find what this one did."""


@dataclass(frozen=True, slots=True)
class LoadUpTo:
    """Load the blocks that end at token ``end`` or before."""

    end: int
    given_up: GivenUp | None = None


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Wait until blocks are in memory.

    Attributes:
        until_s: latest end of the wait.
        end: blocks that end at this token or before are worth it; those in storage are to be
            promoted.
        ready: the token up to which a request that can't wait may load at once; the number of
            tokens that the device has if there is nothing to load yet.
    """

    until_s: float
    end: int
    ready: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Load nothing."""

    given_up: GivenUp | None = None


Reuse = LoadUpTo | WaitUntil | Compute


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """Blocks of a prompt behind the tokens that the device has. All positions are tokens.

    Attributes:
        first: number of tokens that the device has.
        num_tokens: length of the prompt.
        ready: ends of prefixes that can be loaded at once, ascending.
        reachable: ends of prefixes that can be loaded once all blocks are in memory that are
            arriving, in storage, or of unknown location. A block of unknown location counts as one
            in memory until storage has answered.
        sources: return the tier of each block up to a token, in prompt order. It is called only
            when blocks are weighed.
        block_size: tokens per block, if ``sources`` has one entry per block and a prompt may be cut
            after any of them; 0 if all blocks are loaded together or not at all.
        bytes_per_block: bytes per block.
        num_staging_slots: blocks that can be in flight from storage at a time; None for any number.
    """

    first: int
    num_tokens: int
    ready: Sequence[int]
    reachable: Sequence[int]
    sources: Callable[[int], Sequence[str]]
    block_size: int
    bytes_per_block: int
    num_staging_slots: int | None = None

    def limit(self, costs: Costs, end: int, tell: Tell | None = None) -> int:
        """Return the token, at most ``end``, up to which loading beats computing."""
        tiers, size = self.sources(end), self.block_size
        if not size:
            num_bytes = {tier: num * self.bytes_per_block for tier, num in Counter(tiers).items()}
            return end if is_worth_loading(costs, num_bytes, self.first, end) else self.first
        num_blocks = num_worth_loading(
            costs,
            [DEVICE] * (self.first // size) + list(tiers),
            num_tokens=self.num_tokens,
            block_size=size,
            bytes_per_block=self.bytes_per_block,
            num_staging_slots=self.num_staging_slots,
            tell=tell,
        )
        return num_blocks * size


@dataclass(frozen=True, slots=True)
class Waited:
    """State of a request's wait.

    Attributes:
        since_s: when it began to wait; None if it has not.
        given_up: why it stopped waiting; None if it has not.
        has_failed: whether a block that was promoted for it is still in storage.
        is_weighed: whether its missing blocks were weighed before their promotion. They are not
            weighed again while in flight.
        may_wait: False for a request that has to run now.
    """

    since_s: float | None = None
    given_up: GivenUp | None = None
    has_failed: bool = False
    is_weighed: bool = False
    may_wait: bool = True


def decide(
    found: FoundBlocks,
    waited: Waited,
    costs: Callable[[], Costs],
    now_s: float,
    *,
    always_loads: bool = False,
    tell: Tell | None = None,
) -> Reuse:
    """Decide whether to load, wait for, or compute the blocks that were found for a prompt.

    Args:
        found: the prompt's blocks.
        waited: the request's wait so far.
        costs: return the current costs, including each tier's queue. Called at most once, and only
            if needed, since a snapshot takes time.
        now_s: the clock, seconds.
        always_loads: whether all blocks found are loaded, at any cost.
        tell: called with each weighing of single blocks, to explain it.
    """
    snapshot: Costs | None = None

    def current() -> Costs:
        nonlocal snapshot
        snapshot = costs() if snapshot is None else snapshot
        return snapshot

    def limit(end: int, tell: Tell | None = None) -> int:
        return end if always_loads or end <= found.first else found.limit(current(), end, tell)

    first, given_up = found.first, waited.given_up
    ready_end, end = _last(found.ready, first), _last(found.reachable, first)
    if given_up is None and waited.may_wait and end > ready_end:
        worth = end if waited.is_weighed else limit(end, tell)
        if not found.block_size and worth <= first:
            worth = limit(ready_end)  # all together are not worth loading; fewer may be
        ready = _last_up_to(found.ready, worth, first)
        wanted = _last_up_to(found.reachable, worth, first)
        if wanted <= ready:
            return LoadUpTo(ready) if ready > first else Compute()
        since_s = now_s if waited.since_s is None else waited.since_s
        until_s = since_s + patience_s(current(), first, wanted)
        if now_s < until_s and not waited.has_failed:
            return WaitUntil(until_s, wanted, ready)
        given_up = GivenUp.OVERDUE if now_s >= until_s else GivenUp.READ_FAILED
        tell = None
    ready = _last_up_to(found.ready, limit(ready_end, tell), first)
    return LoadUpTo(ready, given_up) if ready > first else Compute(given_up)


def is_computed_sooner(compute_s: float, load_s: float) -> bool:
    """Whether a chunk at the front is computed while the rest is loaded from the end.

    compute_s: expected seconds to compute it. load_s: until the load, to which it belongs, would
    end. Without a measurement of both nothing is computed.
    """
    return 0 < compute_s < load_s


def end_without_room(found: FoundBlocks, end: int) -> int:
    """Return the token to load up to if memory lacks room for the block ending at ``end``."""
    return end - 1 if found.block_size else found.first


def reads_directly(how: Direct, *, lacks_room: bool, was_read: bool) -> bool:
    """Whether a block is read from storage directly to the device.

    Args:
        how: the storage tier's setting.
        lacks_room: whether memory has no room for the block.
        was_read: whether a direct read of it for this request has failed; there is only one try.
    """
    return not was_read and (how is Direct.ON or (lacks_room and how is not Direct.OFF))


def _last(ends: Sequence[int], default: int) -> int:
    return ends[-1] if ends else default


def _last_up_to(ends: Sequence[int], limit: int, default: int) -> int:
    """Return the last of the ascending ``ends`` that is at most ``limit``."""
    at = bisect_right(ends, limit)
    return ends[at - 1] if at else default


# -- whether a request goes on waiting -------------------------------------------------------------


class WaitState(IntEnum):
    """State of a wait. If several ranks wait for the same request, the greatest state counts."""

    OVER = 0
    """The request is looked up again, or computed."""
    READS = 1
    """Blocks are in flight to memory."""
    ANSWERS = 2
    """Look-ups in storage are in flight."""


OVER, READS, ANSWERS = WaitState


class Awaited(Protocol):
    """Something that a request waits for."""

    @property
    def is_over(self) -> bool:
        """Whether it has happened, or will never happen."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait of one request; ``state`` decides for every engine whether it continues.

    Attributes:
        until_s: time at which it ends in any case, by the caller's clock.
        reads: blocks in flight to memory.
        answers: look-ups in storage.
    """

    until_s: float
    reads: Sequence[Awaited] = ()
    answers: Sequence[Awaited] = ()

    def state(self, now_s: float) -> WaitState:
        """Return whether the request continues to wait, and for what. Changes nothing.

        The first answer ends the wait, since there may be more to read. While answers are missing,
        the end of the reads does not: the next look-up would wait for the same answer. Without
        look-ups, the wait ends when all reads have ended.
        """
        if now_s >= self.until_s:
            return OVER
        for answer in self.answers:
            if answer.is_over:
                return OVER
        if self.answers:
            return ANSWERS
        for read in self.reads:
            if not read.is_over:
                return READS
        return OVER
