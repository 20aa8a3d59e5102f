"""Leases of one user on the slots of a tier whose rows lie in memory that others read, too.

The native core implements ``SlotLeases`` as well; tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.core.hot import FreeSlots
from kvtier.core.types import BlockId, Slot
from kvtier.index.block_index import BlockIndex
from kvtier.index.selection import Int64s, as_array


class SlotArrays(NamedTuple):
    """Arrays with an entry per slot, shared by all users of a tier.

    Attributes:
        blocks: int64 [num_slots], the block in each slot plus 1; 0 for none.
        sources: int8 [num_slots], where each block came from, until its first use.
        generations: int64 [num_slots].
        users: uint64 [num_slots], a bit per user.
        last_use: float64 [num_segments], time of the last use of each segment.
        are_reserved: bool [num_slots], whether some user is to fill each slot.
        block_bytes, segment_bytes: slot ``s`` begins in segment ``s * block_bytes //
            segment_bytes``.
    """

    blocks: Int64s
    sources: npt.NDArray[np.int8]
    generations: Int64s
    users: npt.NDArray[np.uint64]
    last_use: npt.NDArray[np.float64]
    are_reserved: npt.NDArray[np.bool_]
    block_bytes: int
    segment_bytes: int


Segments: TypeAlias = tuple[tuple[FreeSlots, int], ...]
"""Segments with free slots: these, and the first slot of each."""
ServedReserve: TypeAlias = tuple[
    bytes, Sequence[BlockId], bytes, bytes, Sequence[int], Sequence[BlockId]
]
"""Result of ``SlotLeases.serve_reserve``."""
ServedCommit: TypeAlias = tuple[Sequence[BlockId], bytes, bytes, bytes, bytes, bool]
"""Result of ``SlotLeases.serve_commit``."""


class SlotLeases(Protocol):
    """Leases of one user."""

    def lease(self, blocks: Sequence[BlockId], now: float) -> tuple[bytes, bytes]:
        """Lease blocks that are in the tier, once more, and set the user's bit.

        Returns their slots and generations, as int64 bytes.
        """

    def release(self, slots: Int64s) -> Sequence[BlockId]:
        """End one lease of the block in each slot; with the last one the user's bit is cleared.

        Slots that the user has not leased are ignored. Returns the block of each lease that ended.
        """

    def reserve(self, slots: Sequence[Slot]) -> bytes:
        """Note that the user is to fill slots, and set its bit.

        Returns their generations, as int64 bytes.
        """

    def end_reserved(self, slots: Int64s) -> tuple[Sequence[int], Sequence[BlockId]]:
        """Note that the user fills slots no longer, and clear its bit.

        Returns the positions of those that it was to fill, each once, and the blocks in them.
        """

    def serve(
        self, content: memoryview, room: int, key_bytes: int, is_alone: bool, now: float
    ) -> tuple[bytes, bytes, Sequence[BlockId]] | None:
        """Serve a message of ``kvtier.node.wire.protocol`` in one call, if it is one of two kinds.

        These are a ``ReleaseNotice``, and a ``LookupRequest`` for blocks that are all ready in the
        tier. If there is no other tier, any blocks can be looked up.

        Args:
            content: the message.
            room: the only number of a room that is served.
            key_bytes: length of the room's keys.
            is_alone: whether there is no other tier.
            now: the time.

        Returns:
            The frame of the answer, b"" for none; the places of the blocks that count as looked up,
            as in the answer; the block of each lease that ended. None for any other message:
            nothing has changed.
        """

    def serve_reserve(
        self,
        content: memoryview,
        room: int,
        key_bytes: int,
        segments: Segments,
        make_room: Callable[[int, Sequence[BlockId]], Segments | None],
        mask: int,
        has_overdue: bool,
        now: float,
    ) -> ServedReserve | None:
        """Serve a ``ReserveRequest`` in one call, if all new blocks get slots.

        The new blocks are being written then, and all of ``arrays`` say so. The caller counts
        the slots.

        Args:
            content: the message.
            room: the only number of a room that is served.
            key_bytes: length of the room's keys.
            segments: each a segment's free slots, of which the reserved ones are taken, and its
                first slot. They are used in this order.
            make_room: called if they are too few, with the number of new blocks and the blocks of
                the prompt that are ready. Returns segments with as many free slots, or None. It may
                call ``admits``.
            mask: chooses blocks by their hash.
            has_overdue: whether some reservations are overdue. Then all blocks must be new.
            now: the time.

        Returns:
            The frame of the answer; the new blocks; their slots and generations, as int64 bytes;
            the hashes that are 0 under ``mask``, and their blocks. None for any other message, if
            no block is new, and without room: nothing has changed.
        """

    def admits(self, num_free: int) -> bool:
        """Return whether the tier admits all new blocks, given so many free slots.

        To be called by ``make_room`` of ``serve_reserve``, whose blocks are meant.
        """

    def serve_commit(self, content: memoryview, room: int) -> ServedCommit | None:
        """Serve a ``CommitNotice`` in one call, if all of its slots are reserved, each once.

        The blocks are ready then. content, room: see ``serve``.

        Returns:
            The blocks; their slots, generations and depths, as int64 bytes; their keys,
            concatenated; whether they go to storage. None for any other message: nothing has
            changed.
        """


class PythonSlotLeases:
    """``SlotLeases`` in Python.

    Args:
        index: the blocks.
        tier: the tier.
        arrays: its slots.
        num_leases: uint32 [num_slots], leases of this user; changed here.
        is_reserved: bool [num_slots], whether this user is to fill each slot; changed here.
        bit: this user's bit in ``arrays.users``.
        keeps: the bits that stay when the user has released a slot.
    """

    def __init__(
        self,
        index: BlockIndex,
        tier: str,
        arrays: SlotArrays,
        num_leases: npt.NDArray[np.uint32],
        is_reserved: npt.NDArray[np.bool_],
        bit: int,
        keeps: int,
    ) -> None:
        self._index, self._tier, self._arrays = index, tier, arrays
        self._num_leases, self._is_reserved = num_leases, is_reserved
        self._bit, self._keeps = np.uint64(bit), np.uint64(keeps)

    def lease(self, blocks: Sequence[BlockId], now: float) -> tuple[bytes, bytes]:
        its = self._arrays
        self._index.lease(blocks, self._tier)
        slots = as_array(self._index.slots(blocks, self._tier))
        np.add.at(self._num_leases, slots, np.uint32(1))
        its.users[slots] |= self._bit
        its.last_use[slots * its.block_bytes // its.segment_bytes] = now
        return slots.tobytes(), its.generations[slots].tobytes()

    def release(self, slots: Int64s) -> Sequence[BlockId]:
        its, ended = self._arrays, list[BlockId]()
        for slot in slots.tolist():
            if not 0 <= slot < len(self._num_leases) or not self._num_leases[slot]:
                continue
            self._num_leases[slot] -= 1
            if not self._num_leases[slot]:
                its.users[slot] &= self._keeps
            its.sources[slot] = 0
            ended.append(BlockId(int(its.blocks[slot]) - 1))
        self._index.release(ended, self._tier)
        return ended

    def reserve(self, slots: Sequence[Slot]) -> bytes:
        reserved = as_array(slots)
        self._arrays.users[reserved] |= self._bit
        self._is_reserved[reserved] = True
        return self._arrays.generations[reserved].tobytes()

    def end_reserved(self, slots: Int64s) -> tuple[Sequence[int], Sequence[BlockId]]:
        which, blocks = list[int](), list[BlockId]()
        for at, slot in enumerate(slots.tolist()):
            if 0 <= slot < len(self._is_reserved) and self._is_reserved[slot]:
                self._is_reserved[slot] = False
                self._arrays.users[slot] &= self._keeps
                which.append(at)
                blocks.append(BlockId(int(self._arrays.blocks[slot]) - 1))
        return which, blocks

    def serve(
        self, content: memoryview, room: int, key_bytes: int, is_alone: bool, now: float
    ) -> tuple[bytes, bytes, Sequence[BlockId]] | None:
        """Return None: the caller knows how to serve every message."""
        return None

    def serve_reserve(self, *_: object) -> ServedReserve | None:
        """Return None; see ``serve``."""
        return None

    def admits(self, num_free: int) -> bool:
        """Return False: no message is served."""
        return False

    def serve_commit(self, *_: object) -> ServedCommit | None:
        """Return None; see ``serve``."""
        return None
