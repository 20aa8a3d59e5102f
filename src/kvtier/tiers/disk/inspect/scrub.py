"""Background verification of blocks, to find damage before a block is requested."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.core.hot import crc32c_many
from kvtier.tiers.disk.arrays import Bools, Int64s
from kvtier.tiers.disk.bounce import Bounce
from kvtier.tiers.disk.format.records import RecordKind, Records
from kvtier.tiers.disk.io import IoEngine


def check_blocks(
    engine: IoEngine, bounce: Bounce, records: Records, block_bytes: int, deadline_s: float
) -> tuple[Int64s, Bools]:
    """Read the blocks of at most ``bounce.num_slots`` records, and compare their checksums.

    Return the bytes read or -errno, and whether length and checksum match, per record.
    """
    num = len(records)
    assert num <= bounce.num_slots, "more blocks than the buffer has room for"
    slot_bytes = bounce.slot_bytes
    assert 0 < block_bytes <= slot_bytes, f"a block of {block_bytes} bytes in {slot_bytes}"
    sizes = np.full(num, slot_bytes, np.int64)
    addresses = bounce.addresses[:num]
    done = engine.read(records["slot"].astype(np.int64) * slot_bytes, addresses, sizes, deadline_s)
    crcs = crc32c_many(addresses, np.full(num, block_bytes, np.uint64))
    return done, np.asarray((done == slot_bytes) & (crcs == records["data_crc"]))


class RoundRobin:
    """Cursor that walks over a table of records again and again, a few blocks at a time."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, kinds: npt.NDArray[np.uint8], num_blocks: int) -> Int64s:
        """Return the slots of the next ``num_blocks`` blocks; at most one whole round.

        Scans no more slots than needed: the table may be large and mostly empty.

        kinds: uint8 [num_slots], kind of each slot's record.
        """
        found: list[Int64s] = []
        missing, left = num_blocks, len(kinds)
        while missing > 0 and left > 0:
            self._next %= len(kinds)
            span = min(left, max(1024, missing), len(kinds) - self._next)
            part = kinds[self._next : self._next + span]
            live = np.flatnonzero(part == RecordKind.PUT)[:missing]
            seen = int(live[-1]) + 1 if len(live) == missing else span
            found.append(live + self._next)
            self._next += seen
            left -= seen
            missing -= len(live)
        return np.concatenate(found) if found else np.zeros(0, np.int64)
