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

from kvtier.index import BlockIndex, State
from kvtier.keys import next_key
from kvtier.ladder import Ladder
from kvtier.types import BlockId, BlockName, Slot

NOBODY = -1
ROOT = b"keys of an engine"
"""All blocks hang under it: what they belong to may be known later than they are."""
READY, ABSENT = State.READY, State.ABSENT


def rising(clock: Callable[[], float]) -> Callable[[], float]:
    """``clock``, but never twice the same: of blocks that hang beside each other, the time says
    which one was used last."""
    last = -inf

    def now() -> float:
        nonlocal last
        last = max(clock(), nextafter(last, inf))
        return last

    return now


class Place(Enum):
    """Where a block is found."""

    __hash__ = object.__hash__  # the inherited one is a call in Python, for every look-up

    NOWHERE = "nowhere"
    ARRIVING = "arriving"
    """On its way into memory."""
    MEMORY = "memory"
    STORAGE = "storage"
    UNKNOWN = "unknown"
    """Storage has not yet said all that it has, and nothing of this block."""


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

    namespace: digest of all else that decides on the bytes of a block, b"" while nobody knows it:
    then nothing is written to storage, and nothing looked for there. clock: the ladder's; it is
    ``rising``. knows_storage: whether storage has said all that it
    has; some of it may be found before.
    """

    def __init__(
        self,
        index: BlockIndex,
        ladder: Ladder,
        namespace: Callable[[], bytes],
        clock: Callable[[], float],
        knows_storage: Callable[[], bool] = lambda: True,
    ) -> None:
        self.ladder = ladder
        self.memory = ladder.fastest
        self._index = index
        self._find = index.find
        self._lost = ladder.lost
        self._namespace = namespace
        self._clock = clock
        self._knows_storage = knows_storage
        self._tiers = self._index.tiers  # memory, then storage
        num_slots = ladder.num_slots()[self.memory]
        self._block_in = np.full(num_slots, NOBODY, np.int64)
        self._came_from = np.zeros(num_slots, np.int8)  # by slot: which of the tiers
        self._depths = _Depths()
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
        found = self._find(ROOT, key)
        if found is None:
            return self._find_kept(key, following)
        block, states = found
        if states[0] is not ABSENT and not self._is_doubted(block):
            return Place.MEMORY if states[0] is READY else Place.ARRIVING
        return Place.NOWHERE if self._storage_of(block, states) is None else Place.STORAGE

    def _find_kept(
        self, key: bytes, following: Callable[[], Sequence[bytes]] | None = None
    ) -> Place:
        if not self.ladder.storages or not self._namespace():
            return Place.NOWHERE
        if not self.recall([key]):
            return Place.NOWHERE if self._knows_storage() else Place.UNKNOWN
        if following is not None:
            rest = following()
            self.recall(rest)
            self.touch([key, *rest])
        return Place.STORAGE

    def recall(self, keys: Collection[bytes]) -> int:
        """Take in which blocks, of those that are known nowhere, storage has kept since an earlier
        life. Returns how many."""
        namespace = self._namespace()
        if not namespace or not self.ladder.has_unfound:
            return 0
        unknown = [key for key in dict.fromkeys(keys) if self._find(ROOT, key) is None]
        return self.ladder.recall_each(ROOT, unknown, [next_key(namespace, key) for key in unknown])

    def _is_doubted(self, block: BlockId) -> bool:
        """Whether what memory has of the block, or is about to, is not to be used."""
        if not self._lost and not self._doubted:
            return False
        return block in self._doubted or (block, self.memory) in self._lost

    def _storage_of(self, block: BlockId, states: Sequence[State]) -> str | None:
        for tier, state in zip(self._tiers[1:], states[1:], strict=True):
            if state is READY and (block, tier) not in self._lost:
                return tier
        return None

    def origin(self, key: bytes) -> str:
        """The tier that a block in memory came from: storage, until it was used once."""
        (slot,) = self._index.slots([self._known(key)], self.memory)
        return self._tiers[int(self._came_from[slot])]

    def touch(self, keys: Collection[bytes]) -> None:
        """They were used just now, in prompt order: the first ones leave last."""
        found = (self._find(ROOT, key) for key in keys)
        self._use([each[0] for each in found if each is not None])

    def _use(self, blocks: Sequence[BlockId]) -> None:
        """Under one root there is no leaf but by its time: each is used a moment before the one in
        front of it."""
        for block in reversed(blocks):
            self._index.touch((block,), self._clock())

    def _known(self, key: bytes) -> BlockId:
        found = self._find(ROOT, key)
        assert found is not None, "a block that is nowhere"
        return found[0]

    def _make(self, keys: Iterable[bytes]) -> list[BlockId]:
        """Blocks that some tier is about to have."""
        return [self._index.extend(ROOT, [key])[0] for key in keys]

    def _name(self, block: BlockId) -> BlockName:
        namespace = self._namespace()
        (key,) = self._index.labels([block])
        return BlockName(namespace, self._depths[block], next_key(namespace, key))

    # -- between the engine's device and memory ----------------------------------------------------

    def reserve(self, keys: Collection[bytes]) -> Reserved | None:
        """Room in memory for those of ``keys`` that are not there; None where there is too little.

        They count as used now, and the first ones leave last.
        """
        new, ready = self._missing(keys)
        num_changes = len(self._changes)
        slots = self.ladder.reserve(len(new), but_not=ready)
        if slots is None:
            return None
        blocks = self._make(new)
        self._index.begin_write_all(blocks, self.memory, slots)
        self._use(blocks)
        self._block_in[slots] = blocks
        self._came_from[slots] = 0
        self._reserved.update(blocks)
        left = [key for each in self._changes[num_changes:] for key in each.keys]
        return Reserved(new, slots, left)

    def _missing(self, keys: Iterable[bytes]) -> tuple[list[bytes], list[BlockId]]:
        """Those of ``keys`` that memory has not, and the blocks that it has ready."""
        new, ready = [], []
        for key in dict.fromkeys(keys):
            found = self._find(ROOT, key)
            if found is None or found[1][0] is ABSENT:
                new.append(key)
            elif found[1][0] is READY:
                ready.append(found[0])
        return new, ready

    def commit(self, keys: Sequence[bytes], depths: Sequence[int], to_storage: bool = True) -> None:
        """The engine has copied blocks into their slots; they go on to storage when it has time.

        keys: in prompt order. depths: place of each in its prompt. A block that was doubted
        meanwhile is not there; one that was cleared is passed over.
        """
        depth_of = {
            block: depth
            for key, depth in zip(keys, depths, strict=True)
            if (block := self._reserved_block(key)) is not None
        }
        kept = [block for block in depth_of if block not in self._doubted]
        self._depths.update(kept, [depth_of[block] for block in kept])
        for block in reversed(kept):
            self._index.commit(block, self.memory, self._clock())
        self._reserved.difference_update(kept)
        self._give_back([block for block in depth_of if block in self._doubted])
        self._note(self.memory, kept, is_removed=False)
        if to_storage:
            self._archive(kept)

    def _archive(self, blocks: Sequence[BlockId]) -> None:
        """They go on to storage, as soon as it is known what they are called there."""
        self.ladder.archives = bool(self._namespace())
        self.ladder.archive(blocks)

    def abort(self, keys: Iterable[bytes]) -> None:
        """Blocks were not copied into their slots."""
        blocks = (self._reserved_block(key) for key in keys)
        self._give_back([block for block in blocks if block is not None])

    def _reserved_block(self, key: bytes) -> BlockId | None:
        """The block, if the engine has room for it."""
        found = self._find(ROOT, key)
        return found[0] if found is not None and found[0] in self._reserved else None

    def _give_back(self, blocks: Sequence[BlockId]) -> None:
        self._reserved.difference_update(blocks)
        self._doubted.difference_update(blocks)
        self.ladder.give_back(self._index.abort_all(blocks, self.memory))

    def hold(self, keys: Collection[bytes]) -> list[Slot]:
        """Slots of blocks in memory, to be copied from. They stay until ``release``."""
        blocks = [self._known(key) for key in keys]
        self._index.lease(blocks, self.memory)
        self._held.update(blocks)
        slots = self._index.slots(blocks, self.memory)
        self._block_in[slots] = blocks
        return slots

    def release(self, keys: Collection[bytes]) -> None:
        """The copies from them have ended. Blocks that were cleared meanwhile are passed over."""
        found = (self._find(ROOT, key) for key in keys)
        self._let_go([each[0] for each in found if each is not None and self._held[each[0]]])
        self.ladder.drop_lost()

    def _let_go(self, blocks: Sequence[BlockId]) -> None:
        self._came_from[self._index.slots(blocks, self.memory)] = 0
        self._index.release(blocks, self.memory)
        self._held.subtract(blocks)
        for block in blocks:
            if not self._held[block]:
                del self._held[block]

    def distrust(self, slots: Collection[Slot]) -> None:
        """A copy from or to these slots went wrong: their blocks are not there."""
        for slot in slots:
            block = BlockId(int(self._block_in[slot]))
            if block in self._reserved:
                self._doubted.add(block)
            elif block != NOBODY and self._is_in(block, slot):
                self.ladder.lose(block, self.memory)

    def _is_in(self, block: BlockId, slot: Slot) -> bool:
        is_ready = self._index.state(block, self.memory) is READY
        return is_ready and self._index.slots([block], self.memory) == [slot]

    # -- between memory and storage ----------------------------------------------------------------

    def promote(self, keys: Sequence[bytes]) -> int:
        """Bring blocks from storage into memory; fewer of the first ones where there is no room for
        all. Returns how many."""
        num = min(len(keys), self.ladder.num_available(self.memory))
        wanted: dict[str, list[BlockId]] = {}
        for key in keys[:num]:
            found = self._find(ROOT, key)
            if found is not None and found[1][0] is ABSENT:
                storage = self._storage_of(*found)
                if storage is not None:
                    wanted.setdefault(storage, []).append(found[0])
        for storage, blocks in wanted.items():
            for _, begun in self.ladder.promote(blocks, storage):
                slots = self._index.slots(begun, self.memory)
                self._came_from[slots] = self._tiers.index(storage)
        return num

    def poll(self) -> None:
        """Notice what has ended."""
        self.ladder.archives = bool(self._namespace())
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
