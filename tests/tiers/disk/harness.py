"""A disk tier, memory to copy from and to, and blocks whose bytes follow from their keys."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import shake_128
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.core.types import BlockKey, BlockName, Slot
from kvtier.devices.base import Finding, Memory
from kvtier.layout import DType, KVGroup, full_attention
from kvtier.testing import host_memory, memory_bytes
from kvtier.tiers import Outcome, Pieces
from kvtier.tiers.disk import DiskBlocks, DiskOptions, DiskSystem, DiskTier
from kvtier.tiers.disk.format.records import RECORD, Records, as_keys
from kvtier.tiers.disk.inspect.report import read_content

SMALL = full_attention(2, 2, 4, DType.FLOAT16, 2)
"""128 bytes per block: never aligned, so every block is bounced."""
ALIGNED = full_attention(2, 2, 64, DType.FLOAT16, 4)
"""4096 bytes per block: directly between disk and memory, where that is aligned."""
SLOT_BYTES = 4096
NAMESPACE = b"n" * 32
UNTOUCHED = 0xAB


def key(number: int) -> BlockKey:
    return BlockKey(shake_128(b"key %d" % number).digest(32))


def block(name: bytes, num_bytes: int) -> bytes:
    """Return the bytes of the block called ``name``."""
    return shake_128(b"bytes of " + name).digest(num_bytes)


def records_of(folder: Path, num_slots: int) -> Records:
    """``RECORD`` [num_slots]: the current record of each slot in the slab's journal."""
    table = np.zeros(num_slots, RECORD)
    found = read_content(folder).table
    table[found["slot"]] = found
    return table


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Flip bits of a byte in a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def spoil(folder: Path, slot: int, at: int = 5) -> None:
    """Flip a bit of byte ``at`` in a slot of the slab in ``folder``."""
    flip(folder / "data.slab", slot * SLOT_BYTES + at)


def zero(folder: Path, slots: Iterable[int]) -> None:
    """Zero slots of a slab, as writes that were lost: the file keeps its times."""
    path = folder / "data.slab"
    before = path.stat()
    with path.open("r+b") as file:
        for slot in slots:
            file.seek(slot * SLOT_BYTES)
            file.write(bytes(SLOT_BYTES))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def finding(tier: DiskBlocks | DiskTier, topic: str) -> Finding:
    """Return the finding about ``topic``."""
    (found,) = [line for line in tier.findings() if line.topic.startswith(topic)]
    return found


def open_blocks(
    options: DiskOptions | Path, system: DiskSystem | None = None, group: KVGroup = SMALL
) -> DiskBlocks:
    """Open a tier, of eight slots if only its folder is given."""
    if isinstance(options, Path):
        options = DiskOptions(options, 8 * SLOT_BYTES)
    return DiskBlocks(options, group, Arena().memory, system)


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Arena:
    """Aligned memory for ``num_places`` blocks, ``stride`` bytes apart, ``shift`` off alignment."""

    def __init__(self, num_places: int = 64, stride: int = 2 * SLOT_BYTES, shift: int = 0) -> None:
        whole = host_memory(num_places * stride + 2 * SLOT_BYTES)
        self._keep = whole
        start = -whole.address % SLOT_BYTES + shift
        self._bytes = memory_bytes(whole)[start : start + num_places * stride]
        self._bytes[:] = UNTOUCHED
        self._stride = stride
        self.memory = Memory(
            whole.address + start, num_places * stride, "host", (whole, self._bytes)
        )

    def address(self, place: int) -> int:
        return self.memory.address + place * self._stride

    def view(self, place: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        return self._bytes[place * self._stride : place * self._stride + num_bytes]


class Harness:
    """A slab and its user; it may be closed and opened again."""

    def __init__(
        self,
        options: DiskOptions,
        group: KVGroup = SMALL,
        system: DiskSystem | None = None,
        arena: Arena | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.options, self.group, self.system = options, group, system
        self.arena = arena or Arena()
        self.clock = clock or Clock()
        self.monotonic = Clock()
        self.num_bytes = group.bytes_per_block
        self.tier = self.open()

    def open(self, **changes: object) -> DiskBlocks:
        self.options = replace(self.options, **changes)  # type: ignore[arg-type]
        self.tier = DiskBlocks(
            self.options, self.group, self.arena.memory, self.system, self.clock, self.monotonic
        )
        return self.tier

    def reopen(self, **changes: object) -> DiskBlocks:
        self.tier.close()
        return self.open(**changes)

    def crash(self) -> None:
        """End as a dead process does: close all files without a write."""
        self.tier.abandon()

    def store(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot],
        depths: Sequence[int] | None = None,
        namespace: bytes = NAMESPACE,
    ) -> list[bool]:
        for place, name in enumerate(keys):
            self.arena.view(place, self.num_bytes)[:] = np.frombuffer(
                block(name, self.num_bytes), np.uint8
            )
        names = [
            BlockName(namespace, depth, each)
            for depth, each in zip(depths or range(len(keys)), keys, strict=True)
        ]
        return self.tier.store(names, slots, self.pieces(len(keys)))

    def pieces(self, num_blocks: int) -> Pieces:
        """Return the first places of the arena."""
        places = [self.arena.address(place) for place in range(num_blocks)]
        return Pieces.whole(places, self.num_bytes)

    def allocate(self, num_slots: int) -> list[Slot]:
        """Allocate slots; there must be enough."""
        slots = self.tier.allocate(num_slots)
        assert slots is not None, "no room"
        return slots

    def put(self, *numbers: int) -> list[Slot]:
        """Allocate slots and store blocks; every store must be acknowledged."""
        slots = self.allocate(len(numbers))
        assert self.store([key(number) for number in numbers], slots) == [True] * len(numbers)
        return slots

    def load(self, keys: Sequence[BlockKey], slots: Sequence[Slot]) -> list[Outcome]:
        """Load blocks, and compare the bytes of each block that is reported as loaded."""
        places = range(len(keys))
        for place in places:
            self.arena.view(place, 2 * SLOT_BYTES)[:] = UNTOUCHED
        results = self.tier.load(keys, slots, self.pieces(len(keys)))
        assert len(results) == len(keys)
        for place, (name, result) in enumerate(zip(keys, results, strict=True)):
            if result is Outcome.THERE:
                found = self.arena.view(place, self.num_bytes).tobytes()
                assert found == block(name, self.num_bytes), f"wrong bytes for block {place}"
            behind = self.arena.view(place, 2 * SLOT_BYTES)[self.num_bytes :]
            assert (behind == UNTOUCHED).all(), "bytes behind the block were changed"
        return results

    def claim(self, keys: Sequence[BlockKey]) -> list[Slot]:
        """Claim the leading run of blocks that a restart found and that are not claimed yet."""
        claimed: list[Slot] = []
        for name in keys if self.tier.can_load else ():
            num_before = self.tier.slots.num_unclaimed
            if not num_before:
                break
            wanted = as_keys([name])
            slots = self.tier.listed.find(wanted)
            slots[~self.tier.fit(wanted, slots)[0]] = -1
            self.tier.slots.hold(slots)
            if self.tier.slots.num_unclaimed == num_before:
                break
            claimed.append(Slot(int(slots[0])))
        return claimed

    def get(self, *numbers: int) -> list[Outcome]:
        """Claim and load recovered blocks, one by one; an absent block is DAMAGED."""
        found = []
        for number in numbers:
            slots = self.claim([key(number)])
            found += self.load([key(number)], slots) if slots else [Outcome.DAMAGED]
        return found


@contextmanager
def harness(
    path: Path, num_slots: int = 16, num_parts: int = 1, **settings: object
) -> Iterator[Harness]:
    """A harness below ``path``; closed at the end. num_parts: slabs that a block is cut over."""
    made = {
        name: settings.pop(name)
        for name in ("group", "system", "arena", "clock")
        if name in settings
    }
    more_paths = tuple(path / f"slab {rank}" for rank in range(1, num_parts))
    options = DiskOptions(path / "slab", num_slots * num_parts * SLOT_BYTES, more_paths, **settings)  # type: ignore[arg-type]
    here = Harness(options, **made)  # type: ignore[arg-type]
    try:
        yield here
    finally:
        here.tier.close()
