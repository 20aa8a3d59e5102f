"""The cache for engines that bring keys of their own, and keep their device's blocks themselves.

    find --> promote (while the request waits) --> hold --> the engine copies --> release
    reserve --> the engine copies --> commit --> storage, when it has time

The engine asks for blocks by keys that name whole prefixes, so there is no path to walk. Everything
else is the ladder's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np

from kvtier.index import KeyIndex, State
from kvtier.keys import next_key
from kvtier.ladder import Asked, Ladder
from kvtier.types import BlockId, BlockKey, Slot
from kvtier.watch import StoreWatches, Watch

ABSENT, WRITING, READY = State.ABSENT, State.WRITING, State.READY
FIRST_PIECE = 16
"""Keys that storage is asked for at a time: where a prompt is not there, few are hashed in vain.
The next pieces are larger."""


class Place(Enum):
    """Where a block is found."""

    NOWHERE = "nowhere"
    ARRIVING = "arriving"
    """On its way into memory."""
    MEMORY = "memory"
    STORAGE = "storage"
    UNKNOWN = "unknown"
    """Storage has not yet said all that it has, or was asked for it, and has said nothing of this
    block."""


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
    slots: Sequence[Slot]
    evicted: list[bytes]


PLACES = (Place.NOWHERE, Place.ARRIVING, Place.MEMORY, Place.STORAGE)
IN_MEMORY = np.zeros(len(State) + 1, np.uint8)
"""By the state of a block in memory, or 0 for one that is not known: which of ``PLACES``."""
IN_MEMORY[[WRITING, State.EVICTING, READY]] = 1, 1, 2


class KeyedCache:
    """Owned by one thread. keys: bytes, the engine's. The fastest tier of ``ladder`` is the memory
    that the engine copies from and to.

    namespace: digest of all else that decides on the bytes of a block, b"" while nobody knows it:
    then nothing is written to storage, and nothing looked for there. clock: the ladder's.
    knows_storage: whether storage has said all that it has; some of it may be found before.
    """

    def __init__(
        self,
        index: KeyIndex,
        ladder: Ladder,
        namespace: Callable[[], bytes],
        clock: Callable[[], float],
        knows_storage: Callable[[], bool] = lambda: True,
    ) -> None:
        self.ladder = ladder
        self.memory = ladder.fastest
        self._index = index
        self._lost = ladder.lost
        self._namespace = namespace
        self._clock = clock
        self._knows_storage = knows_storage
        self._tiers = self._index.tiers  # memory, then storage
        num_slots = ladder.num_slots()[self.memory]
        index.expect(num_slots)
        self._came_from = np.zeros(num_slots, np.int8)  # by slot: which of the tiers
        self._copied: dict[Slot, BlockId] = {}  # that the engine copies from or to
        self._held: Counter[BlockId] = Counter()
        self._reserved: set[BlockId] = set()
        self._doubted: set[BlockId] = set()
        self._stores = StoreWatches()
        self._changes: list[Change] = []
        ladder.listen(self._note)

    # -- what is where -----------------------------------------------------------------------------

    def find(self, key: bytes, following: Callable[[], Sequence[bytes]] | None = None) -> Place:
        """Where a block is. What storage has kept since an earlier life is known from then on.

        following: what will be asked for next, if this one was kept; it is found along with it,
        which is cheaper than one by one.
        """
        found = self._index.find(key)
        if found is not None:
            return self._place(*found)
        if not self._may_be_kept():
            return Place.NOWHERE
        if not self.recall([key]):
            return Place.NOWHERE if self._knows_storage() else Place.UNKNOWN
        if following is not None:
            rest = following()
            self.recall(rest)
            self.touch([key, *rest])
        return Place.STORAGE

    def find_all(self, keys: Sequence[bytes]) -> list[Place]:
        """``find`` of each. keys: of one prompt, in its order; what storage has kept is looked for
        until nothing more of it turns up."""
        places, unknown = self._places(keys)
        if unknown and self._may_be_kept():
            kept = self._recall_along(unknown)
            if kept:
                self.touch(kept)
                places, unknown = self._places(keys)
            if not self._knows_storage():
                nobody_knows = set(unknown)
                for at, key in enumerate(keys):
                    if key in nobody_knows:
                        places[at] = Place.UNKNOWN
        return places

    def find_or_ask(
        self, keys: Sequence[bytes], has_gaps: bool = False
    ) -> tuple[list[Place], list[Asked]]:
        """``find_all``; and storage that takes its time is asked for what is known nowhere. Where
        that is worth waiting for it is ``UNKNOWN``, until one of the questions is over.

        has_gaps: where a block is missing those behind it may be of use.
        """
        places = self.find_all(keys)
        namespace = self._namespace()
        if not namespace or not self.ladder.has_to_ask:
            return places, []
        lacking = (Place.NOWHERE, Place.UNKNOWN)
        wanted = [key for key, place in zip(keys, places, strict=True) if place in lacking]
        asked: list[Asked] = []
        if wanted:
            names = partial(_names, namespace)
            asked = self.ladder.ask_along(wanted, names, self._index.make, has_gaps)
        if asked:
            places = [Place.UNKNOWN if place in lacking else place for place in places]
        return places, asked

    def _places(self, keys: Sequence[bytes]) -> tuple[list[Place], list[bytes]]:
        """Where each is, and which of them the index does not know."""
        blocks, states = self._index.find_all(keys)
        by_tier = np.frombuffer(states, np.uint8).reshape(-1, len(self._tiers))
        codes = IN_MEMORY[by_tier[:, 0]]
        codes[(codes == 0) & (by_tier[:, 1:] == READY).any(axis=1)] = 3
        places = [PLACES[code] for code in codes.tolist()]
        if self._lost or self._doubted:
            doubtful = self._doubted.union(block for block, _ in self._lost)
            for at, block in enumerate(blocks):
                if block in doubtful:
                    places[at] = self._place(block, tuple(map(State, by_tier[at].tolist())))
        return places, [keys[at] for at, block in enumerate(blocks) if block is None]

    def _place(self, block: BlockId, states: Sequence[State]) -> Place:
        if states[0] is not ABSENT and not self._is_doubted(block):
            return Place.MEMORY if states[0] is READY else Place.ARRIVING
        return Place.NOWHERE if self._storage_of(block, states) is None else Place.STORAGE

    def _may_be_kept(self) -> bool:
        """Whether storage is worth a question for what the index does not know."""
        return bool(self.ladder.storages and self._namespace())

    def _recall_along(self, keys: Sequence[bytes]) -> list[bytes]:
        """``recall``, in growing pieces until nothing more turns up. Returns what was asked for."""
        asked = 0
        for piece in _growing(keys):
            num = self.recall(piece)
            asked += len(piece) if num else 0
            if num < len(piece):
                break
        return list(keys[:asked])

    def recall(self, keys: Collection[bytes]) -> int:
        """Take in which blocks, of those that are known nowhere, storage has kept since an earlier
        life. Returns how many."""
        namespace = self._namespace()
        if not namespace or not self.ladder.has_unfound_at_once:
            return 0
        asked = list(dict.fromkeys(keys))
        blocks, _ = self._index.find_all(asked)
        unknown = [key for key, block in zip(asked, blocks, strict=True) if block is None]
        names = _names(namespace, unknown)
        return self.ladder.recall_each(
            names, lambda places: self._index.make([unknown[at] for at in places])
        )

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

    def sources(self, keys: Sequence[bytes]) -> list[str]:
        """The tier that each would come from now: memory, too, where it is on its way there, or
        nowhere."""
        _, states = self._index.find_all(keys)
        by_tier = np.frombuffer(states, np.uint8).reshape(-1, len(self._tiers))
        is_there = by_tier == READY
        is_there[:, 0] |= by_tier[:, 0] > ABSENT
        return [self._tiers[tier] for tier in is_there.argmax(axis=1).tolist()]

    def origins(self, keys: Sequence[bytes]) -> list[str]:
        """The tiers that blocks in memory came from: storage, until they were used once."""
        slots = self._index.slots(self._known(keys), self.memory)
        return [self._tiers[tier] for tier in self._came_from[slots].tolist()]

    def touch(self, keys: Collection[bytes]) -> None:
        """They were used just now, in prompt order: the first ones leave last."""
        blocks, _ = self._index.find_all(list(keys))
        self._use([block for block in blocks if block is not None])

    def _use(self, blocks: Sequence[BlockId]) -> None:
        self._index.touch(blocks, self._clock())

    def _known(self, keys: Sequence[bytes]) -> list[BlockId]:
        blocks, _ = self._index.find_all(keys)
        known = [block for block in blocks if block is not None]
        assert len(known) == len(keys), "a block that is nowhere"
        return known

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
        blocks = self._index.make(new)
        self._index.begin_write_all(blocks, self.memory, slots)
        self._use(blocks)
        self._came_from[slots] = 0
        self._copied.update(zip(slots, blocks, strict=True))
        self._reserved.update(blocks)
        left = [key for each in self._changes[num_changes:] for key in each.keys]
        return Reserved(new, slots, left)

    def _missing(self, keys: Iterable[bytes]) -> tuple[list[bytes], list[BlockId]]:
        """Those of ``keys`` that memory has not, and the blocks that it has ready."""
        asked = list(dict.fromkeys(keys))
        blocks, states = self._index.find_all(asked)
        in_memory = states[:: len(self._tiers)]
        new = [key for key, state in zip(asked, in_memory, strict=True) if state <= ABSENT]
        there = zip(blocks, in_memory, strict=True)
        return new, [block for block, state in there if state == READY and block is not None]

    def commit(self, keys: Sequence[bytes], depths: Sequence[int], to_storage: bool = True) -> None:
        """The engine has copied blocks into their slots; they go on to storage when it has time.

        keys: in prompt order. depths: place of each in its prompt. A block that was doubted
        meanwhile is not there; one that was cleared is passed over.
        """
        blocks, _ = self._index.find_all(keys)
        depth_of = {
            block: depth
            for block, depth in zip(blocks, depths, strict=True)
            if block is not None and block in self._reserved
        }
        kept = [block for block in depth_of if block not in self._doubted]
        self._index.set_depths(kept, [depth_of[block] for block in kept])
        self._index.commit_all(kept[::-1], self.memory, self._clock())
        self._end_copies(kept)
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
        blocks, _ = self._index.find_all(list(keys))
        self._give_back([block for block in blocks if block in self._reserved])

    def _give_back(self, blocks: Sequence[BlockId]) -> None:
        self._end_copies(blocks)
        self._reserved.difference_update(blocks)
        self._doubted.difference_update(blocks)
        self.ladder.give_back(self._index.abort_all(blocks, self.memory))

    def _end_copies(self, blocks: Sequence[BlockId]) -> None:
        """The engine copies nothing to these any more: whoever watched them is told."""
        for slot in self._index.slots(blocks, self.memory):
            del self._copied[slot]
        self._stores.ended(blocks)

    def hold(self, keys: Sequence[bytes]) -> Sequence[Slot]:
        """Slots of blocks in memory, to be copied from. They stay until ``release``."""
        blocks = self._known(keys)
        self._index.lease(blocks, self.memory)
        self._held.update(blocks)
        slots = self._index.slots(blocks, self.memory)
        self._copied.update(zip(slots, blocks, strict=True))
        return slots

    def release(self, keys: Collection[bytes]) -> None:
        """The copies from them have ended. Blocks that were cleared meanwhile are passed over."""
        blocks, _ = self._index.find_all(list(keys))
        self._let_go([block for block in blocks if block is not None and self._held[block]])
        self.ladder.drop_lost()

    def _let_go(self, blocks: Sequence[BlockId]) -> None:
        slots = self._index.slots(blocks, self.memory)
        self._came_from[slots] = 0
        self._index.release(blocks, self.memory)
        self._held.subtract(blocks)
        for block, slot in zip(blocks, slots, strict=True):
            if not self._held[block]:
                del self._held[block]
                self._copied.pop(slot, None)

    def distrust(self, slots: Collection[Slot]) -> None:
        """A copy of the engine's from or to these slots went wrong: their blocks are not there."""
        for slot in slots:
            block = self._copied.get(slot)
            if block in self._reserved:
                self._doubted.add(block)
            elif block is not None:
                self.ladder.lose(block, self.memory)

    # -- between memory and storage ----------------------------------------------------------------

    def promote(self, keys: Sequence[bytes]) -> int:
        """Bring blocks from storage into memory; fewer of the first ones where there is no room for
        all. Returns how many."""
        num = min(len(keys), self.ladder.num_available(self.memory))
        wanted: dict[str, list[BlockId]] = {}
        for block, states in self._found(keys[:num]):
            if states[0] is ABSENT:
                storage = self._storage_of(block, states)
                if storage is not None:
                    wanted.setdefault(storage, []).append(block)
        for storage, blocks in wanted.items():
            for _, begun in self.ladder.promote(blocks, storage):
                slots = self._index.slots(begun, self.memory)
                self._came_from[slots] = self._tiers.index(storage)
        return num

    def _found(self, keys: Sequence[bytes]) -> Iterator[tuple[BlockId, tuple[State, ...]]]:
        """The blocks of those that are known, and where they stand."""
        blocks, states = self._index.find_all(keys)
        num = len(self._tiers)
        for at, block in enumerate(blocks):
            if block is not None:
                yield block, tuple(map(State, states[at * num : (at + 1) * num]))

    def watch(self, keys: Sequence[bytes]) -> Watch:
        """Of what is on its way into memory now: over when it is time for another look.

        keys: in prompt order.
        """
        watch = Watch()
        blocks, states = self._index.find_all(keys)
        in_memory = zip(blocks, states[:: len(self._tiers)], strict=True)
        coming = [block for block, state in in_memory if state == WRITING and block is not None]
        moving = [block for block in coming if block not in self._reserved]
        if len(moving) < len(coming):
            self._stores.add(watch, next(b for b in reversed(coming) if b in self._reserved))
        self.ladder.wait_for(watch, self._index.slots(moving, self.memory))
        return watch

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
            self._changes.append(Change(self._index.keys(blocks), tier, is_removed))


def _growing(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Pieces, each four times as long as the one before."""
    at, num = 0, FIRST_PIECE
    while at < len(keys):
        yield keys[at : at + num]
        at, num = at + num, 4 * num


def _names(namespace: bytes, keys: Sequence[bytes]) -> list[BlockKey]:
    """What blocks are called in storage."""
    return [next_key(namespace, key) for key in keys]
