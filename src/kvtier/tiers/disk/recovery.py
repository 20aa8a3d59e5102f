"""Recovery of the content of every slot from the journal, a piece at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.tiers.disk.arrays import Bools, Int64s, Uint64s
from kvtier.tiers.disk.format.journal import read_records
from kvtier.tiers.disk.format.limits import check_journal
from kvtier.tiers.disk.format.records import (
    RECORD_BYTES,
    RecordKind,
    Records,
    are_valid,
    pick,
    same_keys,
)
from kvtier.tiers.disk.format.rows import SlotRows, zeros

SLAB_ID_BYTES: Final = 16
PIECE_RECORDS: Final = 1 << 16
"""Records per piece, 4 MiB: the intermediate arrays stay in the CPU's caches."""
AGE_STEP_S: Final = 60
"""Blocks written within this time are equally old. The blocks of a prompt are written over some
time, first ones first; without this step a prefix would be evicted before its continuation."""
SLICE_SLOTS: Final = 1 << 16
"""Number of slots whose parts are compared at a time."""


class JournalFacts:
    """Counts, names and header of a journal, whose bytes may be arbitrary.

    num_slots: slots of the slab.
    namespaces: digest by number.
    highest_seq: highest sequence number of all records.
    num_records: number of valid records.
    num_invalid: number of records with a wrong checksum or version.
    num_beyond: number of records of slots that the slab does not have.
    generation, slab_id: from the header; None without one.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.namespaces: dict[int, bytes] = {}
        self.highest_seq = 0
        self.num_records = 0
        self.num_invalid = 0
        self.num_beyond = 0
        self.generation: int | None = None
        self.slab_id: bytes | None = None

    @property
    def next_seq(self) -> int:
        """Sequence number after the highest one of all records."""
        return self.highest_seq + 1

    def take(self, records: Records) -> Records:
        """Note the next records of the journal; return the valid ones of slots that exist."""
        valid = are_valid(records)
        num_all = len(records)
        if not valid.all():
            records = pick(records, np.flatnonzero(valid))
        kind = np.ascontiguousarray(records["kind"])
        if self.num_records == 0 and len(records) and kind[0] == RecordKind.HEADER:
            self.generation = int(records[0]["seq"])
            self.slab_id = records[0]["key"].tobytes()[:SLAB_ID_BYTES]
        self.num_records += len(records)
        self.num_invalid += num_all - len(records)
        named = pick(records, np.flatnonzero(kind == RecordKind.NAMESPACE))
        # The last record of a number counts.
        _, from_end = np.unique(named["namespace"][::-1], return_index=True)
        for name in pick(named, len(named) - 1 - from_end):
            self.namespaces[int(name["namespace"])] = name["key"].tobytes()
        is_about = (kind == RecordKind.PUT) | (kind == RecordKind.DEL) | (kind == RecordKind.BAD)
        is_known = is_about & (records["slot"] < self.num_slots)
        self.num_beyond += int(is_about.sum()) - int(is_known.sum())
        seqs = np.where(kind == RecordKind.HEADER, 0, records["seq"])
        self.highest_seq = max(self.highest_seq, int(seqs.max(initial=0)))
        return records if is_known.all() else pick(records, np.flatnonzero(is_known))


class Recovery(JournalFacts):
    """State of ``num_slots`` slots according to a journal.

    rows: deciding record of each slot; kind 0 if there is none.
    ages: uint64 [num_slots], ages of slots with a block; the lowest one is evicted first.
    last_number: highest namespace number of the slots' records.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.rows = SlotRows(num_slots)
        self.ages: Uint64s = np.asarray(zeros(num_slots, np.uint64), np.uint64)
        self.last_number = 0

    def add(self, records: Records) -> None:
        """Apply the next records: the highest sequence number decides, of equal ones the last."""
        highest_before = self.highest_seq
        records = self.take(records)
        seq = np.ascontiguousarray(records["seq"])
        if (seq[1:] < seq[:-1]).any():
            order = np.argsort(seq, kind="stable")
            records, seq = pick(records, order), seq[order]
        if len(seq) and seq[0] < highest_before:
            before = self.rows.seqs(records["slot"].astype(np.int64))
            records = pick(records, np.flatnonzero(seq >= before))
        self.rows.set(records)
        step = (records["time"] // AGE_STEP_S).astype(np.uint64)
        height = (np.uint32(0xFFFFFFFF) - records["depth"]).astype(np.uint64)
        np.put(self.ages, records["slot"].astype(np.int64), (step << np.uint64(32)) | height)
        self.last_number = max(self.last_number, int(records["namespace"].max(initial=0)))


def recover(folder: Path, fd: int, journal_slots: int, num_slots: int) -> tuple[Recovery, int]:
    """Recover ``num_slots`` slots from the open journal in ``folder``.

    Returns the state, and the journal's size in bytes. journal_slots: see ``read_pieces``.
    """
    size = os.fstat(fd).st_size
    found = Recovery(num_slots)
    for records in read_pieces(folder, fd, size, journal_slots):
        found.add(records)
    return found, size


def read_pieces(folder: Path, fd: int, size: int, num_slots: int) -> Iterator[Records]:
    """Yield all whole records of a journal of ``size`` bytes, unverified, a piece at a time.

    A partial record at the end is skipped. A hole in the file, of any size, is one damaged record,
    so holes cost no memory or time.

    folder: directory of the slab, for messages.

    Raises ``ConfigError`` if the journal is larger than that of ``num_slots`` slots can be.
    """
    check_journal(folder, size, num_slots)
    for start, end in stored(fd, size):
        for at in range(start, end, PIECE_RECORDS * RECORD_BYTES):
            num_records = min(PIECE_RECORDS, (end - at) // RECORD_BYTES)
            records = read_records(fd, at, num_records)
            yield records
            if len(records) < num_records:
                return  # the file was cut short meanwhile


def stored(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a journal of ``size`` bytes that have content, in whole records.

    The first record of each hole is part of a range, too.
    """
    size = size // RECORD_BYTES * RECORD_BYTES
    at = 0
    while at < size:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
            hole = os.lseek(fd, data, os.SEEK_HOLE)
        except OSError as error:
            # There is no more content (ENXIO), or the file system does not support SEEK_DATA.
            is_hole = error.errno == errno.ENXIO
            yield at, at + RECORD_BYTES if is_hole else size
            return
        start = min(data // RECORD_BYTES * RECORD_BYTES, size)
        if start > at:
            yield at, at + RECORD_BYTES
        at = min(-(-hole // RECORD_BYTES) * RECORD_BYTES, size)
        if at > start:
            yield start, at


def newest(groups: npt.NDArray[np.generic], seqs: npt.NDArray[np.generic]) -> Int64s:
    """Return the position of the highest number in each group; of equal numbers the last one.

    groups: [n, k]; equal rows are one group. The positions are in the order of the groups.
    """
    order = np.lexsort((seqs, *groups.T))
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (groups[order[1:]] != groups[order[:-1]]).any(axis=1)
    return order[is_last]


def complete(tables: Sequence[SlotRows]) -> Bools:
    """Return the slots in which every part holds the same block of the same write: bool [n].

    The records of all parts have the same sequence number then. tables: rows of each part's slots.
    """
    same: Bools = tables[0].kinds == RecordKind.PUT
    for table in tables[1:]:
        same &= table.kinds == RecordKind.PUT
        for start in range(0, len(table), SLICE_SLOTS):
            part = slice(start, start + SLICE_SLOTS)
            same[part] &= same_keys(table.keys[part], tables[0].keys[part])
            same[part] &= table["seq"][part] == tables[0]["seq"][part]
    return same
