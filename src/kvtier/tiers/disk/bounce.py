"""Blocks between slots and memory: straight where both are aligned, else by way of a buffer."""

from __future__ import annotations

import ctypes
import errno
import mmap
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier._hot import crc32c_many
from kvtier.devices.base import Memory
from kvtier.tiers.disk.io import IoEngine

ALIGNMENT: Final = 4096
"""Of slots, and of what O_DIRECT reads and writes."""

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Uint32s = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]
Transfer = Callable[[Int64s, Uint64s, Int64s, float | None], Int64s]


class Bounce:
    """Room for ``num_slots`` slots of ``slot_bytes``, aligned to pages. One thread uses it.

    What lies behind a block in its slot is zero, and stays so: only blocks are copied in.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        assert slot_bytes > 0, f"a slot of {slot_bytes} bytes"
        self.num_slots = max(1, num_slots)
        self.slot_bytes = slot_bytes
        num_bytes = self.num_slots * slot_bytes
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        self.memory = Memory(address, num_bytes, "host", buffer)
        self.addresses: Uint64s = (address + np.arange(self.num_slots) * slot_bytes).astype(
            np.uint64
        )

    def copy_in(self, addresses: Uint64s, block_bytes: int) -> None:
        """The block at ``addresses[i]`` to place i."""
        for at, to in zip(addresses.tolist(), self.addresses.tolist(), strict=False):
            ctypes.memmove(to, at, block_bytes)

    def copy_out(self, addresses: Uint64s, block_bytes: int) -> None:
        """The block at place i to ``addresses[i]``."""
        for to, at in zip(addresses.tolist(), self.addresses.tolist(), strict=False):
            ctypes.memmove(to, at, block_bytes)


class BlockPort:
    """One direction between slots and memory: an engine, and a buffer of its own.

    Results: int64 [n], ``slot_bytes`` where a block was moved, fewer or -errno elsewhere.
    """

    def __init__(self, engine: IoEngine, bounce: Bounce, block_bytes: int, slot_bytes: int) -> None:
        assert 0 < block_bytes <= slot_bytes == bounce.slot_bytes, "a block larger than its slot"
        self.engine = engine
        self._bounce = bounce
        self._block_bytes = block_bytes
        self._slot_bytes = slot_bytes

    def write(self, slots: Int64s, addresses: Uint64s, deadline_s: float) -> Int64s:
        """Blocks from memory to slots, all of them within ``deadline_s`` or not at all."""
        ends_at = time.monotonic() + deadline_s
        done = np.zeros(len(slots), np.int64)
        for part, is_aligned in self._parts(addresses):
            at = addresses[part]
            if not is_aligned:
                self._bounce.copy_in(at, self._block_bytes)
                at = self._bounce.addresses[: len(part)]
            done[part] = self._move(self.engine.write, slots[part], at, ends_at)
        return done

    def read(
        self, slots: Int64s, addresses: Uint64s, checked: Bools, deadline_s: float
    ) -> tuple[Int64s, Uint32s]:
        """Blocks from slots to memory, all of them within ``deadline_s`` or not at all.

        checked: which of them a checksum is wanted of; the other ones' mean nothing.
        """
        ends_at = time.monotonic() + deadline_s
        done = np.zeros(len(slots), np.int64)
        crcs = np.zeros(len(slots), np.uint32)
        for part, is_aligned in self._parts(addresses):
            at = addresses[part] if is_aligned else self._bounce.addresses[: len(part)]
            wanted = np.flatnonzero(checked[part])
            if len(wanted) == len(part):  # while others are on their way
                read: Transfer = partial(self._read_checked, part, crcs)
                done[part] = self._move(read, slots[part], at, ends_at)
            else:
                done[part] = self._move(self.engine.read, slots[part], at, ends_at)
                sizes = np.full(len(wanted), self._block_bytes, np.uint64)
                crcs[part[wanted]] = crc32c_many(at[wanted], sizes)
            if not is_aligned:
                self._bounce.copy_out(addresses[part], self._block_bytes)
        return done, crcs

    def _read_checked(
        self,
        part: Int64s,
        crcs: Uint32s,
        offsets: Int64s,
        addresses: Uint64s,
        sizes: Int64s,
        deadline_s: float | None,
    ) -> Int64s:
        done, crcs[part] = self.engine.read_checked(
            offsets, addresses, sizes, self._block_bytes, deadline_s
        )
        return done

    def _parts(self, addresses: Uint64s) -> Iterator[tuple[Int64s, bool]]:
        """Positions that need no buffer, then the others, a bufferful each."""
        aligned = addresses % ALIGNMENT == 0
        if self._block_bytes != self._slot_bytes:
            aligned[:] = False
        if aligned.any():
            yield np.flatnonzero(aligned), True
        rest = np.flatnonzero(~aligned)
        for start in range(0, len(rest), self._bounce.num_slots):
            yield rest[start : start + self._bounce.num_slots], False

    def _move(self, move: Transfer, slots: Int64s, at: Uint64s, ends_at: float) -> Int64s:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            return np.full(len(slots), -errno.ETIMEDOUT, np.int64)
        sizes = np.full(len(slots), self._slot_bytes, np.int64)
        return move(slots * self._slot_bytes, at, sizes, left_s)
