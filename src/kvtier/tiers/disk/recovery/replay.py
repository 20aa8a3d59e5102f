"""Replay of a whole journal in memory, for tools, and as a reference for ``recovery``."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.tiers.disk.format.limits import check_journal, check_memory
from kvtier.tiers.disk.format.records import (
    RECORD,
    RECORD_BYTES,
    RecordKind,
    Records,
    are_valid,
    as_words,
    key_prefixes,
    pick,
)

SLAB_ID_BYTES = 16
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Content of a journal.

    table: ``RECORD`` [num_slots], the deciding record of each slot; kind 0 if there is none. The
        table of ``replay_named`` has only the deciding records, ascending by slot.
    namespaces: digest by number.
    next_seq: sequence number after the highest one of all records.
    num_records: number of valid records.
    num_invalid: number of records with a wrong checksum or version.
    num_beyond: number of records of slots that the slab does not have.
    generation, slab_id: from the header; None without one.
    """

    table: Records
    namespaces: dict[int, bytes]
    next_seq: int
    num_records: int
    num_invalid: int
    num_beyond: int
    generation: int | None
    slab_id: bytes | None


def read_journal(folder: Path, fd: int, num_slots: int) -> tuple[Records, int]:
    """Return all whole records of the open journal in ``folder``, and its size in bytes.

    A partial record at the end is skipped. A hole in the file, of any size, is one damaged record,
    so holes cost no memory or time.

    Args:
        folder: directory of the slab, for messages.
        fd: descriptor of the journal.
        num_slots: number of slots that limits the journal's size.

    Raises:
        ConfigError: the journal is larger than that of ``num_slots`` slots can be, or than the free
            memory.
    """
    size = os.fstat(fd).st_size
    check_journal(folder, size, num_slots)
    pieces = list(stored(fd, size // RECORD_BYTES * RECORD_BYTES))
    num_records = sum(end - start for start, end in pieces) // RECORD_BYTES
    check_memory(folder, 3 * num_records * RECORD_BYTES, "the journal")
    records = np.empty(num_records, RECORD)
    view = memoryview(records.view(np.uint8).data)
    done = 0
    for start, end in pieces:
        while start < end and (got := os.preadv(fd, [view[done : done + end - start]], start)):
            start, done = start + got, done + got
        if start < end:
            break  # the file was cut short meanwhile
    return records[: done // RECORD_BYTES], size


def stored(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a file of ``size`` bytes that have content, in whole records.

    The first record of each hole is part of a range, too.
    """
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


def replay(records: Records, num_slots: int) -> Replay:
    """Replay ``records``, which may be arbitrary bytes, over ``num_slots`` slots."""
    found = replay_named(records, num_slots)
    if len(found.table) == num_slots:
        return found
    table = np.zeros(num_slots, RECORD)
    rows = found.table.view("<u8").reshape(-1, 8)
    table.view("<u8").reshape(num_slots, 8)[found.table["slot"].astype(np.int64)] = rows
    return replace(found, table=table)


def replay_named(records: Records, num_slots: int) -> Replay:
    """Replay ``records`` for the slots that they name; other slots cost nothing."""
    num_all = len(records)
    valid = are_valid(records)
    if not valid.all():
        records = pick(records, np.flatnonzero(valid))
    kind = np.ascontiguousarray(records["kind"])
    headers = records[:1][kind[:1] == RecordKind.HEADER]
    named = pick(records, np.flatnonzero(kind == RecordKind.NAMESPACE))
    about_slot = (kind == RecordKind.PUT) | (kind == RecordKind.DEL) | (kind == RecordKind.BAD)
    slot = records["slot"].astype(np.int64)
    seq = np.where(kind == RecordKind.HEADER, 0, records["seq"])
    known = about_slot & (slot < num_slots)

    at = np.flatnonzero(known)
    if (seq[at][1:] < seq[at][:-1]).any():
        at = at[np.argsort(seq[at], kind="stable")]
    return Replay(
        table=pick(records, at[_last_of_each(slot[at], num_slots)]),
        namespaces=name_numbers(named),
        next_seq=int(seq.max(initial=0)) + 1,
        num_records=len(records),
        num_invalid=num_all - len(records),
        num_beyond=int((about_slot & ~known).sum()),
        generation=int(headers[0]["seq"]) if len(headers) else None,
        slab_id=headers[0]["key"].tobytes()[:SLAB_ID_BYTES] if len(headers) else None,
    )


def _last_of_each(values: Int64s, num_values: int) -> Int64s:
    """Return the position of the last occurrence of each value, ascending by value."""
    if num_values > 16 * len(values):
        _, last = np.unique(values[::-1], return_index=True)
        return np.asarray(len(values) - 1 - last, np.int64)
    last = np.full(num_values, -1, np.int64)
    last[values] = np.arange(len(values))
    return np.asarray(last[last >= 0])


def name_numbers(named: Records) -> dict[int, bytes]:
    """Return the digest of each namespace number; the last record of a number counts."""
    numbers = named["namespace"].astype(np.int64)
    last = pick(named, _last_of_each(numbers, 1 << 16))
    return {int(each["namespace"]): each["key"].tobytes() for each in last}


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """Blocks of a journal, sorted by the first word of their keys.

    prefixes: uint64 [n], first word of each key, ascending. slots: int64 [n], row of each block.
    """

    prefixes: npt.NDArray[np.uint64]
    slots: Int64s


def recovered(table: Records) -> Recovered:
    """Return the blocks of a table. Of two slots with the same key, the newer record counts."""
    slots = np.flatnonzero(table["kind"] == RecordKind.PUT)
    live = table if len(slots) == len(table) else pick(table, slots)
    prefixes = key_prefixes(live)
    order = np.argsort(prefixes)
    if (prefixes[order[1:]] == prefixes[order[:-1]]).any():
        words = as_words(live["key"])
        order = np.lexsort((live["seq"], *(words[:, column] for column in (3, 2, 1, 0))))
        is_last = np.ones(len(order), bool)
        is_last[:-1] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
        order = order[is_last]
    return Recovered(prefixes[order], slots[order])
