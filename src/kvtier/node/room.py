"""Cache of one tenant's blocks of one namespace, in a node.

A *room* is a keyed cache whose memory is those segments of the node's arena that it has now. It
asks for further segments before it evicts, and gives segments back when the node retires them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.assembly import build_ladder
from kvtier.hints import Said
from kvtier.index import State, make_key_index
from kvtier.index.policies.replayed import RUNS
from kvtier.keyed.cache import KeyedCache, Reserved
from kvtier.ladder import LadderOptions
from kvtier.node.memory import NodeMemory, SegmentTier
from kvtier.node.protocol import Int64s
from kvtier.tiers import MemoryTier, StorageTier
from kvtier.transfer import LocalMover
from kvtier.types import DEVICE, HOST, BlockId, Slot

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Bytes per read from storage, and per write to it."""
RETIRED_AT_ONCE = 256
"""Slots of a retired segment that are examined per call of ``retire_further``."""
CLOSE_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class RoomKey:
    """Identity of a room.

    tenant: whose quota counts. scope: digest of the namespace. block_bytes: bytes of a block.
    key_bytes: length of the engines' keys.
    """

    tenant: str
    scope: bytes
    block_bytes: int
    key_bytes: int

    @property
    def folder(self) -> str:
        """Name of the room's folder on disk."""
        scope = self.scope.hex()[:16]
        return f"{self.tenant or 'default'}-{scope}-{self.block_bytes}"


@dataclass(frozen=True, slots=True)
class RoomOptions:
    """Options of all rooms of a node.

    policy: eviction policy. lookup_patience_s: longest wait for a store's answer to a look-up.
    """

    policy: str = RUNS
    lookup_patience_s: float = 0.0


class NodeRoom(KeyedCache):
    """Keyed cache in segments of a node's memory, and in storage of its own.

    Args:
        key: its identity.
        memory: the node's memory.
        storages: storage tiers by name, fastest first; the room closes them.
        options: see ``RoomOptions``.
        take_segment: return a further segment for this room, or None.
        clock: seconds.
    """

    def __init__(
        self,
        key: RoomKey,
        memory: NodeMemory,
        storages: Mapping[str, StorageTier],
        options: RoomOptions,
        take_segment: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = key
        self.tier = SegmentTier(memory, key.block_bytes)
        self._storages = storages
        self._take_segment = take_segment
        tiers: dict[str, MemoryTier | StorageTier] = {HOST: self.tier, **storages}
        self._mover = LocalMover(tiers, None, clock)
        self._mover.start()
        index = make_key_index(tuple(tiers), lambda: key.scope, tuple(tiers), options.policy)
        ladder = build_ladder(
            index,
            tiers,
            self._mover,
            LadderOptions(
                key.block_bytes,
                piece_blocks=max(1, PIECE_BYTES // key.block_bytes),
                lookup_patience_s=options.lookup_patience_s,
            ),
            clock=clock,
            device=DEVICE,
        )
        super().__init__(index, ladder, lambda: key.scope, clock)
        self._block_at = np.zeros(self.tier.num_slots, np.int64)  # by slot: block + 1, or 0
        self._last_use = np.full(memory.num_segments, -np.inf)  # by segment
        self._retiring: dict[int, int] = {}  # segment: next slot to examine

    # -- slots -------------------------------------------------------------------------------------

    def reserve(self, keys: Collection[bytes]) -> Reserved | None:
        if self.tier.num_free < len(keys):
            self._grow(len(self._missing(keys)[0]))
        room = super().reserve(keys)
        if room is not None:
            self._note_use(room.slots)
        return room

    def hold(self, keys: Sequence[bytes]) -> Sequence[Slot]:
        slots = super().hold(keys)
        self._note_use(slots)
        return slots

    def _promote(self, keys: Sequence[bytes]) -> int:
        self._grow(len(keys))
        return super()._promote(keys)

    def _grow(self, num_slots: int) -> None:
        """Add segments until ``num_slots`` slots are free, or no segment is to be had."""
        while self.tier.num_free < num_slots:
            segment = self._take_segment()
            if segment is None:
                return
            self._last_use[segment] = self._clock()
            self.tier.add(segment)

    def _fill(self, blocks: Sequence[BlockId], slots: Sequence[Slot], tier: int) -> None:
        super()._fill(blocks, slots, tier)
        self._block_at[slots] = np.asarray(blocks, np.int64) + 1

    def _note_use(self, slots: Sequence[Slot]) -> None:
        segments = self.tier.segments_of(np.asarray(slots, np.int64))
        self._last_use[np.unique(segments)] = self._clock()

    def generations(self, slots: Sequence[Slot]) -> Int64s:
        """Return the generation of each slot: int64 [n]."""
        return self.tier.generations[np.asarray(slots, np.int64)]

    def apply(
        self, keys: Sequence[bytes], said: Sequence[tuple[int, int, int, int, float]]
    ) -> None:
        """Apply statements on a prompt's blocks. Invalid ones are ignored.

        said: the statements.
        """
        now = self._clock()
        for word, level, first, end, for_s in said:
            statement = Said(word, level, first, end, now + for_s)
            try:
                self._index.retain(keys, statement, now)
            except ValueError as error:
                logger.warning("hint ignored tenant=%s error=%s", self.key.tenant, error)

    # -- segments ----------------------------------------------------------------------------------

    def coldest_segment(self) -> tuple[float, int] | None:
        """Return the time of the last use of the segment that was not used for longest, and it.

        None if the room has none.
        """
        segments = np.asarray(self.tier.segments, np.int64)
        if not len(segments):
            return None
        times = self._last_use[segments]
        at = int(times.argmin())
        return float(times[at]), int(segments[at])

    def retire(self, segment: int) -> None:
        """Begin to give a segment back. Its blocks are evicted from memory little by little."""
        self.tier.retire(segment)
        self._retiring[segment] = self.tier.slots_of(segment).start

    def retire_further(self) -> list[int]:
        """Evict some blocks of retired segments. Return the segments that are empty now.

        A block that an engine copies is evicted when the copy has ended.
        """
        for segment, first in self._retiring.items():
            slots = self.tier.slots_of(segment)
            end = min(first + RETIRED_AT_ONCE, slots.stop)
            self._evict(np.arange(first, end))
            self._retiring[segment] = slots.start if end == slots.stop else end
        empty = self.tier.take_empty()
        for segment in empty:
            del self._retiring[segment]
        return empty

    def _evict(self, slots: Int64s) -> None:
        """Evict the blocks in these slots from memory, as far as nothing uses them."""
        slots = slots[self._block_at[slots] > 0]
        blocks = [BlockId(number - 1) for number in self._block_at[slots].tolist()]
        states = self._index.states_of(blocks, HOST)
        known = [
            (b, s)
            for b, s, at in zip(blocks, slots.tolist(), states, strict=True)
            if at is State.READY
        ]
        lies_at = self._index.slots([block for block, _ in known], HOST)
        here = [block for (block, slot), at in zip(known, lies_at, strict=True) if slot == at]
        self.ladder.eviction.remove(here, HOST)

    @property
    def is_retiring(self) -> bool:
        """Whether a segment is on its way back to the node."""
        return bool(self._retiring)

    # -- upkeep ------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether ``poll`` has work to do soon."""
        return self.ladder.is_busy or self.is_retiring

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory that hold blocks."""
        return self.tier.num_used * self.key.block_bytes

    def tell_of_ends(self, tell: Callable[[], object]) -> None:
        """Call ``tell``, on any thread, when a transfer has ended."""
        self.ladder.transfers.tell_of_ends(tell)

    def close(self) -> bool:
        """Finish transfers, and close the storage tiers. Return False if that takes too long."""
        self.ladder.transfers.drain(CLOSE_WAIT_S, self.poll)
        in_use = self._mover.close(CLOSE_WAIT_S)
        for name, storage in self._storages.items():
            if name not in in_use:
                storage.close()
        if not in_use:
            self.tier.close()
        return not in_use
