"""Transfers between slots and memory: directly if both are aligned, else through a bounce buffer.

The kind of memory alone decides which I/O engine moves the blocks.

A block in several pieces can go directly, too: its pieces are neighbours in the file, and the
engine moves many of them in one call.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np

from kvtier.core.errors import DeviceError
from kvtier.core.hot import copy_batch
from kvtier.devices.base import Memory
from kvtier.tiers.crc_join import block_crcs, joined_crcs
from kvtier.tiers.disk.accelerator import Accelerator
from kvtier.tiers.disk.arrays import Bools, Int64s, Uint32s, Uint64s
from kvtier.tiers.disk.io import IoEngine
from kvtier.tiers.memory import pages
from kvtier.tiers.pieces import HOST_KINDS, Pieces

logger = logging.getLogger(__name__)

ALIGNMENT: Final = 4096
"""Alignment of slots and of O_DIRECT transfers."""
LEAST_PIECE_BYTES = 8 << 10
"""Minimum average size of a block's pieces for vectored I/O. Copying smaller pieces through a
buffer is faster than the kernel's handling of single pieces (``benchmarks.disk.direct``)."""

Transfer = Callable[[Int64s, Uint64s, Int64s, float | None], Int64s]


def goes_direct(sizes: Int64s) -> bool:
    """Return whether page-aligned blocks with pieces of ``sizes`` bytes need no buffer."""
    return not why_bounced(sizes)


def why_bounced(sizes: Int64s) -> str:
    """Return why blocks with pieces of ``sizes`` bytes need a buffer; "" if they don't."""
    if (odd := sizes[sizes % ALIGNMENT != 0]).size:
        return f"a piece of {odd[0]} bytes is not a multiple of {ALIGNMENT}"
    if len(sizes) > 1 and (mean := int(sizes.mean())) < LEAST_PIECE_BYTES:
        return f"pieces of {mean} bytes are faster to copy than to read one by one"
    return ""


class Bounce:
    """Bounce buffer: ``num_slots`` page-aligned slots of ``slot_bytes``. One thread uses it.

    rows: uint8 [num_slots, slot_bytes], the bytes of the slots.

    The bytes of a slot after its block are always zero, because only blocks are copied in.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        assert slot_bytes > 0, f"a slot of {slot_bytes} bytes"
        self.num_slots = max(1, num_slots)
        self.slot_bytes = slot_bytes
        num_bytes = self.num_slots * slot_bytes
        buffer = pages.anonymous(num_bytes)
        self.rows = np.frombuffer(buffer, np.uint8).reshape(self.num_slots, slot_bytes)
        address = self.rows.ctypes.data
        self.memory = Memory(address, num_bytes, "host", buffer)
        self.addresses: Uint64s = (address + np.arange(self.num_slots) * slot_bytes).astype(
            np.uint64
        )

    def copy_in(self, blocks: Pieces) -> None:
        """Copy the i-th of ``blocks`` to place i of the buffer."""
        places = np.arange(len(blocks))
        copy_batch(self._pieces(blocks, places), blocks.addresses.ravel(), _sizes(blocks))

    def copy_out(
        self, blocks: Pieces, places: Int64s, accelerator: Accelerator | None = None
    ) -> None:
        """Copy the blocks at ``places`` to ``blocks``; skip pieces that are not requested.

        accelerator: device that owns the target memory; None for host memory.

        Raises ``DeviceError``.
        """
        wanted = blocks.wanted.ravel()
        to, at = blocks.addresses.ravel()[wanted], self._pieces(blocks, places)[wanted]
        sizes = _sizes(blocks)[wanted]
        if accelerator is None:
            copy_batch(to, at, sizes)
        else:
            accelerator.copy(at, to, sizes.astype(np.int64))

    def _pieces(self, blocks: Pieces, places: Int64s) -> Uint64s:
        """Return the addresses of the pieces of the blocks at ``places``."""
        begins = (np.cumsum(blocks.sizes) - blocks.sizes).astype(np.uint64)
        return np.add.outer(self.addresses[places], begins).ravel()


def _sizes(blocks: Pieces) -> Uint64s:
    return np.tile(blocks.sizes.astype(np.uint64), len(blocks))


class BlockPort:
    """Transfers in one direction between slots and memory: an I/O engine with a bounce buffer.

    Results are int64 [n]: ``slot_bytes`` for a block that was moved, else fewer bytes or -errno.
    At ``ends_at`` (``monotonic``) no further transfer begins, and those in flight are cancelled.

    Args:
        engine: engine for host memory.
        bounce: the bounce buffer.
        block_bytes: bytes of a block.
        num_threads: threads that compute the checksums of writes.
        accelerator: device whose memory can be read into, too.
    """

    def __init__(
        self,
        engine: IoEngine,
        bounce: Bounce,
        block_bytes: int,
        num_threads: int = 1,
        accelerator: Accelerator | None = None,
    ) -> None:
        assert 0 < block_bytes <= bounce.slot_bytes, "a block larger than its slot"
        self.engine = engine
        self._bounce = bounce
        self._block_bytes = block_bytes
        self._slot_bytes = bounce.slot_bytes
        self._num_threads = num_threads
        self._accelerator = accelerator

    def _of(self, kind: str) -> Accelerator | None:
        """Return the accelerator that owns memory of this kind; None for host memory."""
        if kind in HOST_KINDS:
            return None
        assert self._accelerator is not None, f"the disk does not reach {kind} memory"
        assert kind == self._accelerator.kind, f"the disk does not reach {kind} memory"
        return self._accelerator

    def _engine_for(self, kind: str) -> IoEngine | None:
        """Return the I/O engine for memory of this kind.

        None if blocks for such memory must go through the buffer.
        """
        accelerator = self._of(kind)
        return self.engine if accelerator is None else accelerator.engine

    def write(self, slots: Int64s, blocks: Pieces, ends_at: float) -> tuple[Int64s, Uint32s]:
        """Write blocks to slots; return the results, and uint32 [n] checksums.

        Checksums are valid only for blocks that were moved.
        """
        done = np.full(len(slots), -errno.ETIMEDOUT, np.int64)
        crcs = np.zeros(len(slots), np.uint32)
        assert blocks.is_host, f"no checksum is computed in {blocks.kind} memory"
        for part, is_aligned in self._parts(blocks):
            if time.monotonic() >= ends_at:
                break
            if is_aligned:
                some = blocks.pick(part)
            else:
                self._bounce.copy_in(blocks.pick(part))
                some = self._bounced(len(part))
            crcs[part] = block_crcs(some, self._num_threads)
            done[part] = self._move(self.engine.write, slots[part], some, ends_at)
        return done, crcs

    def read(
        self,
        slots: Int64s,
        blocks: Pieces,
        checked: Bools,
        ends_at: float,
        direct: Bools | None = None,
    ) -> tuple[Int64s, Uint32s]:
        """Read blocks from slots into memory.

        The memory of a block that was not moved may be unchanged, or hold a part of the block.

        Args:
            slots: int64 [n], slot of each block.
            blocks: locations of the blocks in memory.
            checked: bool [n], blocks whose checksum is computed.
            ends_at: deadline (``monotonic``).
            direct: bool [n], blocks that may bypass the buffer; None for all. A block that goes
                directly to accelerator memory must not be ``checked``.

        Returns:
            The results, and uint32 [n] checksums, valid for ``checked`` blocks that were moved.
        """
        done = np.full(len(slots), -errno.ETIMEDOUT, np.int64)
        crcs = np.zeros(len(slots), np.uint32)
        for part, is_aligned in self._parts(blocks, direct):
            if time.monotonic() >= ends_at:
                break
            some = blocks.pick(part) if is_aligned else self._bounced(len(part))
            engine = self._engine_for(some.kind)
            assert engine is not None, "a buffer is host memory"
            wanted = np.flatnonzero(checked[part])
            if len(wanted) == len(part):
                # Checksums are computed while other blocks are in flight.
                of_pieces = np.zeros(some.addresses.shape, np.uint32)
                most = int(some.sizes.max())
                read: Transfer = partial(_read_checked, engine, of_pieces, most)
                done[part] = self._move(read, slots[part], some, ends_at)
                crcs[part] = joined_crcs(of_pieces, some.sizes)
            else:
                done[part] = self._move(engine.read, slots[part], some, ends_at)
                if len(wanted):
                    crcs[part[wanted]] = block_crcs(some.pick(wanted))
            if not is_aligned:  # copy only arrived blocks: other places hold old bytes
                arrived = np.flatnonzero(done[part] == self._slot_bytes)
                if not self._copy_out(blocks.pick(part[arrived]), arrived):
                    done[part[arrived]] = -errno.ENODEV
        return done, crcs

    def _copy_out(self, blocks: Pieces, places: Int64s) -> bool:
        """Copy blocks from the buffer to their memory.

        Return False if the accelerator fails; some bytes may have been copied then.
        """
        try:
            self._bounce.copy_out(blocks, places, self._of(blocks.kind))
        except DeviceError as error:
            # Log the text only: the traceback would keep fences alive.
            logger.warning("copy of blocks from disk to the device failed: %s", str(error))
            return False
        return True

    def _bounced(self, num_blocks: int) -> Pieces:
        """Return the first ``num_blocks`` blocks in the buffer."""
        return Pieces.whole(self._bounce.addresses[:num_blocks], self._block_bytes)

    def _parts(self, blocks: Pieces, direct: Bools | None = None) -> Iterator[tuple[Int64s, bool]]:
        """Yield the positions that need no buffer, then the others, one bufferful at a time.

        Each comes with whether it needs no buffer.
        """
        aligned = ((blocks.addresses % ALIGNMENT == 0) & blocks.wanted).all(axis=1)
        if direct is not None:
            aligned &= direct
        if self._engine_for(blocks.kind) is None:
            aligned[:] = False
        if self._block_bytes != self._slot_bytes or not goes_direct(blocks.sizes):
            aligned[:] = False
        if aligned.any():
            yield np.flatnonzero(aligned), True
        rest = np.flatnonzero(~aligned)
        for start in range(0, len(rest), self._bounce.num_slots):
            yield rest[start : start + self._bounce.num_slots], False

    def _move(self, move: Transfer, slots: Int64s, blocks: Pieces, ends_at: float) -> Int64s:
        """Move the pieces of blocks, the last piece padded to the end of the slot."""
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            return np.full(len(slots), -errno.ETIMEDOUT, np.int64)
        begins = np.cumsum(blocks.sizes) - blocks.sizes
        sizes = np.diff(begins, append=self._slot_bytes)
        offsets = np.add.outer(slots * self._slot_bytes, begins)
        wanted = np.tile(sizes, len(slots))
        done = move(offsets.ravel(), blocks.addresses.ravel(), wanted, left_s)
        by_block = done.reshape(len(slots), -1)
        failed, least = (by_block < 0).any(axis=1), by_block.min(axis=1)
        return np.asarray(np.where(failed, least, by_block.sum(axis=1)))


def _read_checked(
    engine: IoEngine,
    crcs: Uint32s,
    num_checked: int,
    offsets: Int64s,
    addresses: Uint64s,
    sizes: Int64s,
    deadline_s: float | None,
) -> Int64s:
    """Read pieces, and store the checksum of each in ``crcs``."""
    done, found = engine.read_checked(offsets, addresses, sizes, num_checked, deadline_s)
    crcs[:] = found.reshape(crcs.shape)
    return done
