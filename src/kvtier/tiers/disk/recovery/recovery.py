"""Recovery of the content of every slot from the journal, a piece at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.tiers.disk.format.journal import read_records
from kvtier.tiers.disk.format.limits import check_journal
from kvtier.tiers.disk.format.records import (
    RECORD_BYTES,
    RecordKind,
    Records,
    are_valid,
    as_words,
    pick,
)
from kvtier.tiers.disk.format.rows import SlotRows, zeros
from kvtier.tiers.disk.recovery.replay import SLAB_ID_BYTES, name_numbers, stored

PIECE_RECORDS: Final = 1 << 16
"""Records per piece, 4 MiB: the intermediate arrays stay in the CPU's caches."""
AGE_STEP_S: Final = 60
"""Blocks written within this time are equally old. The blocks of a prompt are written over some
time, first ones first; without this step a prefix would be evicted before its continuation."""

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]


class Recovery:
    """State of ``num_slots`` slots according to a journal, whose bytes may be arbitrary.

    rows: deciding record of each slot; kind 0 if there is none.
    ages: uint64 [num_slots], ages of slots with a block; the lowest one is evicted first.
    namespaces: digest by number.
    last_number: highest namespace number of the slots' records.
    num_records: number of valid records.
    num_invalid: number of records with a wrong checksum or version.
    num_beyond: number of records of slots that the slab does not have.
    generation, slab_id: from the header; None without one.
    """

    def __init__(self, num_slots: int) -> None:
        self.rows = SlotRows(num_slots)
        self.ages: Uint64s = np.asarray(zeros(num_slots, np.uint64), np.uint64)
        self.namespaces: dict[int, bytes] = {}
        self.last_number = 0
        self.num_records = 0
        self.num_invalid = 0
        self.num_beyond = 0
        self.generation: int | None = None
        self.slab_id: bytes | None = None
        self._highest_seq = 0

    @property
    def next_seq(self) -> int:
        """Sequence number after the highest one of all records."""
        return self._highest_seq + 1

    def add(self, records: Records) -> None:
        """Apply the next records of the journal."""
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
        self.namespaces |= name_numbers(pick(records, np.flatnonzero(kind == RecordKind.NAMESPACE)))
        is_about = (kind == RecordKind.PUT) | (kind == RecordKind.DEL) | (kind == RecordKind.BAD)
        is_known = is_about & (records["slot"] < len(self.rows))
        self.num_beyond += int(is_about.sum()) - int(is_known.sum())
        highest_before = self._highest_seq
        seqs = np.where(kind == RecordKind.HEADER, 0, records["seq"])
        self._highest_seq = max(highest_before, int(seqs.max(initial=0)))
        if not is_known.all():
            records = pick(records, np.flatnonzero(is_known))
        self._decide(records, highest_before)

    def _decide(self, records: Records, highest_before: int) -> None:
        """Apply records of slots: the highest sequence number decides, of equal ones the last."""
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
    """Replay the open journal in ``folder``.

    A partial record at the end is skipped. A hole in the file, of any size, is one damaged record.

    Args:
        folder: directory of the slab, for messages.
        fd: descriptor of the journal.
        journal_slots: number of slots that limits the journal's size.
        num_slots: number of slots to recover.

    Returns:
        The state, and the journal's size in bytes.

    Raises:
        ConfigError: the journal is larger than that of ``journal_slots`` slots can be.
    """
    size = os.fstat(fd).st_size
    check_journal(folder, size, journal_slots)
    found = Recovery(num_slots)
    for start, end in stored(fd, size // RECORD_BYTES * RECORD_BYTES):
        for at in range(start, end, PIECE_RECORDS * RECORD_BYTES):
            num_records = min(PIECE_RECORDS, (end - at) // RECORD_BYTES)
            records = read_records(fd, at, num_records)
            found.add(records)
            if len(records) < num_records:
                return found, size  # the file was cut short meanwhile
    return found, size


def newest(rows: SlotRows, slots: Int64s) -> Int64s:
    """Return per key the slot with the highest sequence number, ascending by slot."""
    words = as_words(rows.keys[slots])
    seqs = rows.seqs(slots)
    order = np.lexsort((seqs, *(words[:, column] for column in (3, 2, 1, 0))))
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    return np.sort(slots[order[is_last]])
