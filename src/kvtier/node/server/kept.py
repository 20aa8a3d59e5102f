"""Slots of a partition left by the previous process: blocks to take over, and slots in use."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvtier.core.types import BlockId, Slot
from kvtier.index.selection import Int64s
from kvtier.node.server.checksums import (
    BlockRows,
    LeftBlocks,
    RecordWriter,
    Verifier,
    WrittenBlocks,
)
from kvtier.node.server.records import Bools
from kvtier.node.server.users import SHARED_BIT, SlotUser

if TYPE_CHECKING:
    from kvtier.node.server.partition import Partition

logger = logging.getLogger(__name__)


class KeptSlots:
    """Slots of one partition that outlive a node.

    A block is *unverified* until its checksum was found right; then it is a block like all others.
    A slot is *aside* while an engine of an earlier node may use it: it is not given out. If a
    verified block lies in it, other engines may read that, and it is leased.

    Args:
        partition: the partition.
        address: of slot 0.
        writer: writes records of stored blocks.
    """

    def __init__(self, partition: Partition, address: int, writer: RecordWriter) -> None:
        self._partition = partition
        self._rows = partition.tier.rows
        self._slots = BlockRows(self._rows, address, partition.key.block_bytes)
        self._writer = writer
        self._unverified: dict[bytes, Slot] = {}
        self._aside: dict[Slot, BlockId | None] = {}
        self._left_mask = 0

    # -- blocks that are stored --------------------------------------------------------------------

    def note(self, slots: bytes, generations: bytes, depths: bytes, keys: bytes) -> None:
        """Have records written for blocks that are in memory now; see ``WrittenBlocks``."""
        self._writer.add(WrittenBlocks(self._slots, slots, generations, depths, keys))

    # -- takeover ----------------------------------------------------------------------------------

    def restore(self, segments: Iterable[int], left_mask: int, verifier: Verifier) -> None:
        """Take over segments of an earlier node.

        left_mask: bits of its engines that may still use slots.
        """
        self._left_mask = left_mask
        found = [self._restore(segment) for segment in segments]
        slots = np.concatenate([np.zeros(0, np.int64), *found])
        records = self._rows.records[slots]
        order = np.argsort(records["time"], kind="stable")  # what is verified last is evicted last
        slots, records = slots[order], records[order]
        for slot, key in zip(slots.tolist(), records["key"].tolist(), strict=True):
            before = self._unverified.get(key)
            if before is not None:
                self._discard(before)
            self._unverified[key] = slot
        verifier.add(LeftBlocks(self._slots, slots, records), self._adopt)
        logger.info(
            "memory taken over room=%s blocks=%d slots_in_use=%d",
            self._partition.key.name,
            len(self._unverified),
            len(self._aside),
        )

    def _restore(self, segment: int) -> Int64s:
        """Add a segment to the tier. Return the slots with valid records."""
        tier, rows = self._partition.tier, self._rows
        span = tier.slots_of(segment)
        slots = np.arange(span.start, span.stop)
        are_valid = rows.are_valid(span)
        rows.outdate_records(span)
        users = rows.users[slots] & np.uint64(self._left_mask)
        # A slot without a block that is not free may be one that an engine is to fill. The word
        # that says which engine has no checksum, so any of them counts.
        users[~are_valid & (rows.generations[slots] % 2 == 1)] = np.uint64(self._left_mask)
        rows.users[slots] = users
        are_used = are_valid | (users != 0)
        idle = slots[~are_used]
        rows.generations[idle] += rows.generations[idle] & 1
        tier.restore(segment, are_used)
        self._aside.update(dict.fromkeys(slots[are_used & ~are_valid].tolist()))
        return slots[are_valid]

    def _adopt(self, blocks: LeftBlocks, are_right: Bools) -> None:
        """Take over those of the verified blocks that are right, and wanted still."""
        good: list[tuple[bytes, Slot, int]] = []
        slots, records = blocks.slots.tolist(), blocks.records
        keys, depths = records["key"].tolist(), records["depth"].tolist()
        for key, slot, depth, is_right in zip(keys, slots, depths, are_right.tolist(), strict=True):
            if self._unverified.get(key) != slot:
                continue
            del self._unverified[key]
            if is_right and not self._partition.has_in_memory(key):
                good.append((key, slot, depth))
            else:
                if not is_right:
                    logger.warning("a block in memory is damaged, and dropped slot=%d", slot)
                self._discard(slot)
        if not good:
            return
        taken = self._partition.cache.add_present(
            [key for key, _, _ in good], [slot for _, slot, _ in good], [at for _, _, at in good]
        )
        for (_, slot, _), block in zip(good, taken, strict=True):
            if self._is_in_use(slot):
                self._partition.lease([block])
                self._aside[slot] = block

    def _is_in_use(self, slot: Slot) -> bool:
        return bool(int(self._rows.users[slot]) & self._left_mask)

    def _discard(self, slot: Slot) -> None:
        """Give up the unverified block in a slot."""
        if self._is_in_use(slot):
            self._rows.renew(np.array([slot]))
            self._aside[slot] = None
        else:
            self._partition.tier.free([slot])

    def release(self, user: SlotUser, left_mask: int) -> None:
        """Note that an engine of an earlier node uses no slot any more.

        left_mask: bits of all other such engines.
        """
        self._left_mask = left_mask
        slots = np.fromiter(self._aside, np.int64, len(self._aside))
        if user.bit != SHARED_BIT:
            self._rows.users[slots] &= np.uint64(user.keeps)
        for slot in slots.tolist():
            if self._is_in_use(slot):
                continue
            block = self._aside.pop(slot)
            if block is None:
                self._partition.tier.free([slot])
            else:
                self._partition.end_leases(np.array([slot]))

    # -- deletion ----------------------------------------------------------------------------------

    def forget(self, keys: Collection[bytes]) -> None:
        """Give up unverified blocks."""
        if self._unverified:
            for key in keys:
                slot = self._unverified.pop(key, None)
                if slot is not None:
                    self._discard(slot)

    def forget_all(self) -> None:
        """Give up all unverified blocks."""
        self.forget(list(self._unverified))

    def forget_segment(self, segment: int) -> None:
        """Give up the unverified blocks of a segment."""
        span = self._partition.tier.slots_of(segment)
        self.forget([key for key, slot in self._unverified.items() if slot in span])

    @property
    def num_unverified(self) -> int:
        """Number of blocks that are not verified yet."""
        return len(self._unverified)

    @property
    def num_aside(self) -> int:
        """Number of slots that engines of earlier nodes may use."""
        return len(self._aside)

    @property
    def num_private(self) -> int:
        """Number of slots that are used by no block of the index."""
        return len(self._unverified) + sum(block is None for block in self._aside.values())
