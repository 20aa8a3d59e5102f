"""Blocks out of packs: read beside the caller, checked and copied by the caller."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final

import numpy as np

from kvtier.tiers.crc_join import copied_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.envelope import HEADER_BYTES, Bools, Envelope, Headers
from kvtier.tiers.remote.s3.catalogue import PackLocation
from kvtier.tiers.remote.s3.objects import Objects
from kvtier.tiers.remote.s3.packs import Int64s, PackName, PackShape, pack_path
from kvtier.tiers.storage import Keys

MAX_HEADERS: Final = 4096
"""Pack headers kept in memory: at most 50 KiB each, mostly 1 KiB."""
NONE: Final = np.empty(0, np.int64)

GAP_BYTES: Final = 1 << 20
"""So much is read in vain rather than asking twice: a request costs as much as some MB."""
PART_BYTES: Final = 32 << 20
"""About the most that is asked for in one request: several connections are faster than one. A pack
of the usual size is one part, with its header: more requests cost servers more."""
KEPT_BYTES: Final = (32 << 20) - (64 << 10)
"""The largest piece that glibc's malloc ever keeps, nearly."""


@dataclass(frozen=True, slots=True)
class PackPart:
    """One request: bytes ``start`` to ``end`` of a pack.

    The part that begins at 0 has the header. wanted: the wanted blocks that lie entirely in it.
    """

    start: int
    end: int
    wanted: slice


def parts_of(
    shape: PackShape, num_blocks: int, wanted: Int64s, with_header: bool
) -> list[PackPart]:
    """Parts of a pack of ``num_blocks``, ascending.

    wanted: int64 [n], numbers of blocks in it, ascending, one at least. with_header: it has a part
    of its own, or stands at the beginning of the first.
    """
    begins = shape.offsets(num_blocks, wanted)
    ends = begins + shape.block_bytes
    gaps = np.append(np.flatnonzero(begins[1:] - ends[:-1] > GAP_BYTES) + 1, len(wanted))
    parts, first = [], 0
    while first < len(wanted):
        full = int(np.searchsorted(ends, begins[first] + PART_BYTES, "right"))
        last = min(max(full, first + 1), int(gaps[np.searchsorted(gaps, first, "right")]))
        parts.append(PackPart(int(begins[first]), int(ends[last - 1]), slice(first, last)))
        first = last
    if with_header:
        header_bytes = shape.header_bytes(num_blocks)
        if parts[0].start - header_bytes > GAP_BYTES:
            return [PackPart(0, header_bytes, slice(0)), *parts]
        parts[0] = replace(parts[0], start=0)
    return parts


def keep_freed_memory() -> None:
    """Have malloc keep the memory of an answer for the next one.

    glibc's gives larger pieces back to the kernel than the process has freed so far, and fresh
    pages cost more than the bytes that come in them. Here a piece is freed that is as large as it
    ever keeps, which a process that has loaded a model has done anyway. See M_MMAP_THRESHOLD in
    mallopt(3).
    """
    np.empty(KEPT_BYTES, np.uint8)


@dataclass(slots=True)
class PackRequest:
    """Blocks wanted from one pack.

    headers: one for each of its blocks, as soon as they are known. early: parts that arrived before
    them.
    """

    place: PackLocation
    headers: Headers | None
    early: list[tuple[PackPart, memoryview]] = field(default_factory=list)


class PackReader:
    """Reads, and remembers the headers of packs. Any thread may use it."""

    def __init__(self, objects: Objects, shape: PackShape, envelope: Envelope) -> None:
        self._objects = objects
        self._shape = shape
        self._envelope = envelope
        self._headers: OrderedDict[PackName, Headers] = OrderedDict()
        self._lock = Lock()
        keep_freed_memory()

    def parts(self, places: Sequence[PackLocation]) -> list[tuple[PackRequest, PackPart]]:
        """Return the parts to request for blocks in ``places``; of each pack the header first."""
        parts = []
        for place in places:
            asked = PackRequest(place, self._known(place.pack))
            is_new = asked.headers is None
            parts += [
                (asked, part) for part in parts_of(self._shape, place.num_blocks, place.at, is_new)
            ]
        return parts

    async def read(self, asked: PackRequest, part: PackPart) -> memoryview:
        """Raises what ``Objects`` raises."""
        return await self._objects.part(pack_path(asked.place.pack), part.start, part.end)

    def take(
        self,
        asked: PackRequest,
        part: PackPart,
        content: memoryview,
        keys: Keys,
        blocks: Pieces,
    ) -> tuple[Int64s, Int64s]:
        """Copy the blocks of a part.

        Returns the numbers in the call of those that are right, and of the damaged ones: int64.
        What comes before the header is told of with it.

        keys: V32 [n], and blocks: of the call.
        """
        parts = [(part, content)]
        if asked.headers is None:
            if part.start:
                asked.early += parts
                return NONE, NONE
            asked.headers = self._read_headers(asked.place, content)
            parts += asked.early
            asked.early.clear()
        there, damaged = [], []
        for each in parts:
            numbers, are_right = self._copy(asked, asked.headers, *each, keys, blocks)
            there.append(numbers[are_right])
            damaged.append(numbers[~are_right])
        if any(map(len, damaged)):
            self._forget(asked.place.pack)
        return np.concatenate(there), np.concatenate(damaged)

    def _copy(
        self,
        asked: PackRequest,
        headers: Headers,
        part: PackPart,
        content: memoryview,
        keys: Keys,
        blocks: Pieces,
    ) -> tuple[Int64s, Bools]:
        """Numbers in the call of the blocks of one part, and whether each was right."""
        numbers, at = asked.place.numbers[part.wanted], asked.place.at[part.wanted]
        if not len(numbers) or len(content) != part.end - part.start:
            return numbers, np.zeros(len(numbers), bool)
        first = np.frombuffer(content, np.uint8).ctypes.data - part.start
        begins = first + self._shape.offsets(asked.place.num_blocks, at)
        # A tag is taken of what was read: there each block lies in one piece, not in many.
        read = Pieces.whole(begins, self._shape.block_bytes)
        crcs = copied_crcs(blocks.pick(numbers), read.cut(blocks.sizes))
        return numbers, self._envelope.are_blocks(headers[at], keys[numbers], read, crcs)

    # -- headers -----------------------------------------------------------------------------------

    def _read_headers(self, place: PackLocation, content: memoryview) -> Headers:
        """Read the headers of a pack's blocks.

        content: of the part that begins with them.

        What is no header of such a pack is none of any block.
        """
        header = np.array(content[: self._shape.header_bytes(place.num_blocks)], np.uint8)
        headers = self._shape.read_header(header, place.num_blocks)
        if headers is None:
            return np.zeros((place.num_blocks, HEADER_BYTES), np.uint8)
        with self._lock:
            self._headers[place.pack] = headers
            if len(self._headers) > MAX_HEADERS:
                self._headers.popitem(last=False)
        return headers

    def _known(self, pack: PackName) -> Headers | None:
        with self._lock:
            if pack in self._headers:
                self._headers.move_to_end(pack)
            return self._headers.get(pack)

    def _forget(self, pack: PackName) -> None:
        """Forget headers, which are then read anew."""
        with self._lock:
            self._headers.pop(pack, None)
