"""The keyed cache over memory that the engine keeps itself, and lends for a while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.index import KeyIndex, State
from kvtier.keyed.cache import KeyedCache
from kvtier.ladder import Ladder
from kvtier.plan import Copy
from kvtier.tiers import LentMemory
from kvtier.types import BlockId, Slot

THERE = bytes([State.READY])
"""Of a block that storage has, as the index marks it."""


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Result of a look-up in storage.

    marks: by key, ``THERE`` where storage has it.

    blocks: what the index calls them, None for those that it does not know. Bytes, for they are
    searched faster than an array is made.
    """

    marks: bytes
    blocks: Sequence[BlockId | None]

    @classmethod
    def nothing(cls, num_keys: int) -> Look:
        """None of them is there."""
        return cls(bytes(num_keys), [None] * num_keys)

    @property
    def has_unknown(self) -> bool:
        """Whether the index does not know some of the blocks."""
        return None in self.blocks

    @property
    def num_first(self) -> int:
        """Return how many of the first keys are there."""
        return len(self.marks) - len(self.marks.lstrip(THERE))

    def flags(self) -> list[bool]:
        """By key, whether storage has it."""
        return [mark == THERE[0] for mark in self.marks]

    def first(self, num: int) -> list[BlockId]:
        """The first ``num`` blocks, all of which are there."""
        return cast("list[BlockId]", self.blocks[:num])

    def there(self) -> list[BlockId]:
        """Return the blocks that storage has."""
        return cast("list[BlockId]", list(compress(self.blocks, self.flags())))


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """State of blocks: bool [n] each.

    in_memory: in lent rows. moving: between these and storage, or queued for it. stored: in
    storage.
    """

    blocks: Sequence[BlockId | None]
    in_memory: npt.NDArray[np.bool_]
    moving: npt.NDArray[np.bool_]
    stored: npt.NDArray[np.bool_]


class RowCache(KeyedCache):
    """Blocks are in memory, or come there, in slots that the engine names.

    Until it takes them back with ``displace``. So ``reserve`` finds no room here, and ``promote``
    brings nothing.

    What is in memory stays in storage, too: a job's end can't push out its beginning.
    """

    def __init__(
        self,
        rows: LentMemory,
        index: KeyIndex,
        ladder: Ladder,
        namespace: Callable[[], bytes],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(index, ladder, namespace, clock)
        self._rows = rows
        self._kept: set[tuple[BlockId, str]] = set()  # leased in storage

    def place(self, keys: Sequence[bytes], slots: Sequence[Slot], depths: Sequence[int]) -> None:
        """The engine has blocks in ``slots``, and storage gets those that it has not.

        keys: in prompt order, none of them in memory already. depths: see ``commit``.
        """
        self._rows.lend(list(slots))
        blocks = self._index.make(keys)
        self._index.begin_write_all(blocks, self.memory, slots)
        self._index.commit_all(blocks, self.memory, self._clock())
        self._index.set_depths(blocks, depths)
        self.ladder.reuse_sampler.came(keys, blocks)
        self._use(blocks)
        for storage in self.ladder.storages:
            states = self._index.states_of(blocks, storage)
            there = zip(blocks, states, strict=True)
            self._keep([block for block, state in there if state is State.READY], storage)
        self._archive(blocks)

    def fetch(self, keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Bring blocks from storage into ``slots``; none of them is in memory already."""
        self._rows.lend(list(slots))
        blocks, states = self._index.find_all(keys)
        by_tier = np.frombuffer(states, np.uint8).reshape(-1, len(self._tiers)).copy()
        for at, block in enumerate(blocks) if self._lost else ():
            for column, tier in enumerate(self._tiers):
                by_tier[at, column] *= (block, tier) not in self._lost
        for column, storage in enumerate(self._tiers[1:], 1):
            here = np.flatnonzero(by_tier[:, column] == State.READY).tolist()
            by_tier[here] = 0  # the first storage that has a block gives it
            chosen = tuple(cast("BlockId", blocks[at]) for at in here)
            self.ladder.loads.load(Copy(storage, self.memory, chosen), [slots[at] for at in here])

    def displace(self, keys: Collection[bytes]) -> None:
        """The engine takes the slots of these blocks back; nothing moves from or to them.

        What did not arrive has none.
        """
        there = self.standing(list(keys))
        blocks = [there.blocks[at] for at in np.flatnonzero(there.in_memory).tolist()]
        for storage in self.ladder.storages:
            kept = [block for block in blocks if (block, storage) in self._kept]
            self._kept.difference_update((block, storage) for block in kept)
            self._index.release(cast("list[BlockId]", kept), storage)
        slots = [self._index.lose(cast("BlockId", block), self.memory) for block in blocks]
        assert None not in slots, "a block whose slot is taken back is being copied"
        self._rows.free(cast("list[Slot]", slots))

    def standing(self, keys: Sequence[bytes]) -> Standing:
        """Return the state of ``keys``.

        In memory and not displaced, ``is_moving``, ``is_stored``.
        """
        blocks, states = self._index.find_all(keys)
        by_tier = np.frombuffer(states, np.uint8).reshape(-1, len(self._tiers))
        in_memory = by_tier[:, 0] == State.READY
        in_line = np.array(self.ladder.write_queues.are_in_line(blocks), bool)
        moving = (by_tier == State.WRITING).any(axis=1) | in_line
        stored = (by_tier[:, 1:] == State.READY).any(axis=1)
        if self._lost:
            for at, block in enumerate(blocks):
                if block is not None and (in_memory[at] or stored[at]):
                    in_memory[at] &= not self._is_doubted(block)
                    at_tiers = tuple(map(State, by_tier[at].tolist()))
                    stored[at] = self._storage_of(block, at_tiers) is not None
        return Standing(blocks, in_memory, moving, stored)

    def is_moving(self, key: bytes) -> bool:
        """Whether a block is on its way between memory and storage, or waits for that."""
        found = self._index.find(key)
        if found is None:
            return False
        block, states = found
        return states[0] is State.WRITING or self.ladder.write_queues.has(block)

    def is_stored(self, key: bytes) -> bool:
        """Whether storage has a block."""
        found = self._index.find(key)
        return found is not None and self._storage_of(*found) is not None

    def look(self, keys: Sequence[bytes]) -> Look:
        """Return which of ``keys`` storage has, as far as the index knows. Changes nothing."""
        blocks, states = self._index.find_all(keys)
        marks = states[1::2]
        if len(self._tiers) > 2:
            by_tier = np.frombuffer(states, np.uint8).reshape(-1, len(self._tiers))
            marks = by_tier[:, 1:].max(axis=1, where=by_tier[:, 1:] == State.READY, initial=0)
            marks = marks.tobytes()
        if self._lost:
            gone = {block for block, tier in self._lost if tier != self.memory}
            pairs = zip(marks, blocks, strict=True)
            marks = bytes(0 if block in gone else mark for mark, block in pairs)
        return Look(marks, blocks)

    def known(self, keys: Sequence[bytes]) -> list[BlockId]:
        """The blocks of those that the index knows."""
        blocks, _ = self._index.find_all(keys)
        return [block for block in blocks if block is not None]

    def _keep(self, blocks: Sequence[BlockId], storage: str) -> None:
        self._index.lease(blocks, storage)
        self._kept.update((block, storage) for block in blocks)

    def _note(self, tier: str, blocks: Sequence[BlockId], is_removed: bool) -> None:
        super()._note(tier, blocks, is_removed)
        if not is_removed:
            self._use(blocks)
        if not is_removed and tier != self.memory:
            states = self._index.states_of(blocks, self.memory)
            placed = zip(blocks, states, strict=True)
            self._keep([block for block, state in placed if state is State.READY], tier)
