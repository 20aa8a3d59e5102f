"""The index that the cache asks: one call per prompt, blocks by number.

Two classes keep these promises, the native core's (``native_index``) and its Python twin
(``python_index``); ``choice`` says which is used. Both number blocks in the same way and choose the
same victims, so what one does can be compared with the other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.hints import Said
from kvtier.index.block_index import BlockIndex, check_time
from kvtier.index.groups import ReuseRule
from kvtier.index.residency import State
from kvtier.index.trie import Node
from kvtier.keys import Labels
from kvtier.types import AnyColumn, BlockId, BlockKey, GroupMatch, Label, Match, Slot


class Inserted(NamedTuple):
    """Result of ``PromptIndex.insert``.

    blocks: along the path, as far as it went. slots: where each of them is now. num_new: how many
    of them are in a slot that the caller gave.
    """

    blocks: Sequence[BlockId]
    slots: Sequence[Slot]
    num_new: int


class PromptIndex(BlockIndex):
    """Blocks along the tokens of prompts: a child is found below its parent, by its label.

    rules: per group, what a cut needs of it. columns: (tier, group), group by group. The verbs that
    change something take whole paths and keep the counts that make eviction a constant-time
    question. Labels: ``keys.Labels``, or any sequence of bytes; ValueError for labels outside of
    their tokens.
    """

    rules: tuple[ReuseRule, ...]
    columns: tuple[AnyColumn, ...]

    @abstractmethod
    def match(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        """Longest prefix of ``labels`` whose blocks are all ready in some tier.

        AssertionError where that is not what can be reused: with several groups, or one that needs
        less.
        """

    @abstractmethod
    def match_groups(self, namespace: bytes, labels: Sequence[Label]) -> GroupMatch:
        """Return the ready blocks along ``labels`` per group, up to the last possible cut.

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
    def states(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        column: AnyColumn,
        after: BlockId | None = None,
    ) -> list[State]:
        """Return residencies in ``column`` along ``labels``, up to the first unknown block.

        after: the block below which the labels begin; None for the start of a prompt.
        """

    @abstractmethod
    def key(self, block: BlockId) -> BlockKey:
        """Chained key of the block's prefix; computed once, with its ancestors'."""

    @abstractmethod
    def set_keys(self, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        """Somebody has computed the keys of blocks already."""

    def learn_keys(
        self, namespace: bytes, labels: Sequence[Label], blocks: Sequence[BlockId]
    ) -> None:
        """The blocks along ``labels`` are known: keys that were computed ahead are theirs."""
        keys = labels.computed_keys(namespace) if isinstance(labels, Labels) else None
        if keys is not None:
            self.set_keys(blocks, keys[: len(blocks)])

    @property
    @abstractmethod
    def num_namespaces(self) -> int:
        """Namespaces with a block."""

    @abstractmethod
    def extend(
        self, namespace: bytes, labels: Sequence[Label], after: BlockId | None = None
    ) -> Sequence[BlockId]:
        """Numbers of the blocks along ``labels``, known or new.

        Begin a write before anything else: a block that no column holds is forgotten by the next
        change near it.

        after: the block below which the labels begin; None for the start of a prompt.
        """

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

    @abstractmethod
    def on_request(self, namespace: bytes, labels: Sequence[Label], now: float) -> None:
        """Report a request that begins.

        To be told once of each, with all of its prompt, before anything is written for it. labels:
        of blocks known or not. Policies that learn do so by this.
        """

    @abstractmethod
    def retain(self, namespace: bytes, labels: Sequence[Label], said: Said, now: float) -> None:
        """Somebody says something of a prompt; policies that learn take it into account.

        labels: of all of its blocks, known or not. ValueError for what nobody can mean.
        """

    @abstractmethod
    def nodes(self) -> list[Node]:
        """All blocks as they are now, with their places in the trie. To be read only."""
