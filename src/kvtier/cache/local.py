"""``BlockCache`` over a ladder of this process.

A committed block is queued for a write to storage. A key identifies a whole prefix, so there is no
trie to walk. The ladder decides everything else.

Queries change nothing (``locate``, ``locate_all``, ``sources``). Changes have methods of their own:
``adopt`` takes in blocks of an earlier run, ``touch`` notes a use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.cache.block_cache import (
    BlockCache,
    BlockLookup,
    BlockState,
    Change,
    Held,
    Reserved,
    TierUsage,
)
from kvtier.cache.direct import DirectReads
from kvtier.cache.engine_copies import EngineCopies
from kvtier.cache.hint_actions import HintActions, PromptCalls
from kvtier.cache.key_lookup import KeyedLookup
from kvtier.cache.ladder import Ladder, LadderCallbacks, LadderOptions, PendingLookup
from kvtier.cache.transfer import Mover
from kvtier.cache.waiters import StorageWaiter
from kvtier.core.hints import BlockHint, Hint, HintResult, waits
from kvtier.core.keys import select_keys
from kvtier.core.types import NO_BLOCK, BlockId, Slot
from kvtier.index import KeyIndex, State
from kvtier.index.key_index import UNKNOWN as UNINDEXED
from kvtier.index.selection import Int64s, as_array, as_numbers, select
from kvtier.observe import Metrics
from kvtier.plan import Costs
from kvtier.tiers import SlotAllocator, StorageTier

ABSENT, WRITING, READY = State.ABSENT, State.WRITING, State.READY
NOWHERE, ARRIVING, MEMORY, STORAGE, UNKNOWN = BlockState
ABSENT_BYTE, WRITING_BYTE, READY_BYTE = int(ABSENT), int(WRITING), int(READY)
"""For arrays, which compare themselves with members of an ``Enum`` slowly."""
STATES = tuple(BlockState)
STATE_OF_CODE = np.array(STATES, object)
"""States by their code: indexing a tuple is faster than calling an ``Enum``."""
CLOSE_WAIT_S = 10.0


def _codes_of_states(unknown: int) -> bytes:
    """Return the code of a ``BlockState`` by the state of a block in memory, to translate bytes.

    unknown: code of blocks that the index does not know.
    """
    codes = bytearray(256)
    codes[UNINDEXED], codes[READY] = unknown, MEMORY
    codes[WRITING] = codes[State.EVICTING] = ARRIVING
    return bytes(codes)


IN_MEMORY = (_codes_of_states(UNKNOWN), _codes_of_states(NOWHERE))
"""Codes by state, while unknown blocks may be in storage, and when they can't be."""
NOWHERE_TO_UNKNOWN = bytes.maketrans(bytes([NOWHERE]), bytes([UNKNOWN]))

Codes = npt.NDArray[np.uint8]


def states_of(codes: bytes) -> list[BlockState]:
    """Return the states with these codes. Fastest if all are the same, as they usually are."""
    if codes and codes.count(codes[0]) == len(codes):
        return [STATES[codes[0]]] * len(codes)
    found: list[BlockState] = STATE_OF_CODE[np.frombuffer(codes, np.uint8)].tolist()
    return found


def _sources(by_tier: Codes) -> Codes:
    found = np.zeros(len(by_tier), np.uint8)
    for tier in range(by_tier.shape[1] - 1, 0, -1):
        is_there = (by_tier[:, tier] == READY_BYTE) & (by_tier[:, 0] <= ABSENT_BYTE)
        found[is_there] = tier
    return found


class Closable(Protocol):
    """A tier that is closed with its cache."""

    def close(self) -> None: ...


class LocatedBlocks(NamedTuple):
    """Blocks of a prompt, as the index knows them.

    codes: per key, its ``BlockState``. They are bytes, since searching these is faster than making
    an array. blocks: ``NO_BLOCK`` for an unknown one. states: per key one byte per tier.
    """

    codes: bytes
    blocks: Sequence[BlockId]
    states: bytes

    @property
    def are_all_in_memory(self) -> bool:
        """Whether every block is ready in memory."""
        return self.codes.count(MEMORY) == len(self.codes)

    @property
    def by_tier(self) -> Codes:
        """States: uint8 [num_keys, num_tiers]."""
        return np.frombuffer(self.states, np.uint8).reshape(len(self.codes), -1)

    @property
    def block_states(self) -> list[BlockState]:
        """The state of each block."""
        return states_of(self.codes)

    @property
    def ready(self) -> Sequence[BlockId]:
        """The blocks that are ready in memory."""
        is_ready = self.are_all_in_memory
        return self.blocks if is_ready else select(self.blocks, self.positions(MEMORY))

    @property
    def sources(self) -> Codes:
        """Position of the tier that each block would be read from: uint8 [num_keys].

        It is 0, memory, for a block in flight to memory, and for one that is nowhere.
        """
        return _sources(self.by_tier)

    def positions(self, *states: BlockState) -> npt.NDArray[np.int64]:
        """Return the positions of the blocks in one of some states."""
        of_keys = np.frombuffer(self.codes, np.uint8)
        codes = list(map(int, states))
        return np.flatnonzero(np.isin(of_keys, codes) if len(codes) > 1 else of_keys == codes[0])


class MemorySlots:
    """Arrays with an entry per slot of memory, which change as blocks are copied to it.

    Attributes:
        blocks: int64 [num_slots], the block that was last copied to each slot, plus 1; 0 for none.
        sources: int8 [num_slots], position of the tier that it came from, until its first use.
    """

    def __init__(self, num_slots: int) -> None:
        self.blocks = np.zeros(num_slots, np.int64)
        self.sources = np.zeros(num_slots, np.int8)

    def fill(self, blocks: Sequence[BlockId], slots: Sequence[Slot], source: int) -> None:
        """Note that blocks are about to be copied to slots. source: position of their tier."""
        filled = as_array(slots)
        self.blocks[filled] = as_array(blocks) + 1
        self.sources[filled] = source

    def blocks_in(self, slots: Int64s) -> Sequence[BlockId]:
        """Return the blocks that were last copied to slots."""
        return as_numbers(self.blocks[slots] - 1)


class LocalBlockCache(BlockCache):
    """Cache of blocks by an engine's keys, in this process. Owned by one thread.

    Keys are the engine's, as bytes. The engine copies from and to the fastest tier, which is called
    memory here.

    Args:
        index: blocks by key.
        tiers: memory and then storage tiers, fastest first; see ``Ladder``.
        mover: moves blocks between these tiers.
        options: of the ladder over them.
        namespace: return the digest of everything else that decides on the bytes of a block; b""
            while it is unknown. Nothing is written to storage, or looked up there, in that case.
        clock: seconds.
        device: name of the engine's own memory, if it may be read into directly, or measured.
        metrics: by default, metrics that are counted but not exposed.
        knows_storage: return whether storage has recovered all its blocks. Some may be found
            earlier.
        owned: tiers by name that ``close`` closes.
        grow: called with the number of slots that will be reserved; adds memory if it can.
        on_change: called with the tier, blocks that entered or left it, and whether they left. By
            default ``take_changes`` returns them.
        on_left_out, on_end: see ``LadderCallbacks``.

    Attributes:
        ladder: the tiers.
        memory: name of the fastest tier.
        slots: what lies in each slot of memory.
    """

    def __init__(
        self,
        index: KeyIndex,
        tiers: Mapping[str, SlotAllocator | StorageTier],
        mover: Mover,
        options: LadderOptions,
        namespace: Callable[[], bytes],
        clock: Callable[[], float],
        *,
        device: str | None = None,
        metrics: Metrics | None = None,
        knows_storage: Callable[[], bool] = lambda: True,
        owned: Mapping[str, Closable] | None = None,
        grow: Callable[[int], object] | None = None,
        on_change: Callable[[str, Sequence[BlockId], bool], None] | None = None,
        on_left_out: Callable[[str, Sequence[BlockId]], object] | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self._on_change = on_change or self._record
        # Nothing is written to storage while its namespace is unknown.
        calls = LadderCallbacks(
            self._on_change, on_left_out, on_end, may_write=lambda: bool(namespace())
        )
        self.ladder = ladder = Ladder(
            index,
            tiers,
            mover,
            options,
            clock=clock,
            metrics=metrics,
            device=device,
            callbacks=calls,
        )
        self.metrics = ladder.metrics
        self.costs = ladder.costs
        self.learns = index.learns
        self._owned = owned or {}
        self.memory = ladder.fastest
        self._index = index
        self._lost = ladder.lost
        self._namespace = namespace
        self._clock = clock
        self._tiers = self._index.tiers  # memory, then storage
        memory = ladder.usage()[self.memory]
        index.expect(memory.capacity)
        self.slots = MemorySlots(memory.num_slots)
        self._copies = EngineCopies(index, ladder, memory.num_slots)
        self._lookup = KeyedLookup(index, ladder, namespace, knows_storage)
        self.direct_reads = DirectReads(index, ladder, self._storage_of)
        self._actions = HintActions[Sequence[bytes]](
            index,
            ladder,
            PromptCalls(
                retain=lambda _, keys, stated: index.retain(keys, stated, clock()),
                blocks=lambda _, keys: index.find_all(keys).known,
                is_pending=lambda _, keys: bool(self.lookup(keys).answers),
                read=self._read_ahead,
            ),
            self.memory,
            options.block_bytes,
            index.learns,
            clock,
        )
        self._grow = grow or (lambda num_slots: None)
        self._changes: list[Change] = []

    # -- locations ---------------------------------------------------------------------------------

    def locate(self, key: bytes) -> BlockState:
        """Return the location of one block. Changes nothing; see ``locate_all``."""
        found = self._index.find(key)
        if found is None:
            is_complete = self._lookup.is_complete
            return NOWHERE if is_complete else UNKNOWN
        return self._place(*found)

    def locate_all(self, keys: Sequence[bytes]) -> list[BlockState]:
        """Return the location of each block, as far as the index knows. Changes nothing.

        The index knows a block that storage recovered from an earlier run only once it was adopted.
        Cost: one look-up in the index per key.
        """
        return self.locate_blocks(keys).block_states

    def lookup_private(self, keys: Sequence[bytes]) -> list[BlockState]:
        here = (MEMORY, ARRIVING)
        return [at if at in here else NOWHERE for at in self.locate_blocks(keys).block_states]

    def locate_blocks(self, keys: Sequence[bytes]) -> LocatedBlocks:
        """Find blocks in the index; see ``locate_all``. Changes nothing.

        While storage recovers its blocks, unknown ones may be there.
        """
        blocks, states = self._index.find_all(keys)
        in_memory = states[:: len(self._tiers)]
        is_doubtful = self.is_doubtful
        if in_memory.count(READY_BYTE) == len(in_memory) and not is_doubtful:
            return LocatedBlocks(bytes([MEMORY]) * len(in_memory), blocks, states)
        by_tier = np.frombuffer(states, np.uint8).reshape(-1, len(self._tiers))
        if is_doubtful:
            by_tier = self._without_doubted(blocks, by_tier)
            in_memory = by_tier[:, 0].tobytes()
        codes = in_memory.translate(IN_MEMORY[self._lookup.is_complete])
        if len(self._tiers) > 1 and NOWHERE in codes:
            of_keys = np.frombuffer(codes, np.uint8).copy()
            is_stored = (by_tier[:, 1:] == READY_BYTE).any(axis=1)
            of_keys[(of_keys == NOWHERE) & is_stored] = STORAGE
            codes = of_keys.tobytes()
        return LocatedBlocks(codes, blocks, states)

    def _without_doubted(self, blocks: Sequence[BlockId], by_tier: Codes) -> Codes:
        """Return the states of blocks; a copy that must not be used is absent."""
        usable, doubted, lost = by_tier.copy(), self._copies.doubted, self._lost
        for tier, name in enumerate(self._tiers):
            where = [at for at, block in enumerate(blocks) if (block, name) in lost]
            usable[where, tier] = ABSENT_BYTE
        usable[[at for at, block in enumerate(blocks) if block in doubted], 0] = ABSENT_BYTE
        return usable

    def _find_all(self, keys: Collection[bytes]) -> tuple[Sequence[BlockId], Codes]:
        """Return the block of each key, ``NO_BLOCK`` if unknown, and its states.

        They are uint8 [num_keys, num_tiers].
        """
        blocks, states = self._index.find_all(keys)
        return blocks, np.frombuffer(states, np.uint8).reshape(-1, len(self._tiers))

    def _place(self, block: BlockId, states: Sequence[State]) -> BlockState:
        if states[0] is not ABSENT and not self._is_doubted(block):
            return MEMORY if states[0] is READY else ARRIVING
        return NOWHERE if self._storage_of(block, states) is None else STORAGE

    # -- look-ups in storage -----------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], has_gaps: bool = False) -> BlockLookup[PendingLookup]:
        """Look up a prompt's blocks; see ``BlockCache``.

        Storage that does not answer at once gets one look-up per prompt, however many requests wait
        for it. While there are ``answers``, each missing block is ``UNKNOWN``.
        """
        found, pending = self.lookup_blocks(keys, has_gaps)
        return BlockLookup(found.block_states, pending)

    def lookup_again(self, key: bytes, before: BlockState | None = None) -> BlockState:
        """Return the state of one block; see ``BlockCache``.

        A missing block is looked up again if storage may have recovered it since.
        """
        if before is NOWHERE and not self.ladder.unindexed(finds_at_once=True):
            return before
        state = self.locate(key)
        if state in (NOWHERE, UNKNOWN) and self.adopt([key]):
            state = self.locate(key)
        return state

    def lookup_blocks(
        self, keys: Sequence[bytes], has_gaps: bool
    ) -> tuple[LocatedBlocks, list[PendingLookup]]:
        """Look up a prompt's blocks; see ``lookup``. Return also what the index knows of them."""
        found = self.locate_blocks(keys)
        if found.are_all_in_memory:
            return found, []
        if self.ladder.unindexed(finds_at_once=True):
            unknown = np.flatnonzero(found.by_tier[:, 0] == UNINDEXED)
            if len(unknown) and (adopted := self.adopt(select_keys(keys, unknown))):
                self.touch(adopted)
                found = self.locate_blocks(keys)
        if not self._lookup.has_to_ask:
            return found, []
        wanted = select_keys(keys, found.positions(NOWHERE, UNKNOWN))
        pending = self._lookup.begin(wanted, has_gaps) if len(wanted) else []
        if pending:
            found = found._replace(codes=found.codes.translate(NOWHERE_TO_UNKNOWN))
        return found, pending

    def adopt(self, keys: Collection[bytes], stops_at_gap: bool = True) -> list[bytes]:
        """Adopt blocks that storage recovered from an earlier run. Return their keys.

        The index knows them afterwards, and they are read and evicted like other blocks. Only
        storage that answers at once is searched. Constant time if it has no more recovered blocks.

        Args:
            keys: blocks of one prompt, in its order. Blocks that the index knows are skipped.
            stops_at_gap: look up keys in growing pieces, until a piece is not found in full.
        """
        return self._lookup.adopt(keys, stops_at_gap)

    @property
    def is_doubtful(self) -> bool:
        """Whether there are copies that must not be used."""
        return bool(self._lost or self._copies.doubted)

    def _is_doubted(self, block: BlockId) -> bool:
        """Whether the copy of a block in memory, or in flight to it, must not be used."""
        if not self.is_doubtful:
            return False
        return block in self._copies.doubted or (block, self.memory) in self._lost

    def _storage_of(self, block: BlockId, states: Sequence[State]) -> str | None:
        for tier, state in zip(self._tiers[1:], states[1:], strict=True):
            if state is READY and (block, tier) not in self._lost:
                return tier
        return None

    def sources(self, keys: Sequence[bytes]) -> list[str]:
        """Return the tier that each block would be read from now. Changes nothing.

        It is memory for a block in flight to memory, and for a block that is nowhere.
        """
        _, by_tier = self._find_all(keys)
        return [self._tiers[tier] for tier in _sources(by_tier).tolist()]

    def age_s(self, key: bytes) -> float | None:
        if self.computed is None or not (known := self._index.find_all([key]).known):
            return None
        return self.computed.age_s(known[0])

    def origins(self, keys: Sequence[bytes]) -> list[str]:
        slots = self._index.slots(self._known(keys), self.memory)
        return [self._tiers[tier] for tier in self.slots.sources[as_array(slots)].tolist()]

    def set_num_last(self, num_blocks: int) -> None:
        """Set how many of the last blocks of a prompt are stored, if not all; see ``KeyIndex``."""
        self._index.set_num_last(num_blocks)

    def on_request(self, keys: Iterable[bytes]) -> None:
        if self._actions.has_prefetches:
            keys = list(keys)
            self._actions.on_request(b"", keys)
        self._index.on_request(keys, self._clock())

    def continues(self, keys: Iterable[bytes], last_key: bytes) -> None:
        self._index.continues(keys, last_key)

    def hint(self, keys: Collection[bytes], hint: Hint, block_size: int) -> Sequence[HintResult]:
        prompt = list(keys)
        return [
            self.apply_hint(prompt, stated) for stated in hint.block_hint(block_size, self._clock())
        ]

    def apply_hint(self, keys: Sequence[bytes], block_hint: BlockHint) -> HintResult:
        """Apply a client's statement to a prompt's blocks. Raises ValueError for an invalid one."""
        return self._actions.apply(b"", keys, block_hint)

    @property
    def has_prefetches(self) -> bool:
        """Whether ``poll`` has work to do later, for hints."""
        return self._actions.has_prefetches

    def wait(self, keys: Collection[bytes], is_waiting: bool) -> None:
        now = self._clock()
        self._index.retain(keys, waits(is_waiting, now), now)

    def touch(self, keys: Collection[bytes]) -> None:
        self._index.touch(self._index.find_all(keys).known, self._clock())

    def _known(self, keys: Sequence[bytes]) -> Sequence[BlockId]:
        known = self._index.find_all(keys).known
        assert len(known) == len(keys), "a block that is nowhere"
        return known

    # -- between the engine's device and memory ----------------------------------------------------

    def reserve(self, keys: Collection[bytes]) -> Reserved | None:
        """Reserve slots for those of ``keys`` that are not in memory and that it admits."""
        new, ready = self._index.missing(keys, self.memory)
        self._grow(len(new))
        num_changes = len(self._changes)
        reserved = self.ladder.reserve(self._index, new, ready)
        if reserved is None:
            return None
        self._copies.reserve(reserved.slots)
        self.slots.fill(reserved.blocks, reserved.slots, 0)
        left = [key for change in self._changes[num_changes:] for key in change.keys]
        return Reserved(reserved.keys, reserved.slots, left)

    def make_room(
        self, num_new: int, ready: Sequence[BlockId], admits: Callable[[int], bool]
    ) -> None:
        """Free slots of memory for new blocks of a prompt; see ``Ladder.make_room``.

        ready: its blocks that are in memory.
        """
        self._grow(num_new)
        self.ladder.make_room(num_new, ready, admits)

    def commit(self, keys: Sequence[bytes], depths: Sequence[int], to_storage: bool = True) -> None:
        """Note that blocks have been copied into their slots, and queue their writes to storage."""
        blocks, by_tier = self._find_all(keys)
        coming = by_tier[:, 0] == WRITING_BYTE
        if not coming.all():
            blocks = select(blocks, coming)
            depths = [depths[at] for at in np.flatnonzero(coming).tolist()]
        self.commit_blocks(blocks, depths, to_storage)

    def commit_blocks(
        self, blocks: Sequence[BlockId], depths: Sequence[int], to_storage: bool
    ) -> None:
        """Like ``commit``, for blocks that are being written in memory."""
        committed = self._copies.commit(blocks, depths, self._clock())
        if committed:
            self._on_change(self.memory, committed, False)
        if self.computed is not None:
            self.computed.note(committed)
        if to_storage:
            self.ladder.enqueue_write(committed)

    @property
    def are_reserved(self) -> npt.NDArray[np.bool_]:
        """Whether the engine is to fill each slot of memory: bool [num_slots]."""
        return self._copies.are_reserved

    @property
    def has_waiters(self) -> bool:
        """Whether a request waits for a block that the engine is to copy to memory."""
        return self._copies.has_waiters

    def add_present(
        self, keys: Sequence[bytes], slots: Sequence[Slot], depths: Sequence[int]
    ) -> Sequence[BlockId]:
        """Add new blocks that lie in slots already, and queue their writes to storage. Return them.

        No change is reported: the caller knows them.
        """
        now = self._clock()
        blocks, _ = self._index.write_new(keys, self.memory, slots, now)
        self._copies.reserve(slots)
        self.slots.fill(blocks, slots, 0)
        self.ladder.enqueue_write(self._copies.commit(blocks, depths, now))
        return blocks

    def abort(self, keys: Iterable[bytes]) -> None:
        self.abort_blocks(self._coming(list(keys)))

    def abort_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Like ``abort``, for blocks that are being written in memory."""
        self._copies.abort(blocks)

    def _coming(self, keys: Sequence[bytes]) -> Sequence[BlockId]:
        """Return those of the blocks that are being written in memory."""
        blocks, by_tier = self._find_all(keys)
        return select(blocks, by_tier[:, 0] == WRITING_BYTE)

    def hold(self, keys: Sequence[bytes]) -> Held:
        return Held(self._copies.hold(self._known(keys)))

    def release(self, keys: Collection[bytes]) -> None:
        slots = self._copies.release(self._index.find_all(keys).known)
        self.slots.sources[as_array(slots)] = 0

    def distrust(self, slots: Collection[Slot]) -> None:
        self._copies.distrust(slots)

    def distrust_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Like ``distrust``, for blocks that are reserved or leased in memory."""
        self._copies.distrust_blocks(blocks)

    # -- between memory and storage ----------------------------------------------------------------

    def promote(self, keys: Sequence[bytes], ready_keys: Sequence[bytes] = ()) -> int:
        kept = self._ready(ready_keys)
        self._index.lease(kept, self.memory)
        self._grow(len(keys))
        num = min(len(keys), self.ladder.num_available(self.memory))
        for storage, blocks in self._in_storage(keys[:num]).items():
            self._read(blocks, storage)
        self._index.release(kept, self.memory)
        return num

    def _ready(self, keys: Sequence[bytes]) -> Sequence[BlockId]:
        """Return the blocks that are ready in memory."""
        blocks, by_tier = self._find_all(keys)
        return select(blocks, by_tier[:, 0] == READY_BYTE)

    def _in_storage(self, keys: Sequence[bytes]) -> dict[str, list[BlockId]]:
        """Return those of the blocks that are to be read from each storage tier."""
        found: dict[str, dict[BlockId, None]] = {}  # each once: an engine may name one twice
        for block, states in self._found(keys):
            if states[0] is ABSENT:
                storage = self._storage_of(block, states)
                if storage is not None:
                    found.setdefault(storage, {})[block] = None
        return {storage: list(blocks) for storage, blocks in found.items()}

    def _read(self, blocks: Sequence[BlockId], storage: str, urgent: bool = True) -> None:
        self.ladder.on_admit(self._index.hashes(blocks), blocks)
        for _, begun in self.ladder.promote(blocks, storage, urgent):
            slots = self._index.slots(begun, self.memory)
            self.slots.fill(begun, slots, self._tiers.index(storage))

    def _read_ahead(self, blocks: Sequence[BlockId], storage: str) -> int:
        self._grow(len(blocks))
        num = min(len(blocks), self.ladder.num_available(self.memory))
        self._read(blocks[:num], storage, urgent=False)
        return num

    def probe(self, keys: Sequence[bytes]) -> None:
        for storage, blocks in self._in_storage(keys).items():
            num = self.ladder.num_to_probe(storage, len(blocks))
            num = min(num, self.ladder.num_available(self.memory))
            if num:
                self._read(blocks[:num], storage, urgent=False)

    def _found(self, keys: Sequence[bytes]) -> Iterator[tuple[BlockId, tuple[State, ...]]]:
        """Yield the blocks that the index knows, with their state in each tier."""
        blocks, states = self._index.find_all(keys)
        num = len(self._tiers)
        for at, block in enumerate(blocks):
            if block != NO_BLOCK:
                yield block, tuple(map(State, states[at * num : (at + 1) * num]))

    def wait_for_reads(self, keys: Sequence[bytes]) -> StorageWaiter:
        """Return a waiter for those of the blocks that are in flight to memory.

        keys: in prompt order.
        """
        waiter = StorageWaiter()
        moving = self._copies.keep_waiting(waiter, self._coming(keys))
        self.ladder.wait_for(waiter, self._index.slots(moving, self.memory))
        return waiter

    def poll(self) -> None:
        self.ladder.poll()
        self._actions.poll()

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete blocks from every tier, including blocks that only storage knows.

        They are not found from now on. A block that the engine copies is deleted when it reports
        the end of its copy, a block in flight between tiers when its copy has ended.
        """
        reserved = self._copies.doubt(self._coming(keys))
        blocks, _ = self._index.find_all(keys)
        self.ladder.delete(self._lookup.names(keys), blocks, reserved)

    def clear(self) -> None:
        """Forget all blocks, also in storage, and also held and reserved ones.

        The engine must wait for its own copies first, and must not report their end. Blocks in
        flight between tiers are discarded.
        """
        self._copies.clear()
        self._actions.clear()
        self.ladder.clear()

    def end_copies(self) -> None:
        """End the engine's own copies. Keep all blocks except those being stored.

        The engine's later copies must begin after these have ended.
        """
        self._copies.clear()

    def copies_have_ended(self) -> None:
        """Do nothing: the slots are free already, since an engine's ranks copy in order."""

    @property
    def storages(self) -> Sequence[str]:
        return self.ladder.storages

    @property
    def is_busy(self) -> bool:
        return self.ladder.is_busy or self._actions.is_due

    def usage(self) -> Mapping[str, TierUsage]:
        usage = self.ladder.usage()
        return {name: TierUsage(slots.num_used, slots.num_open) for name, slots in usage.items()}

    def cost_snapshot(self) -> Costs:
        return self.ladder.cost_snapshot()

    def close(self) -> bool:
        """Finish transfers, and close the tiers that are owned; see ``BlockCache``."""
        if not self._owned:
            return True
        self.ladder.drain(CLOSE_WAIT_S, self.poll)
        in_use = self.ladder.close()
        for name, tier in self._owned.items():
            if name not in in_use:
                tier.close()
        return not in_use

    def check_invariants(self, num_private: int = 0) -> None:
        """Raise AssertionError; see ``BlockCache``.

        num_private: slots in memory that are used by no block of the index.
        """
        self.ladder.check_invariants(num_private)
        self._copies.check_invariants()

    # -- events ------------------------------------------------------------------------------------

    def take_changes(self) -> list[Change]:
        """Return the blocks that entered or left a tier since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _record(self, tier: str, blocks: Sequence[BlockId], is_removed: bool) -> None:
        if blocks:
            self._changes.append(Change(self._index.keys(blocks), tier, is_removed))
