"""Report on a slab without owning it, for ``kvtier inspect``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.core.errors import TierError
from kvtier.core.system.private_files import open_file
from kvtier.tiers.disk.arrays import Uint32s
from kvtier.tiers.disk.format.folder import JOURNAL, LOCK, owner_of
from kvtier.tiers.disk.format.limits import check_journal, check_memory, check_sequence
from kvtier.tiers.disk.format.records import RECORD, RecordKind, Records, as_words, pick
from kvtier.tiers.disk.format.superblock import Superblock
from kvtier.tiers.disk.opening import check_same_slab, read_superblock
from kvtier.tiers.disk.recovery import JournalFacts, newest, read_pieces, stored

AGES = (
    ("1 minute", 60),
    ("10 minutes", 600),
    ("1 hour", 3600),
    ("6 hours", 6 * 3600),
    ("1 day", 86400),
    ("1 week", 7 * 86400),
    ("30 days", 30 * 86400),
)


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """Blocks of one namespace.

    digest: hexadecimal; "" if the journal does not have it. longest_blocks: blocks of the longest
    prefix. oldest_at, newest_at: unix time of the writes.
    """

    digest: str
    num_blocks: int
    num_bytes: int
    longest_blocks: int
    oldest_at: int
    newest_at: int


@dataclass(frozen=True, slots=True)
class AgeReport:
    """Blocks that were written less than ``below`` ago, but not in the range of the row before."""

    below: str
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SlabReport:
    """Content of ``kvtier inspect`` for one slab.

    owner: the process that has the slab open, if any. The figures are a snapshot then.
    num_blocks: number of blocks that a restart would find.
    num_superseded: number of slots with an older copy of a block.
    num_dead: number of superseded records.
    num_damaged: number of records with a wrong checksum.
    """

    path: str
    slab_id: str
    format_version: int
    layout: str
    description: str
    rank: int
    num_ranks: int
    made_at: int
    owner: str | None
    is_clean: bool
    num_whole_superblocks: int
    block_bytes: int
    slot_bytes: int
    num_slots: int
    capacity_bytes: int
    num_blocks: int
    used_bytes: int
    num_superseded: int
    num_quarantined: int
    journal_bytes: int
    num_records: int
    num_dead: int
    num_damaged: int
    namespaces: tuple[NamespaceReport, ...]
    ages: tuple[AgeReport, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """Content of superblock and journal. table: deciding record of each slot that has one."""

    superblock: Superblock
    num_whole: int
    found: JournalFacts
    table: Records
    journal_bytes: int


NAME_A_SLAB = (
    "name the directory that a server has as disk_path, or one of its rank0, rank1, ... under vLLM "
    "and SGLang"
)
"""Advice in error messages if the given path is not a slab."""


def read_content(folder: Path) -> Content:
    """Read a slab that another process may be writing to.

    Raises ``ConfigError`` if there is no slab, ``TierError`` if it can't be read.
    """
    superblock, num_whole = read_superblock(folder, NAME_A_SLAB)
    found = JournalFacts(superblock.num_slots)
    try:
        fd = open_file(folder / JOURNAL, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            check_journal(folder, size, superblock.num_slots)
            num_bytes = sum(end - start for start, end in stored(fd, size))
            check_memory(folder, 3 * num_bytes, "the journal")
            pieces = read_pieces(folder, fd, size, superblock.num_slots)
            records = np.concatenate([np.zeros(0, RECORD), *map(found.take, pieces)])
        finally:
            os.close(fd)
    except OSError as error:
        raise TierError("disk", f"read {folder / JOURNAL}", str(error)) from error
    check_same_slab(folder, superblock, found)
    check_sequence(folder, found.next_seq)
    table = pick(records, newest(records["slot"][:, np.newaxis], records["seq"]))
    return Content(superblock, num_whole, found, table, size)


def report_slab(folder: Path, now: float) -> SlabReport:
    """Return a report on the slab in ``folder``, without changing it. now: unix time, for ages.

    Raises the same errors as ``read_content``.
    """
    content = read_content(folder)
    superblock, found = content.superblock, content.found
    live = content.table[content.table["kind"] == RecordKind.PUT]
    blocks = pick(live, newest(as_words(live["key"]), live["seq"]))
    num_live = len(live)
    num_bad = int((content.table["kind"] == RecordKind.BAD).sum())
    has_header = found.generation is not None
    return SlabReport(
        path=str(folder),
        slab_id=superblock.slab_id.hex(),
        format_version=superblock.version,
        layout=superblock.layout,
        description=superblock.description,
        rank=superblock.rank,
        num_ranks=superblock.num_ranks,
        made_at=superblock.made_at,
        owner=_owner(folder),
        is_clean=superblock.is_clean,
        num_whole_superblocks=content.num_whole,
        block_bytes=superblock.block_bytes,
        slot_bytes=superblock.slot_bytes,
        num_slots=superblock.num_slots,
        capacity_bytes=superblock.num_slots * superblock.slot_bytes,
        num_blocks=len(blocks),
        used_bytes=len(blocks) * superblock.slot_bytes,
        num_superseded=num_live - len(blocks),
        num_quarantined=num_bad,
        journal_bytes=content.journal_bytes,
        num_records=found.num_records,
        num_dead=found.num_records - num_live - num_bad - len(found.namespaces) - has_header,
        num_damaged=found.num_invalid,
        namespaces=tuple(_namespaces(blocks, found.namespaces, superblock.slot_bytes)),
        ages=tuple(_ages(blocks["time"], now, superblock.slot_bytes)),
    )


def _owner(folder: Path) -> str | None:
    try:
        return owner_of(folder)
    except OSError as error:
        raise TierError("disk", f"read {folder / LOCK}", str(error)) from error


def _namespaces(
    blocks: Records, names: dict[int, bytes], slot_bytes: int
) -> Iterator[NamespaceReport]:
    """Yield a report per namespace, the one with the most blocks first."""
    numbers, inverse, counts = np.unique(
        blocks["namespace"], return_inverse=True, return_counts=True
    )
    oldest = np.full(len(numbers), np.iinfo(np.int64).max)
    newest = np.zeros(len(numbers), np.int64)
    deepest = np.zeros(len(numbers), np.int64)
    np.minimum.at(oldest, inverse, blocks["time"])
    np.maximum.at(newest, inverse, blocks["time"])
    np.maximum.at(deepest, inverse, blocks["depth"])
    for at in np.argsort(-counts, kind="stable").tolist():
        yield NamespaceReport(
            digest=names.get(int(numbers[at]), b"").hex(),
            num_blocks=int(counts[at]),
            num_bytes=int(counts[at]) * slot_bytes,
            longest_blocks=int(deepest[at]) + 1,
            oldest_at=int(oldest[at]),
            newest_at=int(newest[at]),
        )


def _ages(times: Uint32s, now: float, slot_bytes: int) -> Iterator[AgeReport]:
    ages = now - times.astype(np.float64)
    limits = np.array([seconds for _, seconds in AGES])
    counts = np.bincount(np.searchsorted(limits, ages, "right"), minlength=len(AGES) + 1)
    for label, count in zip([*(label for label, _ in AGES), "older"], counts, strict=True):
        yield AgeReport(label, int(count), int(count) * slot_bytes)
