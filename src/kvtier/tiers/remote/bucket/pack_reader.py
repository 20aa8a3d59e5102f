"""Reads blocks from packs: requests run in the background, callers verify and copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final

import numpy as np

from kvtier.core.types import BlockKey
from kvtier.tiers.crc_join import copied_crcs
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.bucket.catalogue import PackLocation
from kvtier.tiers.remote.bucket.object_store import ObjectStore
from kvtier.tiers.remote.bucket.packs import Int64s, PackName, PackShape, pack_path
from kvtier.tiers.remote.envelope import HEADER_BYTES, Bools, Envelope, Headers
from kvtier.tiers.storage import Keys, Outcome

MAX_HEADERS: Final = 4096
"""Pack headers kept in memory: at most 50 KiB each, mostly 1 KiB."""
NONE: Final = np.empty(0, np.int64)

GAP_BYTES: Final = 1 << 20
"""Unneeded bytes up to this many are read rather than split a request, which costs as much as some
MB."""
PART_BYTES: Final = 32 << 20
"""Approximate maximum size of a request: several connections are faster than one. A pack of the
default size is one request, with its header: more requests cost servers more."""
KEPT_BYTES: Final = (32 << 20) - (64 << 10)
"""Slightly below the largest piece that glibc's malloc ever keeps."""


@dataclass(frozen=True, slots=True)
class PackPart:
    """One request: bytes ``start`` to ``end`` of a pack.

    The part that begins at 0 has the header.

    wanted: the requested blocks that lie entirely in it.
    """

    start: int
    end: int
    wanted: slice


def parts_of(offsets: Int64s, wanted: Int64s, with_header: bool) -> list[PackPart]:
    """Return the parts of a pack to request, ascending.

    offsets: int64 [num_blocks + 1], see ``PackShape.offsets``.
    wanted: int64 [n], positions of blocks in the pack, ascending, at least one.
    with_header: include the header, as a part of its own or at the beginning of the first one.
    """
    begins, ends = offsets[wanted], offsets[wanted + 1]
    gaps = np.append(np.flatnonzero(begins[1:] - ends[:-1] > GAP_BYTES) + 1, len(wanted))
    parts, first = [], 0
    while first < len(wanted):
        full = int(np.searchsorted(ends, begins[first] + PART_BYTES, "right"))
        last = min(max(full, first + 1), int(gaps[np.searchsorted(gaps, first, "right")]))
        parts.append(PackPart(int(begins[first]), int(ends[last - 1]), slice(first, last)))
        first = last
    if with_header:
        header_bytes = int(offsets[0])
        if parts[0].start - header_bytes > GAP_BYTES:
            return [PackPart(0, header_bytes, slice(0)), *parts]
        parts[0] = replace(parts[0], start=0)
    return parts


def keep_freed_memory() -> None:
    """Make malloc keep the memory of a response for the next one.

    glibc returns pieces to the kernel that are larger than any freed so far, and fresh pages cost
    more than the bytes read into them. This frees a piece of the maximum size that glibc keeps, as
    any process that has loaded a model has done. See M_MMAP_THRESHOLD in mallopt(3).
    """
    np.empty(KEPT_BYTES, np.uint8)


@dataclass(slots=True)
class PackRequest:
    """Blocks requested from one pack.

    headers: of all its blocks, once known.
    early: parts that arrived before the headers.
    """

    place: PackLocation
    headers: Headers | None
    early: list[tuple[PackPart, memoryview]] = field(default_factory=list)


class PackReader:
    """Reads packs and caches their headers. Thread-safe."""

    def __init__(self, objects: ObjectStore, shape: PackShape, envelope: Envelope) -> None:
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
            offsets = self._shape.offsets(place.num_blocks, place.coding)
            parts += [(asked, part) for part in parts_of(offsets, place.at, is_new)]
        return parts

    async def read(self, asked: PackRequest, part: PackPart) -> memoryview:
        """Return the bytes of a part. Raises what ``Objects`` raises."""
        return await self._objects.part(pack_path(asked.place.pack), part.start, part.end)

    def take(
        self,
        asked: PackRequest,
        part: PackPart,
        content: memoryview,
        keys: Keys,
        blocks: Pieces,
    ) -> tuple[Int64s, Int64s]:
        """Copy the blocks of a part to their destination.

        Parts that arrive before the header are processed with it.

        keys: V32 [n], of the call.
        blocks: of the call.

        Returns positions in the call, int64: those of intact and those of damaged blocks.
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
        """Copy the blocks of one part. Return their positions in the call, and which are intact."""
        numbers, at = asked.place.numbers[part.wanted], asked.place.at[part.wanted]
        if not len(numbers) or len(content) != part.end - part.start:
            return numbers, np.zeros(len(numbers), bool)
        stored = np.frombuffer(content, np.uint8)
        offsets = self._shape.offsets(asked.place.num_blocks, asked.place.coding) - part.start
        if asked.place.coding is not None:
            are_right = np.zeros(len(numbers), bool)
            for place, (number, each) in enumerate(zip(numbers.tolist(), at.tolist(), strict=True)):
                block = stored[offsets[each] : offsets[each + 1]]
                key, into = BlockKey(keys[number].tobytes()), blocks.pick([number])
                outcome = self._envelope.decode(headers[each].tobytes(), key, block, into)
                are_right[place] = outcome is Outcome.THERE
            return numbers, are_right
        begins = stored.ctypes.data + offsets[at]
        # Tags are computed over the response, in which each block is one piece.
        read = Pieces.whole(begins, self._shape.block_bytes)
        crcs = copied_crcs(blocks.pick(numbers), read.cut(blocks.sizes))
        return numbers, self._envelope.are_blocks(headers[at], keys[numbers], read, crcs)

    # -- headers -----------------------------------------------------------------------------------

    def _read_headers(self, place: PackLocation, content: memoryview) -> Headers:
        """Parse the headers of a pack's blocks.

        content: the part that begins with them. If it is invalid, all headers are zeros, which
        match no block.
        """
        header = np.array(content[: self._shape.header_bytes(place.num_blocks)], np.uint8)
        headers = self._shape.read_header(header, place.num_blocks, place.coding)
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
        """Discard cached headers, so that they are read again."""
        with self._lock:
            self._headers.pop(pack, None)
