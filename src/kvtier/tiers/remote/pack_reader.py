"""Blocks out of packs: read beside the caller, checked and copied by the caller."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

import numpy as np

from kvtier.tiers.pieces import Pieces
from kvtier.tiers.remote.catalogue import Place
from kvtier.tiers.remote.envelope import Envelope
from kvtier.tiers.remote.objects import Objects
from kvtier.tiers.remote.packs import PackName, PackShape, pack_path
from kvtier.tiers.remote.reading import Wanted, copy_blocks
from kvtier.tiers.storage import Outcome
from kvtier.types import BlockKey

MAX_HEADERS: Final = 4096
"""Of packs that were read: 50 KiB each at the most, and 1 KiB mostly."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Blocks of a call that are in one pack. numbers: theirs in the call, in the pack's order."""

    place: Place
    numbers: list[int]
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Parts:
    """What was read of a pack. headers: one for each of its blocks; None where that is no header of
    it. starts: where each part begins, in the pack."""

    headers: list[bytes] | None
    starts: list[int]
    parts: list[memoryview]


class PackReader:
    """Reads, and remembers the headers of packs. Any thread may use it."""

    def __init__(self, objects: Objects, shape: PackShape, envelope: Envelope) -> None:
        self._objects = objects
        self._shape = shape
        self._envelope = envelope
        self._headers: OrderedDict[PackName, list[bytes]] = OrderedDict()
        self._lock = Lock()

    def by_pack(self, places: Sequence[Place | None]) -> list[Asked]:
        """What to ask for, of blocks in ``places``."""
        packs: dict[PackName, list[tuple[int, int]]] = {}
        of: dict[PackName, Place] = {}
        for number, place in enumerate(places):
            if place is not None:
                packs.setdefault(place.pack, []).append((place.at, number))
                of[place.pack] = place
        asked = []
        for pack, found in packs.items():
            found.sort()
            wanted = Wanted(self._shape, of[pack].num_blocks, [at for at, _ in found])
            asked.append(Asked(of[pack], [number for _, number in found], wanted))
        return asked

    async def read(self, asked: Asked) -> Parts:
        """Raises what ``Objects`` raises."""
        pack = asked.place.pack
        with self._lock:
            headers = self._headers.get(pack)
        ranges = asked.wanted.ranges(with_header=headers is None)
        reads = [
            asyncio.ensure_future(self._objects.part(pack_path(pack), *each)) for each in ranges
        ]
        try:
            parts = await asyncio.gather(*reads)
        finally:
            for each in reads:
                each.cancel()
        if any(len(part) != end - start for part, (start, end) in zip(parts, ranges, strict=True)):
            return Parts(None, [], [])
        if headers is None:
            num_blocks = asked.place.num_blocks
            header = np.frombuffer(parts[0], np.uint8)[: self._shape.header_bytes(num_blocks)]
            headers = self._shape.read_header(header, num_blocks)
        return Parts(headers, [start for start, _ in ranges], parts)

    def take(
        self, asked: Asked, keys: Sequence[BlockKey], found: Parts, blocks: Pieces
    ) -> list[Outcome]:
        """Copy what was read to ``blocks``, and see that it is right: ``THERE`` or ``DAMAGED``."""
        outcomes = [Outcome.DAMAGED] * len(keys)
        if found.headers is not None:
            headers = [found.headers[at] for at in asked.wanted.at]
            for at in self._copy(asked.wanted, headers, keys, found, blocks):
                outcomes[at] = Outcome.THERE
        self._remember(asked.place.pack, None if Outcome.DAMAGED in outcomes else found.headers)
        return outcomes

    def _copy(
        self,
        wanted: Wanted,
        headers: Sequence[bytes],
        keys: Sequence[BlockKey],
        found: Parts,
        blocks: Pieces,
    ) -> list[int]:
        """Copy blocks, and return those that are right."""
        are_sound = self._envelope.are_of(headers, keys)
        sound = [at for at, is_sound in enumerate(are_sound) if is_sound]
        addresses = wanted.addresses(found.starts, found.parts)
        # Checked where they were read: there each block lies in one piece, which is a good deal
        # faster to check than the many that it may lie in at its destination.
        whole = [at for at in sound if addresses[at]]
        as_read = Pieces.whole(addresses[whole], self._shape.block_bytes)
        right = self._right(whole, headers, keys, as_read)
        copy_blocks(blocks.pick(right), addresses[right])
        split = [at for at in sound if not addresses[at]]
        for at in split:
            wanted.gather(at, found.starts, found.parts, blocks.pick([at]))
        return right + self._right(split, headers, keys, blocks.pick(split))

    def _right(
        self,
        at: Sequence[int],
        headers: Sequence[bytes],
        keys: Sequence[BlockKey],
        blocks: Pieces,
    ) -> list[int]:
        """Those of ``at`` whose bytes, in ``blocks``, are the ones of their headers."""
        if not at:
            return []
        are_right = self._envelope.are_blocks(
            [headers[each] for each in at], [keys[each] for each in at], blocks
        )
        return [each for each, is_right in zip(at, are_right, strict=True) if is_right]

    def _remember(self, pack: PackName, headers: list[bytes] | None) -> None:
        """headers: None where they are to be read anew."""
        with self._lock:
            if headers is None:
                self._headers.pop(pack, None)
                return
            self._headers[pack] = headers
            self._headers.move_to_end(pack)
            if len(self._headers) > MAX_HEADERS:
                self._headers.popitem(last=False)
