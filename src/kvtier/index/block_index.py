"""Base of every index: operations on blocks by number.

A block gets its number from the index that finds it: ``PromptIndex`` along the tokens of a prompt,
``KeyIndex`` by the key that an engine gives it. What leaves, what is held, what may be copied is
the same for both, and whoever decides on that asks here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from math import isfinite

from kvtier.index.residency import State
from kvtier.types import AnyColumn, BlockId, BlockName, Slot

NUM_SLOTS = 1 << 32
"""Largest number of slots in a column."""


def check_time(now: float) -> None:
    """Raise ValueError for what is in no order: a queue would never find its first."""
    if not isfinite(now):
        raise ValueError(f"now must be a finite number of seconds, not {now}")


def check_slot(slot: Slot) -> None:
    """Raise ValueError for what is no slot."""
    if not 0 <= slot < NUM_SLOTS:
        raise ValueError(f"slot {slot} is not in 0 .. 2**32 - 1")


class BlockIndex(ABC):
    """Index of cached blocks by column and slot, with their leases.

    A column is what one tier has of one group of layers: it has slots, leases and an order of
    leaving of its own. The name of a tier alone is the column of the first group, and with one
    group there are no others.

    tiers: fastest tier first. Queries change nothing. Owned by one thread.

    Misuse raises: KeyError for a block that is not known any more and for a column that there is
    not, AssertionError for a move that is not legal, ValueError for a slot outside of
    0 .. 2**32 - 1 and for a time that is not finite.
    """

    tiers: tuple[str, ...]

    # -- queries ----------------------------------------------------------------------------------

    @abstractmethod
    def state(self, block: BlockId, column: AnyColumn) -> State:
        """Return the residency of ``block`` in ``column``; ABSENT for an unknown block."""

    def states_of(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[State]:
        """Return the state of each block."""
        return [self.state(block, column) for block in blocks]

    @abstractmethod
    def slots(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        """Slots of blocks that ``column`` holds."""

    @abstractmethod
    def prefixes(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[BlockId]:
        """The blocks of ``column`` that ``blocks`` continue: the nearest ready one above each."""

    @abstractmethod
    def num_uses(self, block: BlockId) -> int:
        """Return the number of times the block was touched."""

    def num_uses_of(self, blocks: Iterable[BlockId]) -> Sequence[int]:
        """Return the number of uses of each block."""
        return [self.num_uses(block) for block in blocks]

    @abstractmethod
    def num_leases(self, block: BlockId, column: AnyColumn) -> int:
        """Return the number of leases that hold the block in ``column``."""

    @abstractmethod
    def num_evictable(self, column: AnyColumn) -> int:
        """Blocks of ``column`` that are ready and not leased: they could leave one after another.

        An upper bound where leaves leave first, for a child that has to stay keeps its parent.
        """

    @abstractmethod
    def num_held(self, column: AnyColumn) -> int:
        """Blocks that occupy a slot of ``column``."""

    @abstractmethod
    def name(self, block: BlockId) -> BlockName:
        """Return the key of the block, its name outside this process."""

    def names(self, blocks: Sequence[BlockId]) -> Sequence[BlockName]:
        """Return the name of each block."""
        return [self.name(block) for block in blocks]

    @abstractmethod
    def __len__(self) -> int:
        """Blocks known, cached or only on the way to a cached one."""

    # -- writing: absent -> writing -> ready ------------------------------------------------------

    @abstractmethod
    def begin_write(self, block: BlockId, column: AnyColumn, slot: Slot) -> None:
        """``slot`` of ``column`` is being filled with ``block``."""

    def begin_write_all(
        self, blocks: Iterable[BlockId], column: AnyColumn, slots: Iterable[Slot]
    ) -> None:
        """``begin_write`` of each."""
        for block, slot in zip(blocks, slots, strict=True):
            self.begin_write(block, column, slot)

    @abstractmethod
    def commit(self, block: BlockId, column: AnyColumn, now: float) -> None:
        """The block's bytes are in its slot of ``column``: it can be matched from now on.

        It is no use of one that was touched since its write began: how long a copy takes says
        nothing.
        """

    def commit_all(self, blocks: Iterable[BlockId], column: AnyColumn, now: float) -> None:
        """``commit`` of each, in this order; it says which leaves first where nothing else does."""
        for block in blocks:
            self.commit(block, column, now)

    @abstractmethod
    def abort(self, block: BlockId, column: AnyColumn) -> Slot:
        """The write failed: the block is absent from ``column`` again. Returns the slot."""

    def abort_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        """``abort`` of each."""
        return [self.abort(block, column) for block in blocks]

    # -- what is worth its room -------------------------------------------------------------------

    @abstractmethod
    def set_room(self, column: AnyColumn, num_blocks: int) -> None:
        """``column`` has room for so many blocks, 1 or more: a policy that learns has to know."""

    @abstractmethod
    def admit(
        self,
        blocks: Sequence[BlockId],
        column: AnyColumn,
        num_free: int,
        least_chance: float = 0.0,
    ) -> Sequence[BlockId]:
        """Those of ``blocks``, which ``column`` has not, that are worth the room that they need.

        As many as ``num_free``, then those that are worth more than what would leave for them. What
        lies behind one that is not is not either. All of them, where the policy of the column lets
        everything in. Where too little may leave, that is not looked at.

        least_chance: that a block is used before it leaves again; it is not worth a write
        otherwise, be there room or not.
        """

    @abstractmethod
    def set_recompute_slope(self, at_blocks: float) -> None:
        """Set the depth, in blocks, at which a block is worth twice the first one, in proportion.

        Applies to all columns where a policy learns; 0: all are worth the same.
        """

    # -- use --------------------------------------------------------------------------------------

    @abstractmethod
    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        """The blocks were used: every column that holds them should know.

        blocks: of one request, in prompt order. Of a group that needs the last blocks only those
        were used that a cut after all of ``blocks`` needs.
        """

    @abstractmethod
    def lease(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        """Hold blocks that are ready (or on their way) in ``column``: they can't be evicted."""

    @abstractmethod
    def release(self, blocks: Iterable[BlockId], column: AnyColumn) -> None:
        """Give one hold back per block."""

    # -- eviction: ready -> evicting -> absent ----------------------------------------------------

    @abstractmethod
    def evict(self, column: AnyColumn, num_blocks: int) -> Sequence[BlockId]:
        """Choose up to ``num_blocks`` blocks to leave ``column``; they are not matched there now.

        In a group that needs all blocks leaves go first, so a parent may follow its child in the
        same call; in others any block may. Finish each with ``forget`` (it is gone) or ``keep`` (it
        stays after all).
        """

    @abstractmethod
    def forget(self, block: BlockId, column: AnyColumn) -> Slot:
        """The block has left ``column``. Returns its slot, free from now on."""

    def forget_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> Sequence[Slot]:
        """``forget`` of each."""
        return [self.forget(block, column) for block in blocks]

    def drop(self, column: AnyColumn, num_blocks: int) -> Sequence[Slot]:
        """``evict``, and ``forget`` at once. Returns the slots that are free now."""
        return self.forget_all(self.evict(column, num_blocks), column)

    @abstractmethod
    def keep(self, block: BlockId, column: AnyColumn) -> None:
        """The block stays in ``column``: it is ready again."""

    @abstractmethod
    def lose(self, block: BlockId, column: AnyColumn) -> Slot | None:
        """The column has lost the block, which was ready there.

        Its children stay, out of reach for now. Returns the slot; None while somebody holds the
        block: ask again.
        """

    # -- for tests and doctors --------------------------------------------------------------------

    @abstractmethod
    def describe(self) -> str:
        """In words, what keeps the index and why."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError where the counts and the trie disagree. O(all blocks)."""
