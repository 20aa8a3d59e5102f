"""Read-only storage tier over a slab that another process on this machine owns.

If all ranks of an engine have the same KV, one rank writes it and all ranks read it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvtier.core.errors import CacheError, ConfigError
from kvtier.core.hot import SlotTable
from kvtier.core.system.private_files import open_file
from kvtier.core.types import DISK, BlockKey, BlockName
from kvtier.devices.base import Finding
from kvtier.layout import KVGroup
from kvtier.tiers.disk.bounce import BlockPort, Bounce
from kvtier.tiers.disk.format.folder import DATA, JOURNAL, open_data
from kvtier.tiers.disk.format.journal import read_records
from kvtier.tiers.disk.format.records import RECORD_BYTES, RecordKind, Records, are_valid, as_keys
from kvtier.tiers.disk.format.superblock import Superblock
from kvtier.tiers.disk.health import DiskHealth
from kvtier.tiers.disk.io import IoEngine
from kvtier.tiers.disk.opening import read_superblock, wanted
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.recovery import PIECE_RECORDS, Recovery
from kvtier.tiers.disk.sealing import make_sealing
from kvtier.tiers.disk.system import DiskSystem
from kvtier.tiers.pieces import Pieces
from kvtier.tiers.storage import Outcome, StorageFacts, StorageTier

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class FollowedSlab:
    """Files of a slab, opened for reading. One thread uses it.

    The writer records in the journal that a slot is empty *before* it writes other data there. So
    bytes that were read from a slot match its record if, after a further ``read_on``, that record
    is still the deciding one. The two processes need no lock.

    Attributes:
        rows: deciding records.
        slots: the slot of each key. A slot that is removed, because its bytes are wrong, comes back
            when the writer records something new for it.

    Raises ``OSError`` and ``CacheError`` if the files can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.superblock: Superblock = read_superblock(folder)[0]
        with contextlib.ExitStack() as undo:
            self.data_fd, self.is_direct = open_data(folder / DATA, os.O_RDONLY)
            undo.callback(os.close, self.data_fd)
            self._journal_fd = open_file(folder / JOURNAL, os.O_RDONLY)
            undo.callback(os.close, self._journal_fd)
            self._found = Recovery(self.superblock.num_slots)
            self.rows = self._found.rows
            self.slots = SlotTable(self.rows.keys, np.zeros(0, np.int64))
            self._at = 0
            self.read_on()
            if self._found.slab_id not in (None, self.superblock.slab_id):
                raise ConfigError(f"disk tier: {folder} has the journal of another slab")
            undo.pop_all()

    @property
    def is_current(self) -> bool:
        """Whether the open journal is still the slab's journal.

        A compaction replaces it, and a slab may be deleted and made again.
        """
        try:
            now = (self._folder / JOURNAL).stat()
        except OSError:
            return False
        own = os.fstat(self._journal_fd)
        return os.path.samestat(now, own) and own.st_size >= self._at

    def read_on(self) -> None:
        """Apply the records that were appended since the last call.

        Invalid records at the end are left for the next call, because they may be incomplete. An
        invalid record that is followed by a valid one is damaged, and skipped.
        """
        while True:
            records = read_records(self._journal_fd, self._at, PIECE_RECORDS)
            whole = np.flatnonzero(are_valid(records))
            if not len(whole):
                return
            num = int(whole[-1]) + 1
            self._take(records[:num])
            self._at += num * RECORD_BYTES

    def _take(self, records: Records) -> None:
        slots = np.unique(records["slot"][records["slot"] < len(self.rows)]).astype(np.int64)
        self.slots.remove(slots)  # while the rows still have the old keys
        self._found.add(records)
        self.slots.put(slots[self.rows.kinds[slots] == RecordKind.PUT])

    def close(self) -> None:
        os.close(self.data_fd)
        os.close(self._journal_fd)


class DiskReader(StorageTier):
    """Read-only storage tier over a slab that another process owns.

    The owner decides which blocks are kept. Every block is verified when it is read. No method
    raises for errors of the disk.

    Args:
        options: settings of the owner; ``path`` may be created later.
        group: shape of the blocks.
        system: calls to the operating system; for tests.
        name: name of the tier.
    """

    facts = StorageFacts(reaches=frozenset({"host", "cpu"}), evicts=True, finds_at_once=True)

    def __init__(
        self,
        options: DiskOptions,
        group: KVGroup,
        system: DiskSystem | None = None,
        name: str = DISK,
    ) -> None:
        self.name = name
        self.bytes_per_block = group.bytes_per_block
        self._options = options
        self._wanted = wanted(options, group)
        self._sealing = make_sealing(options, group)
        self._system = system or DiskSystem()
        self._health = DiskHealth(
            str(options.path), ["read"], options.errors_until_off, time.monotonic
        )
        num_slots = options.bounce_bytes // self._wanted.slot_bytes
        self._bounce = Bounce(num_slots, self._wanted.slot_bytes)
        self._slab: FollowedSlab | None = None
        self._engine: IoEngine | None = None
        self._lock = Lock()  # protects the slab's table
        self._reading = Lock()  # held while its data is read
        self._decoding = Lock()  # held while blocks are in the buffer of the decryption

    @property
    def num_blocks(self) -> int:
        return self._wanted.num_slots

    def find(self, keys: Sequence[BlockKey], timeout_s: float = inf) -> list[Outcome]:
        is_free = self._reading.acquire(blocking=False)
        try:
            with self._lock:
                slab = self._followed(may_open=is_free)
                if slab is None or not self._health.breaker.is_passable:
                    return [Outcome.ABSENT] * len(keys)
                slots = slab.slots.find(as_keys(list(keys)))
        finally:
            if is_free:
                self._reading.release()
        return [Outcome.THERE if slot >= 0 else Outcome.ABSENT for slot in slots.tolist()]

    def get(
        self, keys: Sequence[BlockKey], blocks: Pieces, timeout_s: float = inf
    ) -> list[Outcome]:
        ends_at = time.monotonic() + min(timeout_s, self._options.read_deadline_s)
        if self._sealing is None:
            return self._read(keys, blocks, ends_at)

        def read(at: list[int], rows: Pieces) -> list[Outcome]:
            return self._read([keys[each] for each in at], rows, ends_at)

        with self._decoding:
            return self._sealing.load(keys, blocks, read)

    def _read(self, keys: Sequence[BlockKey], blocks: Pieces, ends_at: float) -> list[Outcome]:
        """Read and verify blocks as they are in their slots."""
        with self._reading:
            with self._lock:
                slab = self._followed(may_open=True)
                if slab is None or not self._health.breaker.enter():
                    return [Outcome.FAILED] * len(keys)
                slots = slab.slots.find(as_keys(list(keys)))
                at = np.flatnonzero(slots >= 0)
                records = slab.rows.of(slots[at])
                port = self._port(slab)
            done, crcs = port.read(slots[at], blocks.pick(at), np.ones(len(at), bool), ends_at)
            self._health.note("read", done)
            is_right = (crcs == records["data_crc"]) & (done == self._wanted.slot_bytes)
            with self._lock:
                is_as_it_was = np.zeros(len(records), bool)  # not rewritten while it was read
                with contextlib.suppress(OSError):
                    slab.read_on()
                    is_as_it_was = slab.rows.decide(records)
                slab.slots.remove(slots[at[is_as_it_was & ~is_right & (done >= 0)]])
        outcomes = [Outcome.ABSENT] * len(keys)
        for each, num, right, same in zip(at, done, is_right, is_as_it_was, strict=True):
            if num < 0:
                outcomes[each] = Outcome.FAILED
            elif same:
                outcomes[each] = Outcome.THERE if right else Outcome.DAMAGED
        return outcomes

    def _followed(self, may_open: bool) -> FollowedSlab | None:
        """Return the slab, brought up to date; None if it is missing or has another layout.

        may_open: whether the slab may be reopened, because no thread reads its data now.
        """
        try:
            if self._slab is not None and self._slab.is_current:
                self._slab.read_on()
                return self._slab
        except OSError as error:
            logger.warning("journal not read path=%s error=%s", self.path, error)
        if not may_open:
            return None
        self._leave()
        try:
            slab = FollowedSlab(self._options.path)
        except (CacheError, OSError):
            return None
        found, want = slab.superblock, self._wanted
        if (found.layout, found.block_bytes) != (want.layout, want.block_bytes):
            slab.close()
            return None
        self._slab = slab
        return slab

    def _port(self, slab: FollowedSlab) -> BlockPort:
        if self._engine is None:
            self._engine = self._system.open_engine(
                slab.data_fd, self._options.io, [self._bounce.memory], self._options.queue_depth
            )
        return BlockPort(self._engine, self._bounce, self._wanted.block_bytes)

    def _leave(self) -> None:
        engine, self._engine = self._engine, None
        slab, self._slab = self._slab, None
        if engine is not None:
            engine.close()
        if slab is not None:
            slab.close()

    def put(
        self, names: Sequence[BlockName], blocks: Pieces, timeout_s: float = inf
    ) -> list[Outcome]:
        return [Outcome.FAILED] * len(names)

    def drop(self, keys: Sequence[BlockKey], for_good: bool = False) -> None:
        """Do nothing: the slab's owner drops blocks."""

    def findings(self) -> list[Finding]:
        state = self._health.state()
        return [Finding("disk tier", "read only", state or f"written by the owner of {self.path}")]

    @property
    def path(self) -> str:
        return str(self._options.path)

    def close(self) -> None:
        with self._reading, self._lock:
            self._leave()
