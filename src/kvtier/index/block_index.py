"""The index that the cache asks: one call per prompt, blocks by number.

Two classes keep these promises, the native core's (``native_index``) and its Python twin
(``python_index``); ``choice`` says which is used. Both number blocks in the same way and choose the
same victims, so what one does can be compared with the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.index.groups import ReuseRule
from kvtier.index.residency import State
from kvtier.index.trie import Node
from kvtier.types import (
    AnyColumn,
    BlockId,
    BlockKey,
    BlockName,
    GroupMatch,
    Label,
    Match,
    Slot,
)


class Inserted(NamedTuple):
    """What ``BlockIndex.insert`` made of a path.

    blocks: along the path, as far as it went. slots: where each of them is now. num_new: how many
    of them are in a slot that the caller gave.
    """

    blocks: list[BlockId]
    slots: list[Slot]
    num_new: int


NUM_SLOTS = 1 << 32
"""That a column may have at most."""


def check_time(now: float) -> None:
    """Raise ValueError for what is in no order: a queue would never find its first."""
    if not isfinite(now):
        raise ValueError(f"now must be a finite number of seconds, not {now}")


def check_slot(slot: Slot) -> None:
    """Raise ValueError for what is no slot."""
    if not 0 <= slot < NUM_SLOTS:
        raise ValueError(f"slot {slot} is not in 0 .. 2**32 - 1")


class BlockIndex(ABC):
    """Which blocks are cached, in which column and slot, who holds them.

    A column is what one tier has of one group of layers: it has slots, leases and an order of
    leaving of its own. The name of a tier alone is the column of the first group, and with one
    group there are no others.

    tiers: fastest tier first. rules: per group, what a cut needs of it. columns: (tier, group),
    group by group. Queries change nothing; the verbs that change something take whole paths and
    keep the counts that make eviction a constant-time question. Labels: ``keys.Labels``, or any
    sequence of bytes. Owned by one thread.

    Misuse raises: KeyError for a block that is not known any more and for a column that there is
    not, AssertionError for a move that is not legal, ValueError for a slot outside of
    0 .. 2**32 - 1, for a time that is not finite and for labels outside of their tokens.
    """

    tiers: tuple[str, ...]
    rules: tuple[ReuseRule, ...]
    columns: tuple[AnyColumn, ...]

    # -- queries ----------------------------------------------------------------------------------

    @abstractmethod
    def match(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        """Longest prefix of ``labels`` whose blocks are all ready in some tier. AssertionError
        where that is not what can be reused: with several groups, or one that needs less."""

    @abstractmethod
    def match_groups(self, namespace: bytes, labels: Sequence[Label]) -> GroupMatch:
        """What is ready along ``labels``, group by group, up to the last possible cut.

        The walk goes on past blocks that a group lacks, as long as a later cut may do without.
        Cost: O(blocks x groups).
        """

    def match_slots(
        self, namespace: bytes, labels: Sequence[Label], column: AnyColumn
    ) -> npt.NDArray[np.int64]:
        """Slots of the longest prefix that ``column`` has ready: int64 [num_blocks], read-only."""
        states = self.states(namespace, labels, column)
        ready = next((at for at, state in enumerate(states) if state is not State.READY), None)
        blocks = self.extend(namespace, labels[: len(states) if ready is None else ready])
        slots = np.array(self.slots(blocks, column), np.int64)
        slots.setflags(write=False)
        return slots

    @abstractmethod
    def find(self, namespace: bytes, label: Label) -> tuple[BlockId, tuple[State, ...]] | None:
        """The block ``label`` right below the root, and where it stands in each of ``columns``;
        None where it is not known. For engines whose labels name whole prefixes."""

    @abstractmethod
    def state(self, block: BlockId, column: AnyColumn) -> State:
        """Where ``block`` stands in ``column``; ABSENT also for a block that is not known."""

    def states_of(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[State]:
        """``state`` of each."""
        return [self.state(block, column) for block in blocks]

    @abstractmethod
    def states(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        column: AnyColumn,
        after: BlockId | None = None,
    ) -> list[State]:
        """Where each known block along ``labels`` stands in ``column``, until one is not known.

        after: the block below which the labels begin; None for the start of a prompt.
        """

    @abstractmethod
    def slots(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[Slot]:
        """Slots of blocks that ``column`` holds."""

    @abstractmethod
    def prefixes(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[BlockId]:
        """The blocks of ``column`` that ``blocks`` continue: the nearest ready one above each."""

    @abstractmethod
    def num_uses(self, block: BlockId) -> int:
        """How often the block was touched."""

    def num_uses_of(self, blocks: Iterable[BlockId]) -> list[int]:
        """``num_uses`` of each."""
        return [self.num_uses(block) for block in blocks]

    @abstractmethod
    def num_leases(self, block: BlockId, column: AnyColumn) -> int:
        """How often the block is held in ``column``."""

    @abstractmethod
    def labels(self, blocks: Iterable[BlockId]) -> list[bytes]:
        """What each block is called under its parent."""

    @abstractmethod
    def num_evictable(self, column: AnyColumn) -> int:
        """Blocks of ``column`` that are ready and not leased: they could leave one after another.
        An upper bound where leaves leave first, for a child that has to stay keeps its parent."""

    @abstractmethod
    def num_held(self, column: AnyColumn) -> int:
        """Blocks that occupy a slot of ``column``."""

    @abstractmethod
    def key(self, block: BlockId) -> BlockKey:
        """Chained key of the block's prefix; computed once, with its ancestors'."""

    @abstractmethod
    def name(self, block: BlockId) -> BlockName:
        """What the block is called outside this process."""

    def names(self, blocks: Sequence[BlockId]) -> Sequence[BlockName]:
        """``name`` of each."""
        return [self.name(block) for block in blocks]

    @abstractmethod
    def set_keys(self, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        """Somebody has computed the keys of blocks already."""

    @property
    @abstractmethod
    def num_namespaces(self) -> int:
        """Namespaces with a block."""

    @abstractmethod
    def __len__(self) -> int:
        """Blocks known, cached or only on the way to a cached one."""

    # -- writing: absent -> writing -> ready ------------------------------------------------------

    @abstractmethod
    def extend(
        self, namespace: bytes, labels: Sequence[Label], after: BlockId | None = None
    ) -> list[BlockId]:
        """Numbers of the blocks along ``labels``, known or new. Begin a write before anything else:
        a block that no column holds is forgotten by the next change near it.

        after: the block below which the labels begin; None for the start of a prompt.
        """

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
        """The block's bytes are in its slot of ``column``: it can be matched from now on. It is no
        use of one that was touched since its write began: how long a copy takes says nothing."""

    def commit_all(self, blocks: Iterable[BlockId], column: AnyColumn, now: float) -> None:
        """``commit`` of each, in this order: where nothing but time says which leaves first, the
        first ones given do."""
        for block in blocks:
            self.commit(block, column, now)

    @abstractmethod
    def abort(self, block: BlockId, column: AnyColumn) -> Slot:
        """The write failed: the block is absent from ``column`` again. Returns the slot."""

    def abort_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[Slot]:
        """``abort`` of each."""
        return [self.abort(block, column) for block in blocks]

    def insert(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        column: AnyColumn,
        slots: Sequence[Slot],
        now: float,
        after: BlockId | None = None,
        hold: bool = False,
    ) -> Inserted:
        """Blocks whose bytes are in ``column`` already: ``extend``, ``begin_write`` and ``commit``.

        slots: one per label. A block that is ready in ``column`` keeps the slot that it has; the
        walk ends before one that is being written or evicted there.
        hold: lease all blocks of the path.
        """
        check_time(now)
        states = self.states(namespace, labels, column, after)
        for position, state in enumerate(states):
            if state not in (State.READY, State.ABSENT):
                labels = labels[:position]
                break
        path = self.extend(namespace, labels, after)
        placed: list[Slot] = []
        num_new = 0
        for block, slot in zip(path, slots, strict=False):
            if self.state(block, column) is State.READY:
                [slot] = self.slots([block], column)
            else:
                self.begin_write(block, column, slot)
                self.commit(block, column, now)
                num_new += 1
            placed.append(slot)
        if hold:
            self.lease(path, column)
        return Inserted(path, placed, num_new)

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
    def evict(self, column: AnyColumn, num_blocks: int) -> list[BlockId]:
        """Choose up to ``num_blocks`` blocks to leave ``column``; they are not matched there now.

        In a group that needs all blocks leaves go first, so a parent may follow its child in the
        same call; in others any block may. Finish each with ``forget`` (it is gone) or ``keep`` (it
        stays after all).
        """

    @abstractmethod
    def forget(self, block: BlockId, column: AnyColumn) -> Slot:
        """The block has left ``column``. Returns its slot, free from now on."""

    def forget_all(self, blocks: Iterable[BlockId], column: AnyColumn) -> list[Slot]:
        """``forget`` of each."""
        return [self.forget(block, column) for block in blocks]

    def drop(self, column: AnyColumn, num_blocks: int) -> list[Slot]:
        """``evict``, and ``forget`` at once. Returns the slots that are free now."""
        return self.forget_all(self.evict(column, num_blocks), column)

    @abstractmethod
    def keep(self, block: BlockId, column: AnyColumn) -> None:
        """The block stays in ``column``: it is ready again."""

    @abstractmethod
    def lose(self, block: BlockId, column: AnyColumn) -> Slot | None:
        """The column has lost the block, which was ready there; its children stay, out of reach for
        now. Returns the slot; None while somebody holds the block: ask again."""

    # -- for tests and doctors --------------------------------------------------------------------

    @abstractmethod
    def nodes(self) -> list[Node]:
        """All blocks as they are now, with their places in the trie. To be read only."""

    @abstractmethod
    def describe(self) -> str:
        """In words, what keeps the index and why."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError where the counts and the trie disagree. O(all blocks)."""
