"""Blocks between slots and memory: directly where both are aligned, else by way of a buffer.

Which engine moves them depends on the kind of the memory, and on nothing else.

Straight goes also a block whose pieces lie apart: they are neighbours in the file, and the engine
moves many of them in one call.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier._hot import copy_batch
from kvtier.devices.base import Memory
from kvtier.errors import DeviceError
from kvtier.tiers import pages
from kvtier.tiers.crc_join import block_crcs, joined_crcs
from kvtier.tiers.disk.accelerator import Accelerator
from kvtier.tiers.disk.io import IoEngine
from kvtier.tiers.pieces import HOST_KINDS, Pieces

logger = logging.getLogger(__name__)

ALIGNMENT: Final = 4096
"""Alignment of slots and of O_DIRECT transfers."""
LEAST_PIECE_BYTES = 8 << 10
"""Least average size of a block's pieces for vectored I/O. Smaller pieces are copied to a buffer
faster than the kernel takes them one by one (``benchmarks.disk.direct``)."""

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Uint32s = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]
Transfer = Callable[[Int64s, Uint64s, Int64s, float | None], Int64s]


def goes_direct(sizes: Int64s) -> bool:
    """Whether blocks in pieces of so many bytes need no buffer, where they begin at pages."""
    return not why_bounced(sizes)


def why_bounced(sizes: Int64s) -> str:
    """Why blocks in pieces of so many bytes need a buffer; "" where they don't."""
    if (odd := sizes[sizes % ALIGNMENT != 0]).size:
        return f"a piece of {odd[0]} bytes is no multiple of {ALIGNMENT}"
    if len(sizes) > 1 and (mean := int(sizes.mean())) < LEAST_PIECE_BYTES:
        return f"pieces of {mean} bytes are copied faster than they are read one by one"
    return ""


class Bounce:
    """Room for ``num_slots`` slots of ``slot_bytes``, aligned to pages. One thread uses it.

    What lies behind a block in its slot is zero, and stays so: only blocks are copied in.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        assert slot_bytes > 0, f"a slot of {slot_bytes} bytes"
        self.num_slots = max(1, num_slots)
        self.slot_bytes = slot_bytes
        num_bytes = self.num_slots * slot_bytes
        buffer = pages.anonymous(num_bytes)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        self.memory = Memory(address, num_bytes, "host", buffer)
        self.addresses: Uint64s = (address + np.arange(self.num_slots) * slot_bytes).astype(
            np.uint64
        )

    def copy_in(self, blocks: Pieces) -> None:
        """The i-th of ``blocks`` to place i."""
        places = np.arange(len(blocks))
        copy_batch(self._pieces(blocks, places), blocks.addresses.ravel(), _sizes(blocks))

    def copy_out(
        self, blocks: Pieces, places: Int64s, accelerator: Accelerator | None = None
    ) -> None:
        """Copy the blocks at ``places`` to ``blocks``, by the accelerator whose memory that is.

        Pieces that nobody wants are left out. Raises ``DeviceError``.
        """
        wanted = blocks.wanted.ravel()
        to, at = blocks.addresses.ravel()[wanted], self._pieces(blocks, places)[wanted]
        sizes = _sizes(blocks)[wanted]
        if accelerator is None:
            copy_batch(to, at, sizes)
        else:
            accelerator.copy(at, to, sizes.astype(np.int64))

    def _pieces(self, blocks: Pieces, places: Int64s) -> Uint64s:
        """Return where the pieces of the blocks at ``places`` begin."""
        begins = (np.cumsum(blocks.sizes) - blocks.sizes).astype(np.uint64)
        return np.add.outer(self.addresses[places], begins).ravel()


def _sizes(blocks: Pieces) -> Uint64s:
    return np.tile(blocks.sizes.astype(np.uint64), len(blocks))


class BlockPort:
    """One direction between slots and memory: an engine, and a buffer of its own.

    accelerator: whose memory is reached, too, in the direction away from the disk.
    ends_at: when nothing is begun any more, and what is under way is cancelled (``monotonic``).
    Results: int64 [n], ``slot_bytes`` where a block was moved, fewer or -errno elsewhere.
    """

    def __init__(
        self,
        engine: IoEngine,
        bounce: Bounce,
        block_bytes: int,
        slot_bytes: int,
        num_threads: int = 1,
        accelerator: Accelerator | None = None,
    ) -> None:
        assert 0 < block_bytes <= slot_bytes == bounce.slot_bytes, "a block larger than its slot"
        self.engine = engine
        self._bounce = bounce
        self._block_bytes = block_bytes
        self._slot_bytes = slot_bytes
        self._num_threads = num_threads
        self._accelerator = accelerator

    def _of(self, kind: str) -> Accelerator | None:
        """Whose memory is of that kind; None for the processor's."""
        if kind in HOST_KINDS:
            return None
        assert self._accelerator is not None, f"the disk does not reach {kind} memory"
        assert kind == self._accelerator.kind, f"the disk does not reach {kind} memory"
        return self._accelerator

    def _engine_for(self, kind: str) -> IoEngine | None:
        """Return the I/O engine for memory of that kind.

        None if only the buffer moves the blocks.
        """
        accelerator = self._of(kind)
        return self.engine if accelerator is None else accelerator.engine

    def write(self, slots: Int64s, blocks: Pieces, ends_at: float) -> tuple[Int64s, Uint32s]:
        """Blocks from memory to slots, and their checksums.

        Those of blocks that were not moved mean nothing.
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
        """Blocks from slots to memory.

        That of a block which was not moved may hold a part of it, or is as it was.

        checked: which of them a checksum is wanted of; the other ones' mean nothing. direct:
        which of them may go without the buffer; None for all. Of an accelerator's memory none of
        those is wanted a checksum of.
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
                # while others are on their way
                of_pieces = np.zeros(some.addresses.shape, np.uint32)
                most = int(some.sizes.max())
                read: Transfer = partial(_read_checked, engine, of_pieces, most)
                done[part] = self._move(read, slots[part], some, ends_at)
                crcs[part] = joined_crcs(of_pieces, some.sizes)
            else:
                done[part] = self._move(engine.read, slots[part], some, ends_at)
                if len(wanted):
                    crcs[part[wanted]] = block_crcs(some.pick(wanted))
            if not is_aligned:  # what has not arrived would be of another block
                arrived = np.flatnonzero(done[part] == self._slot_bytes)
                if not self._copy_out(blocks.pick(part[arrived]), arrived):
                    done[part[arrived]] = -errno.ENODEV
        return done, crcs

    def _copy_out(self, blocks: Pieces, places: Int64s) -> bool:
        """From places in the buffer to where blocks lie.

        False where the accelerator is at fault: they may be there in part.
        """
        try:
            self._bounce.copy_out(blocks, places, self._of(blocks.kind))
        except DeviceError as error:
            # Its words only: what it has come through holds fences.
            logger.warning("blocks from disk are not on the device: %s", str(error))
            return False
        return True

    def _bounced(self, num_blocks: int) -> Pieces:
        """The first blocks in the buffer."""
        return Pieces.whole(self._bounce.addresses[:num_blocks], self._block_bytes)

    def _parts(self, blocks: Pieces, direct: Bools | None = None) -> Iterator[tuple[Int64s, bool]]:
        """Positions that need no buffer, then the others, a bufferful each."""
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
        """Piece by piece; the last one up to the end of the slot."""
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
    """A read, and checksums put into ``crcs``, of which there is one for each piece."""
    done, found = engine.read_checked(offsets, addresses, sizes, num_checked, deadline_s)
    crcs[:] = found.reshape(crcs.shape)
    return done
