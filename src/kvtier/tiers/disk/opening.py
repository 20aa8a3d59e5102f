"""Open or make a slab: what is there must be what was asked for, and must be understood."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.errors import ConfigError, TierError
from kvtier.layout import KVGroup
from kvtier.tiers.disk.bounce import ALIGNMENT
from kvtier.tiers.disk.folder import (
    DATA,
    JOURNAL,
    LOCK,
    NEW_JOURNAL,
    NEW_SUPERBLOCK,
    SUPERBLOCK,
    OwnerLock,
    make_folder,
    open_data,
    open_file,
)
from kvtier.tiers.disk.limits import (
    BYTES_PER_SLOT,
    DELETE_OR_MOVE,
    as_far_as_data,
    check_memory,
    check_room,
    check_sequence,
    check_superblock,
)
from kvtier.tiers.disk.options import DiskOptions
from kvtier.tiers.disk.records import RECORD_BYTES, seal
from kvtier.tiers.disk.replay import SLAB_ID_BYTES, Replay, read_journal, replay
from kvtier.tiers.disk.slab import Slab, SlabFiles, header, write_superblock
from kvtier.tiers.disk.superblock import (
    FORMAT_VERSION,
    HALF_BYTES,
    Superblock,
    decode_both,
    describe,
)
from kvtier.tiers.disk.system import DiskSystem, read_at

logger = logging.getLogger(__name__)


def wanted(options: DiskOptions, group: KVGroup, num_parts: int = 1) -> Superblock:
    """The slab that these settings ask for. num_parts: into which a block of ``group`` is cut."""
    part_bytes, rest = divmod(group.bytes_per_block, num_parts)
    if rest:
        raise ConfigError(
            f"disk tier: a block of {group.bytes_per_block} bytes can't be cut into {num_parts} "
            "equal parts; give another number of directories, or another block_size"
        )
    slot_bytes = -(-part_bytes // ALIGNMENT) * ALIGNMENT
    num_slots = options.capacity_bytes // slot_bytes
    if num_slots < 1:
        raise ConfigError(
            f"disk tier: a capacity of {options.capacity_bytes} bytes is below one block "
            f"({slot_bytes} bytes); raise capacity_bytes"
        )
    check_room(num_slots, slot_bytes)
    return Superblock(
        slot_bytes=slot_bytes,
        block_bytes=part_bytes,
        num_slots=num_slots,
        rank=options.rank,
        num_ranks=options.num_ranks,
        layout=group.fingerprint,
        description=describe(group),
        slab_id=secrets.token_bytes(SLAB_ID_BYTES),
        made_at=int(time.time()),
    )


def open_slab(
    folder: Path,
    want: Superblock | None,
    system: DiskSystem,
    clock: Callable[[], float] = time.time,
) -> Slab:
    """Open the slab in ``folder``, or make it where the folder is empty or missing.

    want: what it must be; None: whatever is there, as far as there is data.
    Raises ``ConfigError`` where another process owns it, where it is another slab than wanted,
    where the device is too full, and ``TierError`` where the system refuses.
    """
    if want is None:
        read_superblock(folder)  # never make a directory where there is nothing to open
    make_folder(folder)
    try:
        lock = OwnerLock(folder)
    except OSError as error:
        raise TierError("disk", f"open {folder}", str(error)) from error
    try:
        with contextlib.ExitStack() as undo:
            undo.callback(lock.close)
            if want is not None and _is_new(folder):
                _make(folder, want, system)
            current, num_whole = read_superblock(folder)
            if want is not None:
                _compare(folder, current, want)
            want = want or as_far_as_data(folder, current)
            check_memory(folder, want.num_slots * BYTES_PER_SLOT, "the table")
            slab = _recover(folder, lock, current, num_whole, want, system, clock, undo)
            undo.pop_all()
            return slab
    except OSError as error:
        raise TierError("disk", f"open {folder}", str(error)) from error


# -- a new one -------------------------------------------------------------------------------------


def _is_new(folder: Path) -> bool:
    """Nothing there, or a slab whose making was interrupted: its superblock comes last."""
    there = {each.name for each in folder.iterdir()} - {LOCK}
    return not there or (NEW_SUPERBLOCK in there and SUPERBLOCK not in there)


def _make(folder: Path, want: Superblock, system: DiskSystem) -> None:
    created = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    fds: list[int] = []
    try:
        fds.append(new := open_file(folder / NEW_SUPERBLOCK, created))
        fds.append(data := open_file(folder / DATA, created))
        system.reserve(data, want.slot_bytes * want.num_slots)
        fds.append(journal := open_file(folder / JOURNAL, created))
        first = header(want.slab_id, want.generation)
        seal(first)
        system.write_at(journal, first.tobytes(), 0)
        system.sync(data)
        system.sync(journal)
        for epoch in (0, 1):
            clean = dataclasses.replace(
                want, epoch=epoch, is_clean=True, journal_bytes=RECORD_BYTES
            )
            write_superblock(new, clean, system)
        system.replace(folder / NEW_SUPERBLOCK, folder / SUPERBLOCK)
    except OSError as error:
        for name in (JOURNAL, DATA, NEW_SUPERBLOCK):
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _too_full(folder, want, error) from error
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _too_full(folder: Path, want: Superblock, error: OSError) -> ConfigError:
    return ConfigError(
        f"disk tier: a capacity of {want.slot_bytes * want.num_slots / 2**30:.2f} GiB does not fit "
        f"into {folder}: {error.strerror} ({shutil.disk_usage(folder).free / 2**30:.2f} GiB are "
        "free); lower capacity_bytes or choose another path"
    )


# -- one that is there -----------------------------------------------------------------------------


def read_superblock(folder: Path) -> tuple[Superblock, int]:
    """The superblock in force, and how many of the two are whole.

    Raises ``ConfigError`` where there is none, or none that this version reads, or one whose
    numbers can't be.
    """
    try:
        fd = open_file(folder / SUPERBLOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"disk tier: {folder} holds no slab (its file {SUPERBLOCK} is missing); "
            "choose an empty directory or one that does not exist yet"
        ) from error
    except OSError as error:
        raise TierError("disk", f"open {folder}", str(error)) from error
    try:
        current, num_whole = decode_both(read_at(fd, 2 * HALF_BYTES, 0))
    finally:
        os.close(fd)
    if current is None:
        raise ConfigError(
            f"disk tier: both superblocks of {folder} are damaged, so that its blocks can't be "
            f"told apart; {DELETE_OR_MOVE}"
        )
    if current.version != FORMAT_VERSION:
        raise ConfigError(
            f"disk tier: the slab in {folder} has format version {current.version}, this kvtier "
            f"reads {FORMAT_VERSION}; {DELETE_OR_MOVE}"
        )
    check_superblock(folder, current)
    return current, num_whole


def _compare(folder: Path, found: Superblock, want: Superblock) -> None:
    different = [
        f"{name} is {theirs}, wanted {ours}"
        for name, theirs, ours in (
            ("layout", found.layout, want.layout),
            ("bytes per block", found.block_bytes, want.block_bytes),
            ("bytes per slot", found.slot_bytes, want.slot_bytes),
            ("rank", f"{found.rank} of {found.num_ranks}", f"{want.rank} of {want.num_ranks}"),
        )
        if theirs != ours
    ]
    if different:
        layouts = "" if found.layout == want.layout else f" It holds {found.description}."
        raise ConfigError(
            f"disk tier: {folder} holds a slab of something else: {'; '.join(different)}.{layouts} "
            f"To go on, {DELETE_OR_MOVE}"
        )


def _recover(
    folder: Path,
    lock: OwnerLock,
    current: Superblock,
    num_whole: int,
    want: Superblock,
    system: DiskSystem,
    clock: Callable[[], float],
    undo: contextlib.ExitStack,
) -> Slab:
    with contextlib.suppress(FileNotFoundError):
        (folder / NEW_JOURNAL).unlink()
    superblock_fd = open_file(folder / SUPERBLOCK, os.O_RDWR)
    undo.callback(os.close, superblock_fd)
    data_fd, is_direct = open_data(folder / DATA, os.O_RDWR | os.O_CREAT)
    undo.callback(os.close, data_fd)
    journal_fd = open_file(folder / JOURNAL, os.O_RDWR | os.O_CREAT)
    undo.callback(os.close, journal_fd)

    most_slots = max(current.num_slots, want.num_slots)
    records, journal_bytes = read_journal(folder, journal_fd, most_slots)
    found = replay(records, want.num_slots)
    check_same_slab(folder, current, found)
    check_sequence(folder, found.next_seq)
    data_bytes = os.fstat(data_fd).st_size
    # Unverified data is believed only where nothing at all is out of order.
    is_trusted = (
        num_whole == 2
        and is_in_order(current, found, journal_bytes)
        and data_bytes >= current.slot_bytes * current.num_slots
    )
    try:
        _fit(data_fd, data_bytes, want, system)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _too_full(folder, want, error) from error
        raise
    whole = journal_bytes // RECORD_BYTES * RECORD_BYTES
    if whole != journal_bytes:
        system.truncate(journal_fd, whole)
    slab = Slab(
        folder,
        lock,
        dataclasses.replace(current, num_slots=want.num_slots),
        found,
        SlabFiles(data_fd, is_direct, superblock_fd, journal_fd, whole),
        is_trusted,
        system,
        clock,
    )
    is_journal_whole = (
        not found.num_invalid and not found.num_beyond and found.generation is not None
    )
    if want.num_slots != current.num_slots or not is_journal_whole:
        # Records that are damaged or of slots that are gone must not speak up again later.
        slab.compact()
    slab.mark_open()
    if data_bytes > want.num_slots * want.slot_bytes:
        system.truncate(data_fd, want.num_slots * want.slot_bytes)
    if found.num_invalid:
        logger.warning("journal had damaged records path=%s num=%d", folder, found.num_invalid)
    return slab


def is_in_order(current: Superblock, found: Replay, journal_bytes: int) -> bool:
    """The slab was closed, and the journal is as it was then."""
    return (
        current.is_clean
        and found.num_invalid == 0
        and found.generation == current.generation
        and journal_bytes == current.journal_bytes
    )


def check_same_slab(folder: Path, current: Superblock, found: Replay) -> None:
    """Raise ``ConfigError`` where the journal is that of another slab."""
    if found.slab_id is not None and found.slab_id != current.slab_id:
        raise ConfigError(
            f"disk tier: the journal in {folder} is that of another slab "
            f"({found.slab_id.hex()}, superblock: {current.slab_id.hex()}); {DELETE_OR_MOVE}"
        )


def _fit(data_fd: int, data_bytes: int, want: Superblock, system: DiskSystem) -> None:
    """Have room for every slot; a file that was cut gets it back."""
    needed = want.slot_bytes * want.num_slots
    if data_bytes < needed:
        system.reserve(data_fd, needed)
