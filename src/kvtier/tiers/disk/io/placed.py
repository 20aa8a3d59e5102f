"""A batch of an I/O engine between a file and registered memory."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.devices.base import Memory
from kvtier.tiers.disk.io.base import Int64s, Uint64s

MAX_RUN_BYTES: Final = 16 << 20
"""Bytes of one call, cuFile's default maximum. Deadlines are checked between calls."""
MAX_RUN_PIECES: Final = 128
"""Pieces of one call. No vendor documents a limit; NIXL's pools hold as many."""


class Registered:
    """Memory that was registered, each piece as a whole. They don't overlap."""

    def __init__(self, buffers: Iterable[Memory]) -> None:
        self.memories = sorted(buffers, key=lambda memory: memory.address)
        begins = [memory.address for memory in self.memories]
        self._begins = np.array(begins, np.uint64)
        self._ends = np.array([each.address + each.nbytes for each in self.memories], np.uint64)

    def bases(self, addresses: Uint64s, sizes: Int64s) -> Uint64s:
        """Return the start of the registration that holds each whole piece; 0 for none."""
        if not self.memories:
            return np.zeros(addresses.shape, np.uint64)
        at = np.searchsorted(self._begins, addresses, "right") - 1
        ends = addresses + sizes.astype(np.uint64)
        holds = (at >= 0) & (ends <= self._ends[at])
        return np.where(holds, self._begins[at], np.uint64(0))


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Pieces of a batch, as lists, for they are handed on one by one.

    bases: of the registrations that hold them. ends_at: when none is begun any more
    (``monotonic``); None: never. results: int64 [n], written as they are known, each by one thread.
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
        """The result of a piece for which nothing more comes: no disk ends a write early."""
        return -errno.EIO if self.write else 0


def runs(
    order: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], max_pieces: int
) -> list[list[int]]:
    """Return runs of pieces that follow each other in the file, of at most ``MAX_RUN_BYTES``.

    A larger piece is a run by itself. order: the pieces by offset.
    """
    made: list[list[int]] = []
    end = room = -1
    for piece in order:
        size = sizes[piece]
        if offsets[piece] != end or size > room or len(made[-1]) == max_pieces:
            made.append([])
            room = MAX_RUN_BYTES
        made[-1].append(piece)
        end = offsets[piece] + size
        room -= size
    return made
