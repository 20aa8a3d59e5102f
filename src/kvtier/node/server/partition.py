"""Cache of one tenant's blocks of one namespace, in a node.

A *partition* holds a ``LocalBlockCache`` whose memory is the set of segments of the node's arena
that it has now. It requests further segments before it evicts, and returns segments when the node
retires them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.cache.block_cache import BlockState, Held, Reserved
from kvtier.cache.ladder import LadderOptions, PendingLookup
from kvtier.cache.local import LocalBlockCache, LocatedBlocks
from kvtier.cache.transfer import LocalMover
from kvtier.core.hints import BlockHint, HintKind
from kvtier.core.keys import child_keys
from kvtier.core.types import DEVICE, HOST, BlockId, Slot
from kvtier.index import State, make_key_index
from kvtier.index.selection import Int64s, are_neighbours, as_array, select
from kvtier.index.slot_leases import SlotArrays, SlotLeases
from kvtier.node.config import NodeConfig
from kvtier.node.server.checksums import RecordWriter, Verifier
from kvtier.node.server.kept import KeptSlots
from kvtier.node.server.lookups import PlaceCounts
from kvtier.node.server.memory import NodeMemory, SegmentTier
from kvtier.node.server.partition_key import PartitionKey
from kvtier.node.server.pins import Pins
from kvtier.node.server.reservations import Reservations
from kvtier.node.server.stores import partition_location
from kvtier.node.server.users import SlotUser
from kvtier.node.wire.protocol import Turns, pack
from kvtier.observe import Metrics
from kvtier.tiers import MemoryTier, StorageTier
from kvtier.tiers.remote.warm_start import warm_start_of

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=bytes)
PIECE_BYTES = 16 << 20
"""Bytes per read from storage, and per write to it."""
RETIRED_AT_ONCE = 256
"""Slots of a retired segment that are examined per call of ``retire_further``."""
DELETED_AT_ONCE = 512
"""Blocks that are deleted per call of ``delete`` and ``clear_further``."""
REST_S = 0.1
"""Seconds until a retired segment is examined again, some of whose blocks are still in use."""


class Partition:
    """Cache of blocks in segments of a node's memory, and in storage of its own.

    What follows from segments, takeover and deletion is here; ``cache`` has the rest. Blocks that
    engines copy are named by their slots, since each engine leases and reserves for itself.

    Args:
        key: its identity.
        memory: the node's memory.
        storages: storage tiers by name, fastest first; the partition closes them.
        config: settings of the node.
        take_segment: return a further segment for this partition, or None.
        writer: writes records of stored blocks, for the next node.
        clock: seconds.
        on_end: called, on any thread, when a transfer has ended.

    Attributes:
        key: its identity.
        cache: its blocks. Call it for everything that this class does not do.
        tier: its slots in memory.
        pins, reservations, kept: blocks and slots that are treated differently.
        looked_up: counts of blocks that engines looked up.
        clock: seconds.
        last_use: float64 [num_segments], time of the last use of each segment.
        on_move: called with a tier, the keys of blocks that entered or left it, and whether they
            left; None if no router listens.
    """

    def __init__(
        self,
        key: PartitionKey,
        memory: NodeMemory,
        storages: Mapping[str, StorageTier],
        config: NodeConfig,
        take_segment: Callable[[], int | None],
        writer: RecordWriter,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        self.key = key
        self.tier = SegmentTier(memory, key.folder, key.block_bytes, key.key_bytes)
        self._storages = storages
        self._take_segment = take_segment
        tiers: dict[str, MemoryTier | StorageTier] = {HOST: self.tier, **storages}
        stores = [partition_location(store, key.name) for store in config.stores]
        self._mover = LocalMover(tiers, None, clock, warm_start_of(stores, config.warm_start))
        self._mover.start()
        self.clock = clock
        namespace = key.namespace
        self._index = make_key_index(
            dict.fromkeys(tiers, config.eviction_policy), lambda: namespace, key.group_bytes
        )
        self.cache = LocalBlockCache(
            self._index,
            tiers,
            self._mover,
            LadderOptions(
                key.block_bytes,
                piece_blocks=max(1, PIECE_BYTES // key.block_bytes),
                lookup_patience_s=config.lookup_deadline_s,
            ),
            lambda: namespace,
            clock,
            device=DEVICE,
            metrics=Metrics(),
            owned=tiers,
            grow=self._grow,
            on_change=self._note,
            on_end=on_end,
        )
        self._ladder = self.cache.ladder
        self.pins = Pins(self, clock)
        self.looked_up = PlaceCounts()
        self.reservations = Reservations(self.tier.generations, clock)
        self.kept = KeptSlots(self, memory.memory.address, writer)
        self.last_use = np.full(memory.num_segments, -np.inf)
        self.on_move: Callable[[str, Sequence[bytes], bool], object] | None = None
        self._segment_bytes = memory.segment_bytes
        self._retiring: dict[int, tuple[int, float]] = {}  # segment: next slot to examine, and when

    # -- look-ups ----------------------------------------------------------------------------------

    def lookup(
        self, keys: Sequence[bytes], has_gaps: bool = False
    ) -> tuple[LocatedBlocks, list[PendingLookup]]:
        """Look up a prompt's blocks, also in storage; see ``LocalBlockCache.lookup_blocks``.

        Cost: one look-up in the index.
        """
        found, pending = self.cache.lookup_blocks(keys, has_gaps)
        return self._without_overdue(found), pending

    def locate(self, keys: Sequence[bytes]) -> LocatedBlocks:
        """Return what the index knows of blocks. Changes nothing."""
        return self._without_overdue(self.cache.locate_blocks(keys))

    def tier_states(self, keys: Sequence[bytes]) -> tuple[Sequence[str], bytes]:
        """Return the tiers, and a ``State`` per block and tier: uint8 [num_keys, num_tiers]."""
        return self._index.tiers, self._index.find_all(keys).states

    def _without_overdue(self, found: LocatedBlocks) -> LocatedBlocks:
        """Return what was found; blocks that an engine is late to store are nowhere."""
        if BlockState.ARRIVING not in found.codes or not self.reservations.has_overdue():
            return found
        at = found.positions(BlockState.ARRIVING)
        slots = as_array(self._index.slots(select(found.blocks, at), HOST))
        codes = np.frombuffer(found.codes, np.uint8).copy()
        codes[at[self.reservations.are_overdue(slots)]] = BlockState.NOWHERE
        return found._replace(codes=codes.tobytes())

    # -- slots -------------------------------------------------------------------------------------

    def reserve(self, keys: Collection[bytes]) -> Reserved | None:
        """Reserve slots for new blocks; see ``BlockCache.reserve``."""
        reserved = self.cache.reserve(keys)
        if reserved is not None:
            self._note_use(reserved.slots)
        return reserved

    def hold(self, keys: Sequence[bytes]) -> Held:
        """Hold blocks in memory; see ``BlockCache.hold``."""
        held = self.cache.hold(keys)
        self._note_use(held.slots)
        return held

    def lease(self, blocks: Sequence[BlockId]) -> Int64s:
        """Lease blocks in memory, for copies by an engine. Return their slots: int64 [n]."""
        self._index.lease(blocks, HOST)
        slots = as_array(self._index.slots(blocks, HOST))
        self._note_use(slots)
        return slots

    def end_leases(self, slots: Int64s) -> None:
        """End one lease of the block in each slot. slots: int64 [n], all leased by ``lease``."""
        blocks = self.cache.slots.blocks_in(slots)
        self._index.release(blocks, HOST)
        self.cache.slots.sources[slots] = 0
        self.note_released(blocks)

    def slot_leases(
        self,
        user: SlotUser,
        num_leases: npt.NDArray[np.uint32],
        is_reserved: npt.NDArray[np.bool_],
    ) -> SlotLeases:
        """Return the leases of an engine; see ``PythonSlotLeases`` for the arrays."""
        arrays = self.slot_arrays
        return self._index.slot_leases(HOST, arrays, num_leases, is_reserved, user.mask, user.keeps)

    @property
    def sample_mask(self) -> int:
        """See ``Ladder.sample_mask``."""
        return self._ladder.sample_mask

    def note_reserved(
        self, blocks: Sequence[BlockId], hashes: Sequence[int], sampled: Sequence[BlockId]
    ) -> None:
        """Note what ``SlotLeases.serve_reserve`` has reserved.

        blocks: the new blocks. hashes, sampled: of the blocks that the ladder samples.
        """
        self._ladder.note_arrivals(blocks, ())
        if hashes:
            self._ladder.on_admit_sampled(hashes, sampled)

    def note_committed(
        self,
        blocks: Sequence[BlockId],
        slots: bytes,
        generations: bytes,
        depths: bytes,
        keys: bytes,
        to_storage: bool,
    ) -> None:
        """Note what ``SlotLeases.serve_commit`` has committed; see there."""
        if self.on_move is not None:
            self.on_move(HOST, self._index.keys(blocks), False)
        self.kept.note(slots, generations, depths, keys)
        if to_storage and self._storages:
            self._ladder.enqueue_write(blocks)

    @property
    def slot_arrays(self) -> SlotArrays:
        """Arrays with an entry per slot, which all engines share."""
        slots, tier = self.cache.slots, self.tier
        return SlotArrays(
            slots.blocks,
            slots.sources,
            tier.generations,
            tier.users,
            self.last_use,
            self.cache.are_reserved,
            self.key.block_bytes,
            self._segment_bytes,
        )

    def note_released(self, blocks: Sequence[BlockId]) -> None:
        """Note that leases of blocks have ended."""
        self._ladder.end_reads(blocks)

    def distrust_slots(self, slots: Int64s) -> None:
        """Give up the blocks in slots that are leased or reserved. slots: int64 [n]."""
        self.tier.rows.renew(slots)
        self.cache.distrust_blocks(self.cache.slots.blocks_in(slots))

    def _grow(self, num_slots: int) -> None:
        """Add segments until ``num_slots`` slots are free, or no segment is to be had."""
        while self.tier.num_free < num_slots:
            segment = self._take_segment()
            if segment is None:
                return
            self.last_use[segment] = self.clock()
            self.tier.add(segment)

    def _note(self, tier: str, blocks: Sequence[BlockId], is_removed: bool) -> None:
        """Have records written for blocks that entered memory, and publish what moved."""
        if self.on_move is not None:
            self.on_move(tier, self._index.keys(blocks), is_removed)
        if not is_removed and tier == HOST and len(blocks):
            slots = as_array(self._index.slots(blocks, HOST))
            keys, depths = self._index.facts(blocks)
            generations = self.tier.generations[slots].tobytes()
            self.kept.note(slots.tobytes(), generations, pack(depths), keys)

    def _note_use(self, slots: Sequence[Slot] | Int64s) -> None:
        used = as_array(slots)
        if are_neighbours(used):  # as they usually are
            first, last = (self.tier.segments_of(used[at]) for at in (0, -1))
            self.last_use[first : last + 1] = self.clock()
        elif len(used):
            self.last_use[self.tier.segments_of(used)] = self.clock()

    def apply(
        self, keys: Sequence[bytes], said: Sequence[tuple[int, int, int, int, float]]
    ) -> Turns:
        """Apply hints to a prompt's blocks, one a turn. Invalid ones are ignored.

        said: the hints, each (kind, level, first block, end, seconds).
        """
        for word, level, first, end, for_s in said:
            now = self.clock()
            try:
                stated = BlockHint(word, level, first, end, now + for_s)
                if word in (HintKind.WAITS, HintKind.TURN):  # by the engine, not by its client
                    self._index.retain(keys, stated, now)
                else:
                    self.cache.apply_hint(keys, stated)
            except (ValueError, OverflowError) as error:
                logger.warning("hint ignored tenant=%s error=%s", self.key.tenant, error)
            yield

    # -- segments ----------------------------------------------------------------------------------

    def coldest_segment(self) -> tuple[float, int] | None:
        """Return the time of the last use of the segment that was not used for longest, and it.

        None if the partition has none. Segments with pinned blocks are left out.
        """
        segments = np.asarray(list(set(self.tier.segments) - self.pins.segments), np.int64)
        if not len(segments):
            return None
        times = self.last_use[segments]
        at = int(times.argmin())
        return float(times[at]), int(segments[at])

    def retire(self, segment: int) -> None:
        """Begin to give a segment back. Its blocks are evicted from memory little by little."""
        self.kept.forget_segment(segment)
        self.tier.retire(segment)
        self._retiring[segment] = self.tier.slots_of(segment).start, self.clock()

    def retire_further(self) -> list[int]:
        """Evict some blocks of retired segments. Return the segments that are empty now.

        A block that an engine copies is evicted when the copy has ended.
        """
        now_s = self.clock()
        for segment, (first, due_s) in self._retiring.items():
            if now_s < due_s:
                continue
            slots = self.tier.slots_of(segment)
            end = min(first + RETIRED_AT_ONCE, slots.stop)
            self._evict(np.arange(first, end))
            is_last = end == slots.stop
            self._retiring[segment] = (slots.start, now_s + REST_S) if is_last else (end, now_s)
        empty = self.tier.take_empty()
        for segment in empty:
            del self._retiring[segment]
        return empty

    def _evict(self, slots: Int64s) -> None:
        """Evict the blocks in these slots from memory, as far as nothing uses them."""
        its = self.cache.slots
        slots = slots[its.blocks[slots] > 0]
        blocks = its.blocks_in(slots)
        states = self._index.states_of(blocks, HOST)
        known = [
            (b, s)
            for b, s, at in zip(blocks, slots.tolist(), states, strict=True)
            if at is State.READY
        ]
        lies_at = self._index.slots([block for block, _ in known], HOST)
        here = [block for (block, slot), at in zip(known, lies_at, strict=True) if slot == at]
        self._ladder.evict_blocks(here, HOST)

    # -- takeover ----------------------------------------------------------------------------------

    def restore(self, segments: Sequence[int], left_mask: int, verifier: Verifier) -> None:
        """Take over segments of an earlier node; see ``KeptSlots.restore``."""
        self.last_use[segments] = self.clock()
        self.kept.restore(segments, left_mask, verifier)

    def has_in_memory(self, key: bytes) -> bool:
        """Whether a block is in memory, or arrives there."""
        return bool(self._in_memory([key]))

    def _in_memory(self, keys: Sequence[bytes]) -> list[BlockId]:
        """Return those of the blocks that are in memory, or arrive there."""
        found = [found for key in keys if (found := self._index.find(key)) is not None]
        return [block for block, states in found if states[0] is not State.ABSENT]

    # -- deletion ----------------------------------------------------------------------------------

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete blocks from every tier. Storage confirms it later (``undeleted``)."""
        self.pins.forget(keys)
        self.kept.forget(keys)
        in_memory = self._index.slots(self._in_memory(keys), HOST)
        self.tier.rows.renew(np.asarray(in_memory, np.int64))  # the next node finds none of them
        self.cache.delete(keys)

    def undeleted(self, keys: Sequence[bytes]) -> set[int]:
        """Return the positions of deleted keys for which some storage has not confirmed it yet."""
        blocks, _ = self._index.find_all(keys)
        names = child_keys(self.key.namespace, keys)
        lost = self._ladder.lost
        found: set[int] = set()
        for name in self.cache.storages:
            found |= self._mover.owed(name, names)
            found.update(at for at, block in enumerate(blocks) if (block, name) in lost)
        return found

    def delete_all(self) -> Iterator[None]:
        """Delete every block, including blocks that only a slab knows.

        Yields between steps. Blocks that engines copy are deleted when they have released them, and
        storage confirms later (``has_undeleted``). Blocks in shared stores that the index does not
        know are left: ``stores.delete_all`` deletes them.
        """
        self.pins.clear()
        self.kept.forget_all()
        yield from self._ladder.clear_in_steps(DELETED_AT_ONCE)
        for keys in _pieces([each.key for each in self._index.known()]):
            self.delete(keys)
            yield
        for name, storage in self._storages.items():
            for names in _pieces(storage.lasting_keys()):
                self._mover.drop(name, names, for_good=True)
                yield

    @property
    def has_undeleted(self) -> bool:
        """Whether some storage has deleted blocks yet to drop."""
        storages = self.cache.storages
        if any(self._mover.num_owed(name) for name in storages):
            return True
        return any(tier in storages for _, tier in self._ladder.lost)

    def evict_all(self) -> Iterator[None]:
        """Evict every block from memory that nothing uses. Yields between steps."""
        self.kept.forget_all()
        while self._ladder.evict(HOST, DELETED_AT_ONCE):
            yield

    # -- upkeep ------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Notice what has ended."""
        self.cache.poll()
        self.pins.expire()

    def used_bytes_by_tier(self) -> dict[str, int]:
        """Return the bytes that blocks take in each tier, as far as the index knows them."""
        usage, size = self.cache.usage(), self.key.block_bytes
        return {name: slots.num_used * size for name, slots in usage.items()}

    def capacity_by_storage(self) -> dict[str, int]:
        """Return the bytes that each storage tier has for this partition's blocks."""
        size = self.key.block_bytes
        return {name: each.num_blocks * size for name, each in self._storages.items()}

    def breakers(self) -> dict[str, str]:
        """Return the state of each storage tier's breaker."""
        return {name: self._mover.breaker(name).name.lower() for name in self.cache.storages}

    def storage_errors(self) -> dict[str, str]:
        """Return the last error of each storage tier that has failed."""
        errors = {name: storage.last_error for name, storage in self._storages.items()}
        return {name: error for name, error in errors.items() if error}

    @property
    def is_busy(self) -> bool:
        """Whether ``poll`` has work to do soon."""
        now_s = self.clock()
        return self.cache.is_busy or any(due_s <= now_s for _, due_s in self._retiring.values())

    @property
    def has_work(self) -> bool:
        """Whether ``poll`` has work to do, now or later."""
        is_waiting = bool(self._retiring) or self.cache.has_prefetches
        return self.is_busy or is_waiting or any(map(self._mover.num_owed, self._storages))

    def check_invariants(self) -> None:
        """Raise AssertionError also if a slot is not known to have the block that lies in it."""
        self.cache.check_invariants(self.kept.num_private)
        for each in self._index.known():
            state, slot, _ = each.places[0]
            if state is not State.ABSENT:
                assert self.cache.slots.blocks[slot] == each.block + 1, "a slot has another block"

    def close(self) -> bool:
        """Finish transfers, and close the tiers. Return False if that takes too long."""
        return self.cache.close()


def _pieces(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    """Yield keys in pieces that are deleted at once."""
    for at in range(0, len(keys), DELETED_AT_ONCE):
        yield keys[at : at + DELETED_AT_ONCE]
