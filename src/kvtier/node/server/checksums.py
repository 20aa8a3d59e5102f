"""Checksums of blocks in a node's memory, computed beside the node's own thread.

``RecordWriter`` writes a record for each block that was stored, in idle time. ``Verifier`` verifies
the blocks left by the previous node process.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread, get_native_id
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kvtier.core.hot import crc32c_many
from kvtier.core.system.process import num_cores
from kvtier.index.selection import Int64s
from kvtier.node.server.records import Bools, PartitionRows, Records

logger = logging.getLogger(__name__)

Work = TypeVar("Work")

PIECE_BYTES = 16 << 20
"""Bytes whose checksums are computed in one call."""
MAX_WAITING = 1 << 16
"""Most groups of blocks that wait for their records. The oldest get none: they are evicted first"""
IDLE = 19
"""Nice value of the thread that writes records: it has the time that nobody else wants."""
COLLECT_S = 0.01
"""Seconds for which blocks are collected before their records are written. Each time that the
thread wakes, it takes the interpreter from the node's own."""
CLOSE_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Memory of a partition's slots, and their rows. address: of slot 0."""

    rows: PartitionRows
    address: int
    block_bytes: int

    def crcs(self, slots: Int64s, threads: int = 1) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """Return the checksum of each slot's bytes: uint32 [n]."""
        begins = slots.astype(np.uint64) * np.uint64(self.block_bytes) + np.uint64(self.address)
        sizes = np.full(len(slots), self.block_bytes, np.uint64)
        return crc32c_many(begins, sizes, threads)

    @property
    def piece(self) -> int:
        """Number of blocks whose checksums are computed in one call."""
        return max(1, PIECE_BYTES // self.block_bytes)


class WrittenBlocks(NamedTuple):
    """Blocks that were stored.

    slots, generations, depths: int64 bytes; the generations are those at that time. keys:
    concatenated.
    """

    partition: BlockRows
    slots: bytes
    generations: bytes
    depths: bytes
    keys: bytes


class Worker(ABC, Generic[Work]):
    """Thread that carries out queued work, in order.

    Subclasses set their own attributes first.

    Args:
        name: of the thread.
        most: most items that wait; of more, the oldest are dropped. None for no bound.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self._waiting: deque[Work] = deque(maxlen=most)
        self._wakes = Event()
        self._is_wanted = True
        self._is_working = False
        self._thread = Thread(target=self._run, name=f"kvtier node {name}", daemon=True)
        self._thread.start()

    @abstractmethod
    def _carry_out(self, work: Work) -> None:
        """Carry out one item, on the thread."""

    def _run(self) -> None:
        while self._is_wanted:
            self._wakes.clear()
            while self._waiting and self._is_wanted:
                self._is_working = True
                self._carry_out(self._waiting.popleft())
            self._is_working = False
            if self._is_wanted and not self._waiting:
                self._wait()

    def _wait(self) -> None:
        """Wait for work."""
        self._wakes.wait()

    @property
    def is_idle(self) -> bool:
        """Whether everything was carried out."""
        return not self._waiting and not self._is_working

    def close(self) -> None:
        """Stop, whatever waits."""
        self._is_wanted = False
        self._wakes.set()
        self._thread.join(CLOSE_WAIT_S)


class RecordWriter(Worker[WrittenBlocks]):
    """Writes the records of stored blocks, on a thread of its own.

    A block may be evicted, and its slot overwritten, while its checksum is computed. The record is
    then of a generation that the slot does not have any more, and counts for nothing.
    """

    def __init__(self) -> None:
        super().__init__("records", MAX_WAITING)

    def add(self, blocks: WrittenBlocks) -> None:
        """Write records of blocks, soon. Costs the caller next to nothing."""
        self._waiting.append(blocks)
        if not self._wakes.is_set():
            self._wakes.set()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), IDLE)
        super()._run()

    def _wait(self) -> None:
        super()._wait()
        time.sleep(COLLECT_S)

    def _carry_out(self, work: WrittenBlocks) -> None:
        try:
            self._write(work)
        except Exception:  # the blocks have no record, and are dropped after a crash
            logger.exception("records were not written")

    def _write(self, blocks: WrittenBlocks) -> None:
        rows = blocks.partition.rows
        keys = np.frombuffer(blocks.keys, rows.records.dtype["key"])
        columns = blocks.slots, blocks.generations, blocks.depths
        rows_of = [np.frombuffer(column, np.int64) for column in columns]
        for at in range(0, len(keys), blocks.partition.piece):
            piece = slice(at, at + blocks.partition.piece)
            slots, generations, depths = (column[piece] for column in rows_of)
            is_there = rows.generations[slots] == generations
            if not is_there.any() or not self._is_wanted:
                continue
            crcs = blocks.partition.crcs(slots)
            rows.write(slots, generations, keys[piece], depths, crcs)


@dataclass(frozen=True, slots=True)
class LeftBlocks:
    """Blocks left by the previous node process. records: [n], of ``slots``."""

    partition: BlockRows
    slots: Int64s
    records: Records

    def pieces(self) -> Iterator[LeftBlocks]:
        """Yield the blocks in groups that are verified, and taken over, at once."""
        step = min(self.partition.piece, 256)
        for at in range(0, len(self.slots), step):
            piece = slice(at, at + step)
            yield LeftBlocks(self.partition, self.slots[piece], self.records[piece])


Adopt = Callable[[LeftBlocks, Bools], object]
"""Called with blocks, and with which of them are right."""


class Verifier(Worker[tuple[Adopt, LeftBlocks]]):
    """Verifies blocks on a thread of its own.

    tell: called on that thread when some have been verified.
    """

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell
        self._done: deque[tuple[Adopt, LeftBlocks, Bools]] = deque()
        self._num_threads = max(1, num_cores() // 2)
        super().__init__("verify")

    def add(self, blocks: LeftBlocks, then: Adopt) -> None:
        """Verify blocks. then: called by ``poll`` with them, and with which of them are right."""
        self._waiting.extend((then, piece) for piece in blocks.pieces())
        self._wakes.set()

    def poll(self) -> None:
        """Report the blocks that have been verified since the last call."""
        while self._done:
            then, blocks, are_right = self._done.popleft()
            then(blocks, are_right)

    def _carry_out(self, work: tuple[Adopt, LeftBlocks]) -> None:
        then, blocks = work
        crcs = blocks.partition.crcs(blocks.slots, self._num_threads)
        self._done.append((then, blocks, np.asarray(crcs == blocks.records["data_crc"])))
        self._tell()
