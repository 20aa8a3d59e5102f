"""Blocks out of packs: read beside the caller, checked and copied by the caller."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

import numpy as np

from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.catalogue import Place
from kvtier.tiers.remote.envelope import Envelope
from kvtier.tiers.remote.objects import Objects
from kvtier.tiers.remote.packs import PackName, PackShape, pack_path
from kvtier.tiers.remote.reading import Part, copy_blocks, keep_freed_memory, parts_of
from kvtier.tiers.storage import Outcome
from kvtier.types import BlockKey

MAX_HEADERS: Final = 4096
"""Of packs that were read: 50 KiB each at the most, and 1 KiB mostly."""


@dataclass(slots=True)
class Asked:
    """Blocks of a call that are in one pack. at: their numbers there, ascending. numbers: theirs in
    the call. headers: one for each block of the pack, as soon as they are known. early: parts that
    came before them."""

    place: Place
    at: list[int]
    numbers: list[int]
    headers: list[bytes] | None
    early: list[tuple[Part, memoryview]] = field(default_factory=list)


class PackReader:
    """Reads, and remembers the headers of packs. Any thread may use it."""

    def __init__(self, objects: Objects, shape: PackShape, envelope: Envelope) -> None:
        self._objects = objects
        self._shape = shape
        self._envelope = envelope
        self._headers: OrderedDict[PackName, list[bytes]] = OrderedDict()
        self._lock = Lock()
        keep_freed_memory()

    def parts(self, places: Sequence[Place | None]) -> list[tuple[Asked, Part]]:
        """What to ask for, of blocks in ``places``; of each pack the header first."""
        packs: dict[PackName, list[tuple[int, int]]] = {}
        of: dict[PackName, Place] = {}
        for number, place in enumerate(places):
            if place is not None:
                packs.setdefault(place.pack, []).append((place.at, number))
                of[place.pack] = place
        parts = []
        for pack, found in packs.items():
            found.sort()
            headers = self._known(pack)
            at = [each for each, _ in found]
            asked = Asked(of[pack], at, [number for _, number in found], headers)
            parts += [
                (asked, part)
                for part in parts_of(self._shape, of[pack].num_blocks, at, headers is None)
            ]
        return parts

    async def read(self, asked: Asked, part: Part) -> memoryview:
        """Raises what ``Objects`` raises."""
        return await self._objects.part(pack_path(asked.place.pack), part.start, part.end)

    def take(
        self,
        asked: Asked,
        part: Part,
        content: memoryview,
        keys: Sequence[BlockKey],
        blocks: Pieces,
    ) -> dict[int, Outcome]:
        """Copy the blocks of a part that are right, and say of each, by its number in the call:
        ``THERE`` or ``DAMAGED``. What comes before the header is told of with it.

        keys, blocks: of the call.
        """
        parts = [(part, content)]
        if asked.headers is None:
            if part.start:
                asked.early += parts
                return {}
            asked.headers = self._read_headers(asked.place, content)
            parts += asked.early
            asked.early.clear()
        outcomes: dict[int, Outcome] = {}
        for each, its_content in parts:
            outcomes |= self._copy(asked, asked.headers, each, its_content, keys, blocks)
        if Outcome.DAMAGED in outcomes.values():
            self._forget(asked.place.pack)
        return outcomes

    def _copy(
        self,
        asked: Asked,
        headers: Sequence[bytes],
        part: Part,
        content: memoryview,
        keys: Sequence[BlockKey],
        blocks: Pieces,
    ) -> dict[int, Outcome]:
        """Blocks of one part."""
        numbers, at = asked.numbers[part.wanted], asked.at[part.wanted]
        if not numbers or len(content) != part.end - part.start:
            return dict.fromkeys(numbers, Outcome.DAMAGED)
        first = np.frombuffer(content, np.uint8).ctypes.data - part.start
        begins = first + self._shape.offsets(asked.place.num_blocks, at)
        # Checked where they were read: there each block lies in one piece, which is a good deal
        # faster to check than the many that it may lie in at its destination.
        are_right = self._envelope.are_blocks(
            [headers[each] for each in at],
            [keys[number] for number in numbers],
            Pieces.whole(begins, self._shape.block_bytes),
        )
        right = np.flatnonzero(are_right)
        copy_blocks(blocks.pick(np.array(numbers)[right]), begins[right])
        return {
            number: Outcome.THERE if is_right else Outcome.DAMAGED
            for number, is_right in zip(numbers, are_right, strict=True)
        }

    # -- headers -----------------------------------------------------------------------------------

    def _read_headers(self, place: Place, content: memoryview) -> list[bytes]:
        """content: of the part that begins with them. What is no header of such a pack is none of
        any block."""
        header = np.array(content[: self._shape.header_bytes(place.num_blocks)], np.uint8)
        headers = self._shape.read_header(header, place.num_blocks)
        if headers is None:
            return [b""] * place.num_blocks
        with self._lock:
            self._headers[place.pack] = headers
            if len(self._headers) > MAX_HEADERS:
                self._headers.popitem(last=False)
        return headers

    def _known(self, pack: PackName) -> list[bytes] | None:
        with self._lock:
            if pack in self._headers:
                self._headers.move_to_end(pack)
            return self._headers.get(pack)

    def _forget(self, pack: PackName) -> None:
        """They are read anew."""
        with self._lock:
            self._headers.pop(pack, None)
