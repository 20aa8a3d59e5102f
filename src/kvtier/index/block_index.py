"""Interface that all indices share: operations on blocks by number.

A ``PromptIndex`` finds blocks along the tokens of a prompt, a ``KeyIndex`` by keys of an engine.
States, leases and evictions of blocks are the same in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from math import isfinite

from kvtier.core.types import BlockId, BlockName, Slot
from kvtier.index.residency import State

NUM_SLOTS = 1 << 32
"""Largest number of slots in a tier."""


def check_time(now: float) -> None:
    """Raise ValueError for a time that is not finite, because queues could not order it."""
    if not isfinite(now):
        raise ValueError(f"now must be a finite number of seconds, not {now}")


def check_slot(slot: Slot) -> None:
    """Raise ValueError for a number that is out of range for a slot."""
    if not 0 <= slot < NUM_SLOTS:
        raise ValueError(f"slot {slot} is not in 0 .. 2**32 - 1")


class BlockIndex(ABC):
    """Index of cached blocks: their state, slot and leases in each tier.

    Each tier has its own slots, leases and eviction order.

    Queries change nothing. One thread owns the index.

    Misuse raises KeyError (unknown block or tier), AssertionError (illegal transition) or
    ValueError (slot outside of 0 .. 2**32 - 1, time that is not finite).

    tiers: names of the tiers, fastest first.
    """

    tiers: tuple[str, ...]

    # -- queries ----------------------------------------------------------------------------------

    @abstractmethod
    def state(self, block: BlockId, tier: str) -> State:
        """Return the residency of ``block`` in ``tier``; ABSENT for an unknown block."""

    def states_of(self, blocks: Iterable[BlockId], tier: str) -> list[State]:
        """Return the state of each block."""
        return [self.state(block, tier) for block in blocks]

    @abstractmethod
    def slots(self, blocks: Iterable[BlockId], tier: str) -> Sequence[Slot]:
        """Return the slots of blocks that ``tier`` holds."""

    @abstractmethod
    def prefixes(self, blocks: Iterable[BlockId], tier: str) -> Sequence[BlockId]:
        """Return the nearest ancestor of each of ``blocks`` that is ready in ``tier``."""

    @abstractmethod
    def num_uses(self, blocks: Iterable[BlockId]) -> Sequence[int]:
        """Return the number of times each block was touched."""

    @abstractmethod
    def num_leases(self, block: BlockId, tier: str) -> int:
        """Return the number of leases that hold the block in ``tier``."""

    @abstractmethod
    def num_evictable(self, tier: str) -> int:
        """Return the number of blocks in ``tier`` that are ready and not leased.

        It is an upper bound of the blocks that can be evicted: in a trie leaves are evicted first,
        so a leased child protects its ancestors.
        """

    @abstractmethod
    def num_held(self, tier: str) -> int:
        """Return the number of blocks that occupy a slot of ``tier``."""

    @abstractmethod
    def names(self, blocks: Sequence[BlockId]) -> Sequence[BlockName]:
        """Return the name of each block outside of this process, with its key."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of known blocks: cached ones, and ancestors of cached ones."""

    # -- writing: absent -> writing -> ready ------------------------------------------------------

    @abstractmethod
    def begin_write(self, blocks: Iterable[BlockId], tier: str, slots: Iterable[Slot]) -> None:
        """Note that slots of ``tier`` are being filled with blocks."""

    @abstractmethod
    def commit(self, blocks: Iterable[BlockId], tier: str, now: float) -> None:
        """Note that the bytes of blocks are in their slots of ``tier``. They can be matched now.

        The order breaks ties between victims. It counts as a use, unless the block was touched
        since its write began: then the end of the copy is no new use.
        """

    @abstractmethod
    def abort(self, blocks: Iterable[BlockId], tier: str) -> Sequence[Slot]:
        """Note that writes failed: the blocks are absent from ``tier``. Return their slots."""

    # -- admission --------------------------------------------------------------------------------

    @abstractmethod
    def set_room(self, tier: str, num_blocks: int) -> None:
        """Set the capacity of ``tier``, 1 block or more, for policies that learn."""

    @abstractmethod
    def admit(
        self,
        blocks: Sequence[BlockId],
        tier: str,
        num_free: int,
        least_chance: float = 0.0,
    ) -> Sequence[BlockId]:
        """Return those of ``blocks`` that the policy of ``tier`` admits.

        Blocks are admitted while there are free slots, then if they are worth more than the blocks
        that would be evicted for them. After a rejected block, its continuation is rejected, too.
        If too few blocks can be evicted, values are not compared. Some policies admit every block.

        Args:
            blocks: blocks that are absent from ``tier``.
            tier: tier to admit blocks to.
            num_free: number of free slots.
            least_chance: minimum probability that a block is used before its eviction. Blocks
                below it are not worth a write, even if there are free slots.
        """

    @abstractmethod
    def set_recompute_slope(self, at_blocks: float) -> None:
        """Set how the value of a block grows with its depth, for policies that learn.

        at_blocks: depth at which a block is worth twice the first one; the value grows linearly.
        0: all blocks have the same value.
        """

    # -- use --------------------------------------------------------------------------------------

    @abstractmethod
    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        """Report a use of blocks to every tier that holds them.

        blocks: blocks of one request, in prompt order.
        """

    @abstractmethod
    def lease(self, blocks: Iterable[BlockId], tier: str) -> None:
        """Lease blocks that are ready or being written in ``tier``: they can't be evicted."""

    @abstractmethod
    def release(self, blocks: Iterable[BlockId], tier: str) -> None:
        """Release one lease of each block."""

    # -- eviction: ready -> evicting -> absent ----------------------------------------------------

    @abstractmethod
    def evict(self, tier: str, num_blocks: int) -> Sequence[BlockId]:
        """Choose up to ``num_blocks`` victims in ``tier``. They are no longer matched there.

        In a trie leaves are evicted first; a parent may follow its child in the same call. The
        caller finishes each with ``forget`` (evicted) or ``keep`` (not evicted after all).
        """

    @abstractmethod
    def forget(self, blocks: Iterable[BlockId], tier: str) -> Sequence[Slot]:
        """Finish evictions from ``tier``. Return the blocks' slots, which are free now."""

    def drop(self, tier: str, num_blocks: int) -> Sequence[Slot]:
        """Evict and forget up to ``num_blocks`` blocks. Return the slots that are free now."""
        return self.forget(self.evict(tier, num_blocks), tier)

    @abstractmethod
    def keep(self, blocks: Iterable[BlockId], tier: str) -> None:
        """Cancel evictions from ``tier``: the blocks are ready again."""

    @abstractmethod
    def lose(self, block: BlockId, tier: str) -> Slot | None:
        """Remove a ready block that ``tier`` has lost. Return its slot.

        Its children stay, but can't be matched for now. Returns None without any change while the
        block is leased; the caller tries again later.
        """

    # -- for tests and diagnosis ------------------------------------------------------------------

    @abstractmethod
    def describe(self) -> str:
        """Describe the implementation, and why it is used."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError if the counts and the blocks disagree. O(all blocks)."""
