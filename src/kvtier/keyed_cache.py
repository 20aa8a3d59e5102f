"""The cache for engines that bring keys of their own, and keep their device's blocks themselves.

    find --> promote (while the request waits) --> hold --> the engine copies --> release
    reserve --> the engine copies --> commit --> storage, when it has time

The engine asks for one block after the other, by a key that names its whole prefix; so there is no
path to walk, and every block hangs under one root. Everything else is the ladder's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, nextafter

import numpy as np
import numpy.typing as npt

from kvtier.index import State
from kvtier.ladder import Ladder
from kvtier.types import BlockId, BlockName, Slot

NOBODY = -1


class Place(Enum):
    """Where a block is found."""

    NOWHERE = "nowhere"
    ARRIVING = "arriving"
    """On its way into memory."""
    MEMORY = "memory"
    STORAGE = "storage"
    UNKNOWN = "unknown"
    """Storage has not yet said what it has."""


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that came to a tier, or left it."""

    keys: list[bytes]
    tier: str
    is_removed: bool


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room in memory for new blocks: their keys, their slots, and the keys that left for them."""

    keys: list[bytes]
    slots: list[Slot]
    evicted: list[bytes]


class KeyedCache:
    """Owned by one thread. keys: bytes, the engine's. The fastest tier of ``ladder`` is the memory
    that the engine copies from and to.

    namespace: digest of all else that decides on the bytes of a block; settled before the first
    call. knows_storage: whether storage has said what it has. clock: seconds.
    """

    def __init__(
        self,
        ladder: Ladder,
        namespace: Callable[[], bytes],
        clock: Callable[[], float],
        knows_storage: Callable[[], bool] = lambda: True,
    ) -> None:
        self.ladder = ladder
        self.memory = ladder.fastest
        self._index = ladder.index
        self._namespace = namespace
        self._clock = clock
        self._knows_storage = knows_storage
        self._last_use_s = -inf
        self._block_in = np.full(ladder.rooms[self.memory].num_slots, NOBODY, np.int64)
        self._depths = _Depths()
        self._from_storage: dict[BlockId, str] = {}
        self._held: Counter[BlockId] = Counter()
        self._reserved: set[BlockId] = set()
        self._doubted: set[BlockId] = set()
        self._changes: list[Change] = []
        ladder.listen(self._name, self._note)

    # -- what is where -----------------------------------------------------------------------------

    def find(self, key: bytes, following: Callable[[], Sequence[bytes]] | None = None) -> Place:
        """Where a block is. What storage has kept since an earlier life is known from then on.

        following: what will be asked for next, if this one was kept; it is found along with it,
        which is cheaper than one by one.
        """
        block = self._known(key)
        if block is None:
            return self._find_kept(key, following)
        if not self.ladder.is_lost(block, self.memory) and block not in self._doubted:
            match self._index.state(block, self.memory):
                case State.READY:
                    return Place.MEMORY
                case State.WRITING:
                    return Place.ARRIVING
        return Place.STORAGE if self._storage_of(block) else Place.NOWHERE

    def _find_kept(
        self, key: bytes, following: Callable[[], Sequence[bytes]] | None = None
    ) -> Place:
        if not self.ladder.storages:
            return Place.NOWHERE
        if not self._knows_storage():
            return Place.UNKNOWN
        if not self.recall([key]):
            return Place.NOWHERE
        if following is not None:
            rest = following()
            self.recall(rest)
            self.touch([key, *rest])
        return Place.STORAGE

    def recall(self, keys: Collection[bytes]) -> int:
        """Take in which blocks, of those that are known nowhere, storage has kept since an earlier
        life. Returns how many."""
        if not self.ladder.has_unfound:
            return 0
        unknown = [key for key in dict.fromkeys(keys) if self._known(key) is None]
        return self.ladder.recall_each(self._namespace(), unknown)

    def tier_of(self, key: bytes) -> str | None:
        """The fastest tier that has the block ready."""
        block = self._known(key)
        if block is None:
            return None
        return next((name for name in self.ladder.rooms if self._is_in(block, name)), None)

    def origin(self, key: bytes) -> str:
        """The tier that a block in memory came from: storage, until it was used once."""
        block = self._known(key)
        return self.memory if block is None else self._from_storage.get(block, self.memory)

    def touch(self, keys: Collection[bytes]) -> None:
        """They were used just now, in prompt order: the first ones leave last."""
        self._use([block for key in keys if (block := self._known(key)) is not None])

    def _use(self, blocks: Sequence[BlockId]) -> None:
        """Under one root there is no leaf but by its time: each is used a moment before the one in
        front of it."""
        now_s = self._clock()
        for block in reversed(blocks):
            self._last_use_s = max(now_s, nextafter(self._last_use_s, inf))
            self._index.touch([block], self._last_use_s)

    def _known(self, key: bytes) -> BlockId | None:
        """The block, where some tier has it or is about to."""
        namespace = self._namespace()
        if not self._index.states(namespace, [key], self.memory):
            return None
        return self._index.extend(namespace, [key])[0]

    def _blocks(self, keys: Iterable[bytes]) -> list[BlockId]:
        namespace = self._namespace()
        return [self._index.extend(namespace, [key])[0] for key in keys]

    def _is_in(self, block: BlockId, tier: str) -> bool:
        is_ready = self._index.state(block, tier) is State.READY
        return is_ready and not self.ladder.is_lost(block, tier)

    def _storage_of(self, block: BlockId) -> str | None:
        return next((name for name in self.ladder.storages if self._is_in(block, name)), None)

    def _name(self, block: BlockId) -> BlockName:
        return BlockName(self._namespace(), self._depths[block], self._index.key(block))

    # -- between the engine's device and memory ----------------------------------------------------

    def reserve(self, keys: Collection[bytes]) -> Reserved | None:
        """Room in memory for those of ``keys`` that are not there; None where there is too little.

        They count as used now, and the first ones leave last.
        """
        keys = list(dict.fromkeys(keys))
        wanted = self._blocks(keys)
        states = self._index.states_of(wanted, self.memory)
        new = [at for at, state in enumerate(states) if state is State.ABSENT]
        ready = [block for block, state in zip(wanted, states, strict=True) if state is State.READY]
        num_changes = len(self._changes)
        slots = self.ladder.reserve(len(new), but_not=ready)
        if slots is None:
            return None
        blocks = self._blocks(keys[at] for at in new)  # a block that nothing holds may have gone
        self._index.begin_write_all(blocks, self.memory, slots)
        self._use(blocks)
        self._block_in[slots] = blocks
        self._reserved.update(blocks)
        left = [key for each in self._changes[num_changes:] for key in each.keys]
        return Reserved([keys[at] for at in new], slots, left)

    def commit(self, keys: Sequence[bytes], depths: Sequence[int], to_storage: bool = True) -> None:
        """The engine has copied blocks into their slots; they go on to storage when it has time.

        depths: place of each in its prompt. A block that was doubted meanwhile is not there.
        """
        blocks = self._reserved_of(keys)
        self._depths.update(self._blocks(keys), depths)
        kept = [block for block in blocks if block not in self._doubted]
        self._index.commit_all(kept, self.memory, self._clock())
        self._reserved.difference_update(kept)
        self._give_back([block for block in blocks if block in self._doubted])
        self._note(self.memory, kept, is_removed=False)
        if to_storage:
            self.ladder.archive(kept)

    def abort(self, keys: Iterable[bytes]) -> None:
        """Blocks were not copied into their slots."""
        self._give_back(self._reserved_of(keys))

    def _reserved_of(self, keys: Iterable[bytes]) -> list[BlockId]:
        """Blocks that the engine has room for; those cleared meanwhile are passed over."""
        known = (self._known(key) for key in keys)
        return [block for block in known if block is not None and block in self._reserved]

    def _give_back(self, blocks: Sequence[BlockId]) -> None:
        self._reserved.difference_update(blocks)
        self._doubted.difference_update(blocks)
        self.ladder.give_back(self._index.abort_all(blocks, self.memory))

    def hold(self, keys: Collection[bytes]) -> list[Slot]:
        """Slots of blocks in memory, to be copied from. They stay until ``release``."""
        blocks = self._blocks(keys)
        self._index.lease(blocks, self.memory)
        self._held.update(blocks)
        slots = self._index.slots(blocks, self.memory)
        self._block_in[slots] = blocks
        return slots

    def release(self, keys: Collection[bytes]) -> None:
        """The copies from them have ended. Blocks that were cleared meanwhile are passed over."""
        known = (self._known(key) for key in keys)
        self._let_go([block for block in known if block is not None and self._held[block]])

    def _let_go(self, blocks: Sequence[BlockId]) -> None:
        self._index.release(blocks, self.memory)
        self._held.subtract(blocks)
        for block in blocks:
            self._from_storage.pop(block, None)
            if not self._held[block]:
                del self._held[block]

    def distrust(self, slots: Collection[Slot]) -> None:
        """A copy from or to these slots went wrong: their blocks are not there."""
        for slot in slots:
            block = BlockId(int(self._block_in[slot]))
            if block in self._reserved:
                self._doubted.add(block)
            elif block != NOBODY and self._index.state(block, self.memory) is State.READY:
                if self._index.slots([block], self.memory) == [slot]:
                    self.ladder.lose(block, self.memory)

    # -- between memory and storage ----------------------------------------------------------------

    def promote(self, keys: Sequence[bytes]) -> int:
        """Bring blocks from storage into memory; fewer of the first ones where there is no room for
        all. Returns how many."""
        blocks = self._blocks(keys)
        num = min(len(blocks), self.ladder.num_available(self.memory))
        for block in blocks[:num]:
            storage = self._storage_of(block)
            if storage is not None and self._index.state(block, self.memory) is State.ABSENT:
                self._from_storage[block] = storage
        for storage in self.ladder.storages:
            there = [block for block in blocks[:num] if self._from_storage.get(block) == storage]
            self.ladder.promote(there, storage)
        return num

    def poll(self) -> None:
        """Notice what has ended."""
        self.ladder.poll()

    def clear(self) -> None:
        """Forget everything, in storage as well, held or reserved blocks, too: whoever empties a
        cache waits for its own copies, and never tells of their end. What is on its way between
        tiers arrives nowhere."""
        self._let_go(list(self._held.elements()))
        self._give_back(list(self._reserved))
        self.ladder.clear()

    # -- what others should know -------------------------------------------------------------------

    def take_changes(self) -> list[Change]:
        """What came and went since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _note(self, tier: str, blocks: Sequence[BlockId], is_removed: bool) -> None:
        if blocks:
            self._changes.append(Change(self._index.labels(blocks), tier, is_removed))
            if not is_removed:
                self._use(blocks)
            elif tier == self.memory:
                for block in blocks:
                    self._from_storage.pop(block, None)


class _Depths:
    """Places of blocks in their prompts, by the low half of their numbers: four bytes each."""

    def __init__(self) -> None:
        self._depths: npt.NDArray[np.uint32] = np.zeros(1024, np.uint32)

    def __getitem__(self, block: BlockId) -> int:
        place = block & 0xFFFFFFFF
        return int(self._depths[place]) if place < len(self._depths) else 0

    def update(self, blocks: Sequence[BlockId], depths: Sequence[int]) -> None:
        places = np.array(blocks, np.int64) & 0xFFFFFFFF
        if len(places) and (end := int(places.max()) + 1) > len(self._depths):
            self._depths = np.resize(self._depths, max(end, 2 * len(self._depths)))
        self._depths[places] = depths
