"""Batches of transfers between a file and registered memory."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.devices.base import Memory
from kvtier.tiers.disk.arrays import Int64s, Uint64s

MAX_RUN_BYTES: Final = 16 << 20
"""Maximum bytes of one call: cuFile's default. Deadlines are checked between calls."""
MAX_RUN_PIECES: Final = 128
"""Maximum pieces of one call. No vendor documents a limit; NIXL's pools have this size."""


class RegisteredMemory:
    """Registered ranges of memory, which don't overlap."""

    def __init__(self, buffers: Iterable[Memory]) -> None:
        self.memories = sorted(buffers, key=lambda memory: memory.address)
        begins = [memory.address for memory in self.memories]
        self._begins = np.array(begins, np.uint64)
        self._ends = np.array(
            [memory.address + memory.nbytes for memory in self.memories], np.uint64
        )

    def bases(self, addresses: Uint64s, sizes: Int64s) -> Uint64s:
        """Return the start of the registration that holds each whole piece; 0 for none."""
        if not self.memories:
            return np.zeros(addresses.shape, np.uint64)
        at = np.searchsorted(self._begins, addresses, "right") - 1
        ends = addresses + sizes.astype(np.uint64)
        holds = (at >= 0) & (ends <= self._ends[at])
        return np.where(holds, self._begins[at], np.uint64(0))


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredBatch:
    """Pieces of a batch, as lists, because they are processed one by one.

    write: direction; True writes to the file.
    offsets: offset of each piece in the file.
    addresses: address of each piece in memory.
    bases: start of the registration that holds each piece.
    sizes: bytes of each piece.
    ends_at: deadline (``monotonic``) after which no piece begins; None for none.
    results: int64 [n], bytes or -errno; each is written by one thread.
    """

    write: bool
    offsets: list[int]
    addresses: list[int]
    bases: list[int]
    sizes: list[int]
    ends_at: float | None
    results: Int64s

    @property
    def is_late(self) -> bool:
        return self.ends_at is not None and time.monotonic() >= self.ends_at

    def ended(self) -> int:
        """Return the result of a piece that ended early: an error for a write, else 0."""
        return -errno.EIO if self.write else 0
