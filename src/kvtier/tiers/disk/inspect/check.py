"""Verification and repair of a slab that no process uses: ``kvtier verify``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.core.errors import TierError
from kvtier.core.types import IoKind
from kvtier.tiers.disk.arrays import Bools, Int64s
from kvtier.tiers.disk.bounce import Bounce
from kvtier.tiers.disk.format.folder import DATA, OwnerLock, open_data
from kvtier.tiers.disk.format.limits import check_memory
from kvtier.tiers.disk.format.records import RecordKind, Records, pick
from kvtier.tiers.disk.format.superblock import Superblock
from kvtier.tiers.disk.inspect.report import NAME_A_SLAB, Content, read_content
from kvtier.tiers.disk.inspect.scrub import check_blocks
from kvtier.tiers.disk.opening import open_slab, read_superblock
from kvtier.tiers.disk.sealing import ENCRYPTED
from kvtier.tiers.disk.system import DiskSystem

BUFFER_BYTES = 16 << 20
DEADLINE_S = 60.0

Progress = Callable[[int, int], None]
"""Called with the number of blocks done, and of all blocks."""


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that does not match its record.

    key, namespace: hexadecimal. reason: "checksum", "short" (the file ends before the block's end)
    or "unreadable".
    """

    slot: int
    key: str
    namespace: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of ``kvtier verify``.

    num_quarantined: number of quarantined slots before the repair.
    num_released: number of those that can be read again, and were released.
    is_repaired: whether everything reported here has been repaired.
    is_encrypted: whether the blocks are encrypted; what they decrypt to was not looked at.
    """

    path: str
    num_blocks: int
    num_bytes: int
    bad_blocks: tuple[BadBlock, ...]
    num_damaged_records: int
    num_whole_superblocks: int
    was_clean: bool
    num_quarantined: int
    num_released: int
    is_repaired: bool
    is_encrypted: bool

    @property
    def is_right(self) -> bool:
        """Whether no error was found. It is no error if the slab was not closed in order."""
        return not (self.bad_blocks or self.num_damaged_records or self.num_whole_superblocks < 2)


def check_slab(
    folder: Path,
    repair: bool,
    progress: Progress = lambda _done, _all: None,
    system: DiskSystem | None = None,
) -> CheckReport:
    """Compare the checksum of every block.

    Args:
        folder: directory of the slab.
        repair: whether to drop damaged blocks, compact the journal, and release quarantined slots
            that can be read again.
        progress: called after each batch of blocks.
        system: calls to the operating system; for tests.

    Raises:
        ConfigError: there is no slab, or a process uses it.
        TierError: a system call failed.
    """
    system = system or DiskSystem()
    read_superblock(folder, NAME_A_SLAB)  # never create a lock file if there is no slab
    try:
        lock = OwnerLock(folder)
    except OSError as error:
        raise TierError("disk", f"open {folder}", str(error)) from error
    try:
        content = read_content(folder)
        checked = _check(folder, content, progress, system)
    except OSError as error:
        raise TierError("disk", f"read {folder}", str(error)) from error
    finally:
        lock.close()
    num_released = _repair(folder, checked, system) if repair else 0
    return CheckReport(
        path=str(folder),
        num_blocks=len(checked.live),
        num_bytes=len(checked.live) * content.superblock.slot_bytes,
        bad_blocks=tuple(_bad_blocks(checked, content)),
        num_damaged_records=content.found.num_invalid,
        num_whole_superblocks=content.num_whole,
        was_clean=content.superblock.is_clean,
        num_quarantined=len(checked.quarantined),
        num_released=num_released,
        is_repaired=repair,
        is_encrypted=content.superblock.layout.endswith(ENCRYPTED),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Checked:
    """Records of blocks and of quarantined slots, with the results of reading them.

    readable: which of the quarantined slots can be read again.
    """

    live: Records
    done: Int64s
    right: Bools
    quarantined: Records
    readable: Bools


def _check(folder: Path, content: Content, progress: Progress, system: DiskSystem) -> _Checked:
    superblock, table = content.superblock, content.table
    live = pick(table, np.flatnonzero(table["kind"] == RecordKind.PUT))
    quarantined = pick(table, np.flatnonzero(table["kind"] == RecordKind.BAD))
    fd, _ = open_data(folder / DATA, os.O_RDONLY)
    try:
        check_memory(folder, superblock.slot_bytes, "a block")
        done, right = _read(fd, superblock, live, progress, system)
        again, _ = _read(fd, superblock, quarantined, lambda _done, _all: None, system)
    finally:
        os.close(fd)
    return _Checked(live, done, right, quarantined, again == superblock.slot_bytes)


def _read(
    fd: int, superblock: Superblock, records: Records, progress: Progress, system: DiskSystem
) -> tuple[Int64s, Bools]:
    done, right = np.zeros(len(records), np.int64), np.zeros(len(records), bool)
    bounce = Bounce(BUFFER_BYTES // superblock.slot_bytes, superblock.slot_bytes)
    engine = system.open_engine(fd, IoKind.AUTO, [bounce.memory], bounce.num_slots)
    try:
        for start in range(0, len(records), bounce.num_slots):
            part = slice(start, start + bounce.num_slots)
            done[part], right[part] = check_blocks(
                engine, bounce, records[part], superblock.block_bytes, DEADLINE_S
            )
            progress(min(start + bounce.num_slots, len(records)), len(records))
    finally:
        engine.close()
    return done, right


def _repair(folder: Path, checked: _Checked, system: DiskSystem) -> int:
    """Repair a slab; return how many quarantined slots were released."""
    slab = open_slab(folder, system)
    is_done = False
    try:
        unreadable = checked.live[checked.done < 0]
        slab.mark_bad(unreadable["slot"].astype(np.int64))
        wrong = checked.live[~checked.right & (checked.done >= 0)]
        # Slots beyond the end of the file are not part of the opened slab.
        slab.delete_if_unchanged(wrong[wrong["slot"] < len(slab.table)])
        released = slab.delete_if_unchanged(checked.quarantined[checked.readable])
        slab.compact()
        is_done = True
    except OSError as error:
        raise TierError("disk", f"repair {folder}", str(error)) from error
    finally:
        slab.close(clean=is_done)
    return len(released)


def _bad_blocks(checked: _Checked, content: Content) -> list[BadBlock]:
    bad, slot_bytes = [], content.superblock.slot_bytes
    for at in np.flatnonzero(~checked.right).tolist():
        record, done = checked.live[at], int(checked.done[at])
        reason = "unreadable" if done < 0 else "short" if done < slot_bytes else "checksum"
        namespace = content.found.namespaces.get(int(record["namespace"]), b"").hex()
        bad.append(BadBlock(int(record["slot"]), record["key"].tobytes().hex(), namespace, reason))
    return bad
