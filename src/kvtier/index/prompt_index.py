"""Interface of the prompt index, which finds blocks along the tokens of prompts.

The native core (``native_index``) and a Python class (``python_index``) implement it; ``choice``
selects one. Both assign the same block numbers and choose the same victims, so tests compare them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.core.hints import BlockHint
from kvtier.core.keys import Labels
from kvtier.core.types import BlockId, BlockKey, Label, Match, Slot
from kvtier.index.block_index import BlockIndex, check_time
from kvtier.index.residency import State
from kvtier.index.trie import Node


class Inserted(NamedTuple):
    """Result of ``PromptIndex.insert``.

    blocks: blocks along the path, as far as it was followed. slots: slot of each of them. num_new:
    number of blocks that took a slot of the caller.
    """

    blocks: Sequence[BlockId]
    slots: Sequence[Slot]
    num_new: int


class PromptIndex(BlockIndex):
    """Index of blocks along the tokens of prompts. A child is found by its parent and label.

    Labels are ``keys.Labels``, or any sequence of bytes. ValueError is raised for labels outside of
    their tokens. Methods that change the index maintain counts, so that evictions take constant
    time per block.
    """

    @abstractmethod
    def match(self, namespace: bytes, labels: Sequence[Label]) -> Match:
        """Return the longest prefix of ``labels`` whose blocks are all ready in some tier."""

    def match_slots(
        self, namespace: bytes, labels: Sequence[Label], tier: str
    ) -> npt.NDArray[np.int64]:
        """Return the slots of the longest prefix that is ready in ``tier``.

        The result is int64 [num_blocks], read-only.
        """
        states = self.states(namespace, labels, tier)
        ready = next((at for at, state in enumerate(states) if state is not State.READY), None)
        blocks = self.extend(namespace, labels[: len(states) if ready is None else ready])
        slots = np.array(self.slots(blocks, tier), np.int64)
        slots.setflags(write=False)
        return slots

    @abstractmethod
    def states(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        tier: str,
        after: BlockId | None = None,
    ) -> list[State]:
        """Return residencies in ``tier`` along ``labels``, up to the first unknown block.

        after: the block below which the labels begin; None for the start of a prompt.
        """

    @abstractmethod
    def key(self, block: BlockId) -> BlockKey:
        """Return the chained key of the block's prefix; computed once, with those of ancestors."""

    @abstractmethod
    def set_keys(self, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        """Set keys of blocks that were computed elsewhere."""

    def learn_keys(
        self, namespace: bytes, labels: Sequence[Label], blocks: Sequence[BlockId]
    ) -> None:
        """Set the keys of the blocks along ``labels``, if they were computed in advance."""
        keys = labels.computed_keys(namespace) if isinstance(labels, Labels) else None
        if keys is not None:
            self.set_keys(blocks, keys[: len(blocks)])

    @property
    @abstractmethod
    def num_namespaces(self) -> int:
        """Number of namespaces with a block."""

    @abstractmethod
    def extend(
        self, namespace: bytes, labels: Sequence[Label], after: BlockId | None = None
    ) -> Sequence[BlockId]:
        """Return the blocks along ``labels``; make unknown ones.

        The caller begins a write of each new block before it calls anything else: a block that no
        tier holds is removed by the next change near it.

        after: the block below which the labels begin; None for the start of a prompt.
        """

    def insert(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        tier: str,
        slots: Sequence[Slot],
        now: float,
        after: BlockId | None = None,
        hold: bool = False,
    ) -> Inserted:
        """Add blocks whose bytes are in ``tier`` already.

        This is ``extend``, ``begin_write`` and ``commit`` in one call. A block that is ready in
        ``tier`` keeps its slot. The path ends before a block that is being written or evicted
        there.

        Args:
            namespace: namespace of the prompt.
            labels: labels of the blocks.
            tier: tier that has the bytes.
            slots: slot of each block.
            now: time in seconds.
            after: the block below which the labels begin; None for the start of a prompt.
            hold: whether to lease all blocks of the path.
        """
        check_time(now)
        states = self.states(namespace, labels, tier, after)
        for position, state in enumerate(states):
            if state not in (State.READY, State.ABSENT):
                labels = labels[:position]
                break
        path = self.extend(namespace, labels, after)
        placed: list[Slot] = []
        num_new = 0
        for block, slot in zip(path, slots, strict=False):
            if self.state(block, tier) is State.READY:
                [slot] = self.slots([block], tier)
            else:
                self.begin_write([block], tier, [slot])
                self.commit([block], tier, now)
                num_new += 1
            placed.append(slot)
        if hold:
            self.lease(path, tier)
        return Inserted(path, placed, num_new)

    @abstractmethod
    def on_request(self, namespace: bytes, labels: Sequence[Label], now: float) -> None:
        """Report a new request, from which policies learn.

        Called once per request, before any of its blocks is written. labels: labels of all blocks
        of its prompt, known or not.
        """

    @abstractmethod
    def on_state(
        self,
        namespace: bytes,
        labels: Sequence[Label],
        num_before: int,
        front: BlockId,
        at_end: bool,
        now: float,
    ) -> None:
        """Report that a request uses, or is about to write, a state.

        A state is a group of blocks that a request needs beside those of its prompt: a snapshot of
        recurrent layers, or a cell of window KV. Policies learn from it, but do not count it as a
        request.

        Args:
            namespace: namespace of the prompt.
            labels: labels of the state's path.
            num_before: number of blocks of the path that belong to the prompt.
            front: last block of the prompt before the state.
            at_end: whether the state is needed at the prompt's end, from which the next prompt
                probably continues.
            now: time in seconds.
        """

    @abstractmethod
    def retain(
        self, namespace: bytes, labels: Sequence[Label], block_hint: BlockHint, now: float
    ) -> None:
        """Apply a hint on a prompt's future use, for policies that learn.

        labels: labels of all blocks of the prompt, known or not. Raises ValueError for an invalid
        hint.
        """

    @abstractmethod
    def nodes(self) -> list[Node]:
        """Return all blocks with their places in the trie. Read-only."""
